"""What a search may choose from: drafters, adapters, precisions, n-gram tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopipe.core.backends.devices import choose_device
from autopipe.core.backends.load import check_stage, is_drafter
from autopipe.core.errors import ConfigError
from autopipe.core.fewer_bits import in_fewer_bits
from autopipe.core.kernels import has_kernels
from autopipe.core.plan import FEWER_BITS, Dtype, Plan, StagePlan
from autopipe.tune.limits import Limits, device_memory

NGRAM = "ngram"
_KEYS = ("adapter", "dtype", "backend", "device")
_logger = logging.getLogger(__name__)


def parse_drafter(text: str, target: StagePlan, key: str = "--drafter") -> StagePlan:
    """A drafter as on the command line: `MODEL`, or `MODEL,adapter=FOLDER,dtype=fp32`; `int4`: the target's weights.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    if text in FEWER_BITS:
        return in_fewer_bits(target, text, key)
    model, *settings = text.split(",")
    fields: dict[str, Any] = {"model": model}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in _KEYS:
            raise ConfigError(key, text, f"MODEL, or MODEL,KEY=VALUE with the keys {', '.join(_KEYS)}")
        fields[name] = value
    try:
        return StagePlan.parse(fields)
    except ConfigError as error:
        raise ConfigError(key, text, f"{error.key} as {error.allowed}") from None


def shipped_tables(target: StagePlan) -> list[str]:
    """Names of learned n-gram tables that come with AutoPipe for this target."""
    from autopipe.core.ngram_shipped import SHIPPED_TABLES, table_path

    return [target.model] if target.model in SHIPPED_TABLES and table_path(target.model).is_file() else []


def shipped_drafters(target: StagePlan) -> list[StagePlan]:
    """Neural drafters that come with AutoPipe for this target."""
    from autopipe.core.models.shared_base import SHIPPED, adapter_folder

    if target.model not in SHIPPED or not Path(adapter_folder(target.model)).is_dir():
        return []
    dtype = Dtype.AUTO if target.dtype in FEWER_BITS else target.dtype
    return [StagePlan(model=target.model, adapter=target.model, dtype=dtype, device=target.device)]


def own_drafters(target: StagePlan) -> list[StagePlan]:
    """The target with its weights in fewer bits, cheapest first, where our kernels compute it. Looks up no model."""
    found = []
    for dtype in (Dtype.INT4, Dtype.INT8):
        try:
            stage = in_fewer_bits(target, dtype)
            on_cpu = str(choose_device(target.device, "--device")) == "cpu"
        except ConfigError as error:
            _logger.info("the target's weights in %s are no candidate: %s", dtype.value, error)
        else:
            if on_cpu and has_kernels() and target.adapter is None:
                found.append(stage)
    return found


def with_precisions(
    drafters: Sequence[StagePlan], precisions: Sequence[str], key: str = "--precision"
) -> list[StagePlan]:
    """Each drafter once for each precision; none given: as it is.

    A drafter's precision changes how often it is right and how fast it is, never the output.

    Raises:
        ConfigError: no such precision.
    """
    for precision in precisions:
        if precision not in list(Dtype):
            raise ConfigError(key, precision, ", ".join(Dtype))
    if not precisions:
        return list(drafters)
    found: list[StagePlan] = []
    for stage in drafters:
        for precision in precisions if stage.dtype is Dtype.AUTO and not stage.is_emulated else [stage.dtype]:
            found.append(stage.replace(dtype=precision))
    return found


def named(drafters: Sequence[StagePlan]) -> list[StagePlan]:
    """The drafters with distinct names that say what sets them apart.

    Raises:
        ConfigError: the same drafter twice.
    """
    found: list[StagePlan] = []
    for stage in drafters:
        if any(stage.identity() == other.identity() for other in found):
            raise ConfigError("--drafter", stage.model, "each drafter once")
        base = stage.name or stage.default_name()
        if stage.name is None and sum(other.default_name() == base for other in drafters) > 1:
            base += "-" + stage.dtype.value
        name, number = base, 2
        while name in [other.name for other in found] or name in (NGRAM, "target", "drafters"):
            name, number = f"{base}-{number}", number + 1
        found.append(stage.replace(name=name))
    return found


def too_large(plan: Plan, limits: Limits) -> str | None:
    """Why a chain cannot be loaded at all, in words, judged by its files before anything is; None if it may fit.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: a stage's model cannot be had or cannot serve.
    """
    needed: dict[str, float] = {}
    for place, stage in enumerate(plan.chain):
        shares_weights = stage is not plan.target and is_drafter(stage)
        if not stage.is_emulated and not stage.is_ngram and not shares_weights:
            device = check_stage(stage, f"chain.{place}.model").device
            needed[device] = needed.get(device, 0.0) + _least_bytes(stage)
    capacities = device_memory(set(needed))
    for device, size in needed.items():
        limit = limits.memory_limit(device, capacities)
        if limit is not None and size > limit:
            return f"needs at least {size / 2**30:.1f} GiB of {device} memory, {limit / 2**30:.1f} GiB are allowed"
    return None


_LEAST_SHARE = {Dtype.BF16: 0.5, Dtype.FP16: 0.5, Dtype.INT8: 0.25, Dtype.INT4: 0.125}
"""Bytes of a weight in memory over those in the file, at least: files hold four bytes a weight at most."""


def _least_bytes(stage: StagePlan) -> float:
    """Bytes that a stage's weights take in memory, at least."""
    from autopipe.core.models.loading import weight_files
    from autopipe.core.models.spec import resolve

    in_files = sum(file.stat().st_size for file in weight_files(resolve(stage.model)))
    return in_files * _LEAST_SHARE.get(stage.dtype, 1.0)
