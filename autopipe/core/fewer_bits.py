"""A target that drafts for itself: the same model with its weights in fewer bits.

A step of a model that does not fit the caches takes as long as its weights take to read, and weights in 4 bits are
right nearly as often. Nobody has to own a smaller model with the same tokenizer, and nothing is trained; as everywhere,
what is drafted is verified, so the output stays the target's.
"""

from __future__ import annotations

from autopipe.core.errors import ConfigError
from autopipe.core.plan import FEWER_BITS, Dtype, StagePlan

_LONGEST_NAME = 75
"""Of a stage's 80 characters, what the dtype leaves."""


def in_fewer_bits(target: StagePlan, dtype: str, key: str = "--drafter") -> StagePlan:
    """A drafter: the target's model, device and adapter, weights in `dtype`, on the fastest backend for it.

    Args:
        dtype: one of `FEWER_BITS`.
        key: what an error names.

    Raises:
        ConfigError: another dtype; or a target without weights, with as few bits, or spread by a `device_map`.
    """
    if dtype not in FEWER_BITS:
        raise ConfigError(key, dtype, ", ".join(FEWER_BITS))
    if target.is_ngram or target.is_emulated:
        raise ConfigError(key, dtype, f"a model: {target.model} has no weights")
    if target.dtype == dtype or target.dtype is Dtype.INT4:
        raise ConfigError(key, dtype, f"a cheaper model: the target's own weights are {target.dtype.value}")
    if target.device_map is not None:
        raise ConfigError(key, dtype, "a model of its own: this target is spread by a device_map")
    return StagePlan(
        model=target.model,
        name=f"{target.default_name()[:_LONGEST_NAME]}-{dtype}",
        dtype=Dtype(dtype),
        device=target.device,
        adapter=target.adapter,
        trust_remote_code=target.trust_remote_code,
    )
