"""Devices: what there is, what is refused, and that asking is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autopipe.core.backends.devices import choose_device
from autopipe.core.errors import ConfigError


def test_auto_is_a_gpu_where_there_is_one() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_by_the_users_key(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_device(device, "chain.1.device")
    assert (caught.value.key, caught.value.value) == ("chain.1.device", device)


def test_it_does_not_wait_for_transformers() -> None:
    """Its import was a quarter of the time to the first token."""
    code = "import sys, autopipe.core.backends.devices; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
