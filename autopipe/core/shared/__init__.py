"""Requests that share one target: `SharedEngine`, a drop-in for `Engine` where `reason_unshareable(plan)` is None."""

from autopipe.core.shared.engine import SharedEngine, SharedLoad
from autopipe.core.shared.loading import reason_unshareable
from autopipe.core.shared.options import SharingOptions

__all__ = ["SharedEngine", "SharedLoad", "SharingOptions", "reason_unshareable"]
