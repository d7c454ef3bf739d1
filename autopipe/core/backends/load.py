"""From a stage of a plan to its backend: a cheap check in the engine's process, loading in the worker's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.models.cache import Progress
from autopipe.core.models.loading import choose_dtype, eos_token_ids, load_config, load_state, weight_files
from autopipe.core.models.spec import ModelSource, resolve
from autopipe.core.plan import FEWER_BITS, BackendName, Dtype, StagePlan

if TYPE_CHECKING:
    import torch

    from autopipe.core.backends.base import StageBackend
    from autopipe.core.kernels.formats import WeightFormat

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What is known of a stage before its weights are loaded.

    Attributes:
        model: the spec in the plan.
        backend: the backend chosen; never `auto`.
        reason: why this backend, in words.
        device: torch device, `auto` resolved; `device_map` if the plan has one.
        dtype: `torch.float32`, `torch.bfloat16` or `torch.float16`, as text; empty for an emulated stage.
        vocab_size: rows of the output head, padding included.
        max_length: longest sequence in tokens; None: not stated by the config.
        eos_token_ids: ids that end the model's text.
    """

    model: str
    backend: BackendName
    reason: str
    device: str
    dtype: str
    vocab_size: int
    max_length: int | None
    eos_token_ids: tuple[int, ...]


def check_stage(stage: StagePlan, key: str = "model", *, progress: Progress | None = None) -> StageInfo:
    """Find out, without loading weights, whether a neural (or emulated) stage can run, and how.

    A hub model that is not on disk is downloaded here, and a GGUF file converted, once.

    Args:
        stage: of the plan; not an n-gram.
        key: the user's key of `stage.model` (`chain.0.model`), for error messages.
        progress: told when something slow begins.

    Raises:
        ConfigError: the model, device, dtype or adapter does not exist or is not allowed.
        ModelLoadError: the model's files are incomplete or unreadable.
        UnsupportedModelError: the model cannot be a stage, or not with the backend asked for.
    """
    if stage.emulated is not None:
        spec = stage.emulated
        return StageInfo(stage.model, BackendName.EMULATED, "emulated", "", "", spec.vocab_size, spec.max_length, ())
    if stage.is_ngram:
        raise ConfigError(key, stage.model, "a model; an n-gram is not loaded but built where it is used")
    source = resolve(stage.model, key)
    weight_files(source, progress)
    config = load_config(source, trust_remote_code=stage.trust_remote_code)
    _check_adapters(stage, source, config, key)
    choice = _choose(stage, source, config, key)
    text_config = config.get_text_config(decoder=True)
    return StageInfo(
        model=stage.model,
        backend=choice.backend,
        reason=choice.reason,
        device="device_map" if stage.device_map is not None else choice.device,
        dtype=str(choice.dtype),
        vocab_size=int(text_config.vocab_size),
        max_length=getattr(text_config, "max_position_embeddings", None),
        eos_token_ids=eos_token_ids(source),
    )


