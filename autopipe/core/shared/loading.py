"""From a stage of a plan to a batch runner; and why a plan cannot be shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.plan import BackendName, Dtype, Plan, StagePlan, Verification
from autopipe.core.shared.options import SharingOptions

if TYPE_CHECKING:
    from autopipe.core.backends.batch import BatchRunner
    from autopipe.core.backends.load import StageInfo

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
    neural = [stage for stage in plan.drafters if not stage.is_ngram]
    if plan.verification is not Verification.EQUALITY:
        return "under rejection sampling the text would depend on the other requests; equality verification is shared"
    if any(_has_own_place(stage) for stage in neural):
        return "a drafter with cores or a share of the GPU of its own has its own process, which serves one request"
    if any(stage.device_map is not None for stage in (*neural, plan.target)):
        return "a model spread over devices holds one sequence"
    return None


def _has_own_place(stage: StagePlan) -> bool:
    """Whether a stage is to run somewhere that only a process of its own can be put."""
    own_share = stage.cuda.mps_percent is not None or stage.cuda.stream_priority is not None
    return stage.cores is not None or stage.numa is not None or own_share


def require_shareable(plan: Plan) -> None:
    """Raises ConfigError, naming the key, where `reason_unshareable` has a reason."""
    reason = reason_unshareable(plan)
    if reason is None:
        return
    key, value = "chain", str(plan.names())
    if plan.verification is not Verification.EQUALITY:
        key, value = "verification", plan.verification.value
    raise ConfigError(key, value, f"plans that requests can share: {reason}")


class LoadedModel(NamedTuple):
    """A batch runner, and why it runs the way it does."""

    runner: BatchRunner
    reason: str


def load_model(
    stage: StagePlan,
    options: SharingOptions,
    threads: int | None,
    target: BatchRunner | None = None,
    shared_layers: Sequence[int] = (),
    *,
    exact: bool = True,
) -> LoadedModel:
    """Load a model for many sequences.

    Args:
        target: for a drafter, its target: it has room for texts as long, and for as many tokens.
        shared_layers: layers of the model that drafters in other processes are made of.
        exact: the plan's; where sequences are computed together they are exact anyway.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: as `load_backend`; or kv_bytes holds no sequence of the
            context's length.
    """
    slots = options.max_active + (options.cached_sequences if options.prefix_cache else 0)
    if stage.emulated is not None:
        from autopipe.core.backends.emulated_batch import EmulatedBatchRunner

        return LoadedModel(EmulatedBatchRunner(stage.emulated, slots), "emulated")
    from autopipe.core.backends.fused_batch import batch_runner
    from autopipe.core.backends.fused_config import shape_of
    from autopipe.core.backends.load import check_stage, is_drafter
    from autopipe.core.kernels.formats import WeightFormat
    from autopipe.core.models.loading import load_config, load_state
    from autopipe.core.models.shared_base import adapter_folder, read_drafter_info
    from autopipe.core.models.spec import resolve

    info = check_stage(stage)
    if info.backend is BackendName.TRANSFORMERS:
        return _load_transformers(stage, info, options, slots, threads, target, exact=exact)
    import torch

    dtype: torch.dtype = getattr(torch, info.dtype.removeprefix("torch."))
    source = resolve(stage.model)
    config = load_config(source, trust_remote_code=stage.trust_remote_code)
    shape = shape_of(config)
    sizes: dict[str, Any] = {"dtype": dtype, "threads": threads, "slots": slots}
    if is_drafter(stage):
        from autopipe.core.backends.shared_base_batch import SharedBaseBatchRunner

        folder = adapter_folder(str(stage.adapter))
        shape = replace(shape, num_layers=len(read_drafter_info(folder).layers))
        per_token = int(_PADDING * shape.kv_numbers_per_token * dtype.itemsize)
        sizes["max_length"], sizes["kv_bytes"] = _drafter_memory(shape.max_positions, per_token, target)
        drafter = SharedBaseBatchRunner(config, lambda: load_state(source, dtype), folder, **sizes)
        return LoadedModel(drafter, f"{info.reason}; {drafter.description}")
    available = available_memory(info.device)
    state = load_state(source, dtype, adapter=stage.adapter)
    if info.device.startswith("cuda"):  # where the weights go next
        available -= sum(tensor.nbytes for tensor in state.values())
    per_token = int(_PADDING * shape.kv_numbers_per_token * dtype.itemsize)
    sizes["max_length"], sizes["kv_bytes"] = _memory(
        shape.max_positions, per_token, options.kv_bytes, available, target
    )
    weights = {Dtype.INT8: WeightFormat.INT8, Dtype.INT4: WeightFormat.INT4}.get(stage.dtype)
    runner = batch_runner(config, state, device=info.device, weights=weights, shared_layers=shared_layers, **sizes)
    return LoadedModel(runner, f"{info.reason}; {runner.description}")


def _load_transformers(
    stage: StagePlan,
    info: StageInfo,
    options: SharingOptions,
    slots: int,
    threads: int | None,
    target: BatchRunner | None,
    *,
    exact: bool,
) -> LoadedModel:
    """A model on the transformers backend."""
    from autopipe.core.backends.load import load_backend
    from autopipe.core.backends.transformers import TransformersBackend
    from autopipe.core.backends.transformers_batch import TransformersBatchRunner
    from autopipe.core.backends.transformers_layout import Layout

    backend = load_backend(stage, threads=threads)
    if not isinstance(backend, TransformersBackend):
        raise UnsupportedModelError(f"{stage.model}: requests cannot share it: {info.reason}")
    if (target is not None or not exact) and backend.layout is not Layout.ROWS:
        backend.layout, backend.exact = Layout.FREE, False  # a drafter need not round alike in any company
    available = available_memory("cpu" if info.device == "cpu" else str(backend.model.device))
    per_token = backend.cost_notes().kv_bytes_per_token or 1
    memory = _memory(backend.max_length, per_token, options.kv_bytes, available, target)
    runner = TransformersBatchRunner(backend, slots, *memory, drafts=target is not None)
    return LoadedModel(runner, f"{backend.choice_reason}; {runner.description}")


def available_memory(device: str) -> int:
    """Bytes that are free on a device (`cpu`, `cuda`, `cuda:N`), whoever uses the rest."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _memory(
    longest: int, per_token: int, kv_bytes: int | None, available: int, target: BatchRunner | None
) -> tuple[int, int | None]:
    """Longest sequence, and bytes of all KV caches: enough for one such sequence, if half of `available` is.

    Args:
        longest: sequence that the model can read. per_token: bytes of a token's keys and values.
        target: of a drafter.
    """
    if target is not None:
        return _drafter_memory(longest, per_token, target)
    if kv_bytes is not None:
        return longest, kv_bytes
    most_tokens = int(_MOST_KV_SHARE * max(0, available)) // per_token
    max_length = max(1, min(longest, most_tokens))
    return max_length, max(int(_DEFAULT_KV_SHARE * max(0, available)), per_token * (max_length + _PAGE_SLACK))


def _drafter_memory(longest: int, per_token: int, target: BatchRunner | None) -> tuple[int, int | None]:
    """As `_memory`, for a drafter: as many tokens as the target has room for."""
    if target is None:
        return longest, None
    max_length = min(longest, target.max_length)
    tokens = target.capacity_tokens
    if tokens is None:
        return max_length, None
    return max_length, per_token * (max(tokens, max_length) + _PAGE_SLACK)
