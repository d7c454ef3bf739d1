"""How models come to the transformers backend: dtype, devices, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Dtype
from tests.tiny import save_tiny, tiny_model


def test_loads_a_folder_in_the_dtype_asked_for(tiny_folder: Path) -> None:
    backend = TransformersBackend(str(tiny_folder), dtype=Dtype.BF16, device="cpu")
    assert backend.model.dtype is torch.bfloat16
    assert backend.model.config._attn_implementation == "autopipe"


def test_auto_dtype_is_that_of_the_checkpoint(tiny_folder: Path, tiny_bf16_folder: Path) -> None:
    dtypes = [TransformersBackend(str(folder), device="cpu").model.dtype for folder in (tiny_folder, tiny_bf16_folder)]
    assert dtypes == [torch.float32, torch.bfloat16]


def test_device_map_is_passed_on(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, given = AutoModelForCausalLM.from_pretrained, {}

    def from_pretrained(folder: Path, **options: Any) -> Any:
        given.update(options)
        return original(folder, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    TransformersBackend(str(tiny_folder), device_map={"": "cpu"})
    assert given["device_map"] == {"": "cpu"}


def test_a_device_that_is_not_there_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="device: 'cuda:99'"):
        TransformersBackend(str(tiny_folder), device="cuda:99")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_gives_what_peft_gives(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_tiny(tmp_path / "base")
    options = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "down_proj"],
        use_dora=kind == "dora",
        lora_dropout=0.5,
        init_lora_weights=False,
    )
    tuned = peft.get_peft_model(tiny_model(), options)
    tuned.save_pretrained(tmp_path / "adapter")
    ids = list(range(20))
    with torch.no_grad():
        expected = tuned.eval()(torch.tensor([ids]), use_cache=False).logits[0]
    backend = TransformersBackend(str(base), adapter=str(tmp_path / "adapter"), device="cpu")
    torch.testing.assert_close(backend.forward(ids), expected, atol=2e-3, rtol=1e-3)