def load_backend(
    stage: StagePlan,
    *,
    exact: bool = True,
    threads: int | None = None,
    shared_layers: Sequence[int] = (),
    progress: Progress | None = None,
) -> StageBackend:
    """Load a neural (or emulated) stage. Its attribute `choice_reason` says why this backend was chosen.

    Args:
        stage: of the plan.
        exact: the plan's `exact`.
        threads: compute threads on the CPU; None: the backend's default.
        shared_layers: layers of the model that drafters in other processes are made of.
        progress: told when something slow begins.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: as `check_stage`, or while loading.
    """
    name = stage.name or stage.default_name()
    if stage.emulated is not None:
        from autopipe.core.backends.emulated import EmulatedBackend

        return EmulatedBackend(stage.emulated, name)
    if stage.is_ngram:
        raise ConfigError("model", stage.model, "a model; an n-gram is not loaded but built where it is used")
    source = resolve(stage.model)
    weight_files(source, progress)
    config = load_config(source, trust_remote_code=stage.trust_remote_code)
    choice = _choose(stage, source, config, "model")
    if is_drafter(stage):
        from autopipe.core.backends.shared_base import SharedBaseBackend

        drafter = SharedBaseBackend(
            config,
            lambda: load_state(source, choice.dtype),
            _adapter_folders(stage),
            dtype=choice.dtype,
            threads=threads,
            name=name,
        )
        drafter.choice_reason = choice.reason
        return drafter
    if choice.backend is BackendName.FUSED:
        from autopipe.core.backends.fused import FusedBackend

        state = load_state(source, choice.dtype, adapter=stage.adapter)
        fused = FusedBackend(
            config,
            state,
            dtype=choice.dtype,
            device=choice.device,
            threads=threads,
            name=name,
            exact=exact,
            graphs=stage.cuda.graphs,
            weights=choice.weights,
            shared_layers=shared_layers,
        )
        fused.choice_reason = choice.reason
        return fused
    if stage.backend is BackendName.AUTO:
        _logger.warning("%s runs on the slower transformers backend: %s", name, choice.reason)
    from autopipe.core.backends.transformers import TransformersBackend

    backend = TransformersBackend(
        source,
        exact=exact,
        dtype=stage.dtype,
        device=stage.device,
        device_map=stage.device_map,
        adapter=stage.adapter,
        trust_remote_code=stage.trust_remote_code,
        threads=threads,
        name=name,
        weights=choice.weights,
    )
    backend.choice_reason = "; ".join(filter(None, [choice.reason, backend.choice_reason]))
    if choice.weights is None and stage.dtype is Dtype.INT4:
        backend.exact = False  # see backends/quantised.py
    return backend


@dataclass(frozen=True, slots=True)
class _Choice:
    backend: BackendName
    reason: str
    dtype: torch.dtype
    device: str
    weights: WeightFormat | None = None
    """Quantised by our kernels."""


def _choose(stage: StagePlan, source: ModelSource, config: Any, key: str) -> _Choice:
    """The backend of a stage.

    Raises:
        ConfigError: a device that is not there.
        UnsupportedModelError: no backend, or not the one asked for, can run the model.
    """
    drafter = is_drafter(stage)
    device = "cpu" if drafter and stage.device == "auto" else _device(stage, key)
    dtype = choose_dtype(stage.dtype, source, device.partition(":")[0])
    if drafter:
        if stage.dtype in FEWER_BITS:
            allowed = "fp32 or bf16 for a drafter of the target's own layers, which are kept once"
            raise ConfigError(_sibling(key, "dtype"), stage.dtype.value, allowed)
        return _choose_drafter(stage, config, dtype, device, key)
    weights = _quantisation(stage, device, key)
    if stage.backend is not BackendName.TRANSFORMERS:
        reason = _unfit_for_fused(stage, config, dtype, device)
        if reason is None:
            return _Choice(BackendName.FUSED, f"{config.model_type} fits the fast path", dtype, device, weights)
        if stage.backend is BackendName.FUSED:
            raise UnsupportedModelError(f"{key}: the fused backend cannot run {stage.model}: {reason}")
        chosen = f"fused cannot run it: {reason}"
    else:
        chosen = "asked for"
    reason = _unfit_for_transformers(stage, config)
    if reason is not None:
        raise UnsupportedModelError(f"{key}: {stage.model} cannot serve as a stage: {reason}")
    return _Choice(BackendName.TRANSFORMERS, chosen, dtype, device, weights)


def is_drafter(stage: StagePlan) -> bool:
    """Whether a stage is not the whole of its model but a drafter made by `autopipe drafts distill`."""
    from autopipe.core.models.shared_base import adapter_folder, is_shared_base_drafter

    return stage.adapter is not None and is_shared_base_drafter(adapter_folder(stage.adapter))


