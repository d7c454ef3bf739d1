"""Which torch device a stage computes on. Without transformers, whose import takes seconds."""

from __future__ import annotations

import torch

from autopipe.core.errors import ConfigError


def choose_device(device: str, key: str = "device") -> torch.device:
    """`auto` is a CUDA GPU if there is one, else the CPU.

    Raises:
        ConfigError: not a device torch knows, or one that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        if chosen.type != "meta":
            torch.empty(0, device=chosen)
            return chosen
    except (RuntimeError, AssertionError):
        pass
    raise ConfigError(key, device, "auto, cpu, cuda, cuda:0, ..., and present on this machine")
