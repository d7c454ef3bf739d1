"""Loading a transformers model for a stage: dtype, devices, attention, adapter."""

from __future__ import annotations

from typing import Any

import torch

from autopipe.core.backends.devices import choose_device
from autopipe.core.backends.transformers_attention import NAME
from autopipe.core.errors import ModelLoadError, UnsupportedModelError
from autopipe.core.models.loading import choose_dtype, local_folder, weight_files
from autopipe.core.models.quiet import no_progress_bars
from autopipe.core.models.spec import ModelSource, resolve
from autopipe.core.plan import Dtype


def load_model(
    model: str | ModelSource,
    dtype: Dtype,
    device: str,
    device_map: str | dict[str, int | str] | None,
    adapter: str | None,
    trust_remote_code: bool,
    *,
    quantise: bool = False,
) -> tuple[Any, ModelSource]:
    """Load a causal language model with AutoPipe's attention where its architecture allows another one.

    Args:
        quantise: have transformers quantise the weights to `dtype` as it loads them.

    Raises:
        ConfigError: a bad spec or device.
        ModelLoadError: missing or unreadable weights, or an architecture without a causal language model.
        UnsupportedModelError: an adapter that cannot be merged.
    """
    from transformers import AutoModelForCausalLM

    source = resolve(model) if isinstance(model, str) else model
    place = None if device_map is not None else choose_device(device)
    weight_files(source)
    options: dict[str, Any] = {"dtype": choose_dtype(dtype, source, "cuda" if place is None else place.type)}
    if device_map is not None:
        options["device_map"] = device_map
    folder = local_folder(source)
    if quantise:
        from autopipe.core.backends.quantised import quantisation_config

        options["quantization_config"] = quantisation_config(dtype, "cuda" if place is None else place.type)
    try:
        with no_progress_bars():
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=trust_remote_code, **options
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"{source.key}: {source} cannot be loaded by transformers: {error}") from error
    if loaded.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{source.key}: {source} is an encoder-decoder; stages are decoder-only models")
    if adapter is not None:
        loaded = _merge_adapter(loaded, adapter)
    use_own_attention(loaded)
    return (loaded if place is None else loaded.to(place)), source


def use_own_attention(model: Any) -> bool:
    """Switch a model to AutoPipe's attention, if it takes attention functions and has an SDPA variant."""
    supported = getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_sdpa", False)
    if supported:
        model.set_attn_implementation(NAME)
    return bool(supported)


def _merge_adapter(model: Any, adapter: str) -> Any:
    """LoRA by our own merge, the same as for other backends; anything else by peft."""
    from autopipe.core.models.adapters import merge_lora, read_adapter_config, unmergeable_reason

    config = read_adapter_config(adapter)
    if unmergeable_reason(config) is None:
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        merged = merge_lora(state, adapter)
        with torch.no_grad():
            for name, tensor in merged.items():
                if tensor is not state[name]:
                    state[name].copy_(tensor)
        return model
    try:
        from peft import PeftModel
    except ImportError:
        raise UnsupportedModelError(
            f"adapter {adapter}: type {config.get('peft_type')} needs peft; run: pip install peft"
        ) from None
    try:
        wrapped = PeftModel.from_pretrained(model, adapter, is_trainable=False)
        return wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError, AttributeError, RuntimeError, KeyError) as error:
        raise UnsupportedModelError(f"adapter {adapter}: it cannot be merged into the model: {error}") from error