def _choose_drafter(stage: StagePlan, config: Any, dtype: torch.dtype, device: str, key: str) -> _Choice:
    from autopipe.core.backends.fused import FusedBackend
    from autopipe.core.backends.shared_base import reason_unfit_drafter

    if stage.backend not in (BackendName.AUTO, BackendName.FUSED):
        raise UnsupportedModelError(f"{key}: a drafter of the target's own layers runs on the fused backend only")
    reason = reason_unfit_drafter(config, device) or FusedBackend.reason_unfit_dtype(dtype, device)
    if reason is not None:
        raise UnsupportedModelError(f"{key}: the drafter {stage.adapter} cannot run: {reason}")
    return _Choice(BackendName.FUSED, "layers of the model and an adapter", dtype, device)


def _adapter_folders(stage: StagePlan) -> list[str]:
    """Folders of a stage's adapters, the one in use first."""
    from autopipe.core.models.shared_base import adapter_folder

    return [adapter_folder(adapter) for adapter in dict.fromkeys((str(stage.adapter), *stage.adapters))]


def _check_adapters(stage: StagePlan, source: ModelSource, config: Any, key: str) -> None:
    """Raises ConfigError or ModelLoadError for an adapter that is missing, or a drafter made for another target."""
    if stage.adapter is None:
        return
    from autopipe.core.models.adapters import read_adapter_config
    from autopipe.core.models.shared_base import check_drafter

    where = _sibling(key, "adapter")
    if not is_drafter(stage):
        if stage.adapters:
            raise ConfigError(_sibling(key, "adapters"), list(stage.adapters), "drafters of `autopipe drafts distill`")
        read_adapter_config(stage.adapter, where)
        return
    state = load_state(source)
    for folder in _adapter_folders(stage):
        check_drafter(folder, config, state, where)


def _device(stage: StagePlan, key: str) -> str:
    if stage.device_map is not None:
        return "cuda"
    if stage.device == "cpu":
        return "cpu"
    from autopipe.core.backends.devices import choose_device

    return str(choose_device(stage.device, _sibling(key, "device")))


def _unfit_for_fused(stage: StagePlan, config: Any, dtype: torch.dtype, device: str) -> str | None:
    from autopipe.core.backends.fused import FusedBackend

    if stage.device_map is not None:
        return "device_map is given"
    if stage.adapter is not None:
        from autopipe.core.models.adapters import read_adapter_config, unmergeable_reason

        reason = unmergeable_reason(read_adapter_config(stage.adapter))
        if reason is not None:
            return reason
    if stage.dtype in FEWER_BITS and (reason := FusedBackend.reason_unfit_quantised(device)):
        return reason
    return FusedBackend.reason_unfit(config) or FusedBackend.reason_unfit_dtype(dtype, device)


def _quantisation(stage: StagePlan, device: str, key: str) -> WeightFormat | None:
    """The format our kernels quantise to; None: not quantised, or by a library (`backends/quantised.py`).

    Raises:
        ConfigError: neither our kernels nor a library can do it here.
    """
    if stage.dtype not in FEWER_BITS:
        return None
    from autopipe.core.backends.quantised import reason_missing as library_missing
    from autopipe.core.kernels import has_kernels, reason_missing
    from autopipe.core.kernels.formats import WeightFormat

    if device == "cpu" and stage.device_map is None and has_kernels():
        return WeightFormat.INT8 if stage.dtype is Dtype.INT8 else WeightFormat.INT4
    missing = library_missing(stage.dtype, device)
    if missing is not None:
        why = f"{missing}; our own kernels: {reason_missing() or 'for CPUs only'}"
        raise ConfigError(_sibling(key, "dtype"), stage.dtype.value, f"fp32, bf16 or fp16 here ({why})")
    return None


def _unfit_for_transformers(stage: StagePlan, config: Any) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from autopipe.core.backends.transformers_cache import unfit_reason

    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; stages are decoder-only models"
    own_code = stage.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not own_code:
        return f"transformers has no causal language model of type {config.model_type!r}"
    return unfit_reason(config)


def _sibling(key: str, name: str) -> str:
    """The key next to a stage's `model` key: `chain.0.model` -> `chain.0.device`."""
    head, dot, _ = key.rpartition(".")
    return f"{head}{dot}{name}"
