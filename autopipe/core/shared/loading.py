"""From the target of a plan to a batch runner; and why a plan cannot be shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import psutil

from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.plan import BackendName, Dtype, Mode, Plan, StagePlan, Verification
from autopipe.core.shared.options import SharingOptions

if TYPE_CHECKING:
    from autopipe.core.backends.fused_batch import BatchRunner
    from autopipe.core.backends.fused_config import DecoderShape

_DEFAULT_KV_SHARE = 0.25
"""Of the memory that is free for the caches on the target's device when it is loaded."""
_MOST_KV_SHARE = 0.5
_PADDING = 1.3
"""Pages are a little larger than the numbers in them."""
_PAGE_SLACK = 512


def reason_unshareable(plan: Plan) -> str | None:
    """Why requests cannot share this plan's target in one process, in words; None when they can.

    Reads the plan alone; a model that turns out not to fit is refused when it is loaded.
    """
    if any(not stage.is_ngram for stage in plan.drafters):
        return "neural drafters run in processes of their own, which serve one request at a time"
    if plan.verification is not Verification.EQUALITY:
        return "under rejection sampling the text would depend on the other requests; equality verification is shared"
    target = plan.target
    if target.backend is BackendName.TRANSFORMERS:
        return "the transformers backend holds one sequence; the fused backend shares"
    if target.device_map is not None:
        return "a model spread over devices holds one sequence"
    return None


def require_shareable(plan: Plan) -> None:
    """Raises ConfigError, naming the key, where `reason_unshareable` has a reason."""
    reason = reason_unshareable(plan)
    if reason is None:
        return
    key = "verification" if plan.verification is not Verification.EQUALITY else "chain"
    value = plan.verification.value if key == "verification" else plan.names()
    raise ConfigError(key, value, f"plans that requests can share: {reason}")


def is_plain(plan: Plan) -> bool:
    """Whether the plan drafts nothing."""
    return plan.mode is Mode.PLAIN or not plan.drafters


class LoadedTarget(NamedTuple):
    """A batch runner, and why it runs the way it does."""

    runner: BatchRunner
    reason: str


def load_target(stage: StagePlan, options: SharingOptions, threads: int | None) -> LoadedTarget:
    """Load a target for many sequences.

    Raises:
        ConfigError, ModelLoadError: as `load_backend`; or kv_bytes holds no sequence of the context's length.
        UnsupportedModelError: only the fused backend (and emulated stages) can share.
    """
    slots = options.max_active + (options.cached_sequences if options.prefix_cache else 0)
    if stage.emulated is not None:
        from autopipe.core.backends.emulated_batch import EmulatedBatchRunner

        return LoadedTarget(EmulatedBatchRunner(stage.emulated, slots), "emulated")
    from autopipe.core.backends.fused_batch import batch_runner
    from autopipe.core.backends.fused_config import shape_of
    from autopipe.core.backends.load import check_stage
    from autopipe.core.kernels.formats import WeightFormat
    from autopipe.core.models.loading import load_config, load_state
    from autopipe.core.models.spec import resolve

    info = check_stage(stage)
    if info.backend is not BackendName.FUSED:
        raise UnsupportedModelError(f"{stage.model}: requests can share only the fused backend; {info.reason}")
    import torch

    dtype: torch.dtype = getattr(torch, info.dtype.removeprefix("torch."))
    source = resolve(stage.model)
    config = load_config(source, trust_remote_code=stage.trust_remote_code)
    available = available_memory(info.device)
    state = load_state(source, dtype, adapter=stage.adapter)
    if info.device.startswith("cuda"):  # where the weights go next
        available -= sum(tensor.nbytes for tensor in state.values())
    max_length, kv_bytes = _memory(shape_of(config), dtype.itemsize, options.kv_bytes, max(0, available))
    runner = batch_runner(
        config,
        state,
        dtype=dtype,
        device=info.device,
        threads=threads,
        slots=slots,
        max_length=max_length,
        kv_bytes=kv_bytes,
        weights={Dtype.INT8: WeightFormat.INT8, Dtype.INT4: WeightFormat.INT4}.get(stage.dtype),
    )
    return LoadedTarget(runner, f"{info.reason}; {runner.description}")


def available_memory(device: str) -> int:
    """Bytes that are free on a device (`cpu`, `cuda`, `cuda:N`), whoever uses the rest."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _memory(shape: DecoderShape, bytes_per_number: int, kv_bytes: int | None, available: int) -> tuple[int, int]:
    """Longest sequence, and bytes of all KV caches: enough for one such sequence, if half of `available` is."""
    if kv_bytes is not None:
        return shape.max_positions, kv_bytes
    per_token = int(_PADDING * shape.kv_numbers_per_token * bytes_per_number)
    most_tokens = int(_MOST_KV_SHARE * available) // per_token
    max_length = max(1, min(shape.max_positions, most_tokens))
    return max_length, max(int(_DEFAULT_KV_SHARE * available), per_token * (max_length + _PAGE_SLACK))
