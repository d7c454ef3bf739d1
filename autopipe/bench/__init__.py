"""Measures pipelines, and other libraries, on the same prompts in one run."""

from autopipe.bench.prompts import Prompt, load_prompts
from autopipe.bench.report import Row, Sample, make_rows

__all__ = ["Prompt", "Row", "Sample", "load_prompts", "make_rows"]
