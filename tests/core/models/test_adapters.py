"""LoRA adapters merged into a state dict, against peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from autopipe.core.models.adapters import merge_lora
from tests.tiny import tiny_model, tiny_state

peft = pytest.importorskip("peft")


def make_adapter(folder: Path, kind: str = "llama", **options: Any) -> dict[str, torch.Tensor]:
    """Save an adapter with random weights; return the state peft itself merges it to."""
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "lora_dropout": 0.5}
    torch.manual_seed(0)
    config = peft.LoraConfig(**{**defaults, **options}, init_lora_weights=False)
    tuned = peft.get_peft_model(tiny_model(kind), config)
    tuned.save_pretrained(folder)
    return tiny_state(tuned.merge_and_unload())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("llama", {"use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2},
                   "alpha_pattern": {"layers.1.self_attn.q_proj": 64}}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
)  # fmt: skip
def test_merges_as_peft_does(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    expected = make_adapter(tmp_path, kind, **options)
    merged = merge_lora(tiny_state(tiny_model(kind)), str(tmp_path))
    assert merged.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(merged[name], expected[name], msg=name)


def test_the_base_is_left_as_it_is(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    state, before = tiny_state(tiny_model()), tiny_state(tiny_model())
    merged = merge_lora(state, str(tmp_path))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(state[name], before[name])
    assert not torch.equal(merged[name], before[name])


def test_dora_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path, use_dora=True)
    with pytest.raises(UnsupportedModelError, match="use_dora"):
        merge_lora(tiny_state(tiny_model()), str(tmp_path))


def test_another_kind_of_adapter_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(UnsupportedModelError, match="IA3"):
        merge_lora(tiny_state(tiny_model()), str(tmp_path))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    with pytest.raises(ModelLoadError, match=r"q_proj"):
        merge_lora(tiny_state(tiny_model(hidden_size=32, intermediate_size=32)), str(tmp_path))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_is_no_adapter_names_what_is_missing(tmp_path: Path, missing: str) -> None:
    make_adapter(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"adapter: .*{missing}"):
        merge_lora(tiny_state(tiny_model()), str(tmp_path))
