"""Moving layers of a loaded transformers model to other devices, and with them their keys and values.

An entry of the cache never changes once its token is accepted. So the copy that a layer leaves behind stays right up to
where the sequence has changed since, and a layer that moves back and forth sends only what has come in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopipe.core.backends.transformers_cache import RollbackLayer
from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError

DeviceMap = Mapping[str, int | str]


@dataclass(slots=True)
class Moved:
    """What moves have copied between devices.

    Attributes:
        weight_bytes: of weights.
        kv_bytes: of keys and values.
        kv_resend_bytes: what sending all keys and values of the moved layers each time would have been.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    kv_resend_bytes: int = 0


def move_layers(model: Any, cache_layers: Iterable[Any], device_map: DeviceMap) -> Moved:
    """Put a model's modules where `device_map` says, and each layer's cache where its attention is.

    Args:
        model: loaded with a device map (`StagePlan.movable`), or on one device.
        cache_layers: of its cache, in the model's order; other than `RollbackLayer`s are left alone.
        device_map: accelerate's: module name -> device; it must cover the model.

    Raises:
        ConfigError: the map leaves modules out, or names a device that is not there.
        ModelLoadError: a device is out of memory; some modules have moved, some have not.
        UnsupportedModelError: accelerate is not installed.
    """
    try:
        from accelerate import dispatch_model
        from accelerate.hooks import remove_hook_from_module
    except ImportError:
        raise UnsupportedModelError("layers can be moved with accelerate only: pip install accelerate") from None

    before = {name: tensor.device for name, tensor in model.state_dict().items()}
    moved = Moved()
    try:
        remove_hook_from_module(model, recurse=True)
        dispatch_model(model, device_map=dict(device_map), force_hooks=True)
        for layer, device in zip(cache_layers, attention_devices(model), strict=False):
            if isinstance(layer, RollbackLayer):
                copied, whole = layer.place(device)
                moved.kv_bytes += copied
                moved.kv_resend_bytes += whole
    except ValueError as error:
        raise ConfigError("device_map", dict(device_map), f"a device for every module ({error})") from error
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"the layers do not fit where the device map puts them: {error}") from error
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("device_map", dict(device_map), f"devices of this machine ({error})") from error
    moved.weight_bytes = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.state_dict().items()
        if tensor.device != before[name]
    )
    return moved


def attention_devices(model: Any) -> list[torch.device]:
    """The device of each layer's attention, in the model's order.

    Layers are found by their number: families call the list they are in by different names.
    """
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next(layers for layers in lists if len(layers) == number)
    return [next(layer.parameters()).device for layer in layers]
