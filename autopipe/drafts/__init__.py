"""Drafters that cost almost nothing, made from the target itself."""
