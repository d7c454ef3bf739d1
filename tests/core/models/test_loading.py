"""Config, weights, tokenizer and eos ids of models on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.models import (
    choose_dtype,
    eos_token_ids,
    load_config,
    load_state,
    load_tokenizer,
    resolve,
    stored_dtype,
)
from autopipe.core.plan import Dtype
from tests.tiny import CHAT_TEMPLATE, EOS_ID, save_tiny, tiny_model, tiny_state


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder to change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def test_state_is_the_models(tiny_folder: Path) -> None:
    expected = tiny_state(tiny_model())
    state = load_state(resolve(str(tiny_folder)))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_state_in_another_dtype(tiny_folder: Path) -> None:
    state = load_state(resolve(str(tiny_folder)), torch.bfloat16)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    state = load_state(resolve(str(save_tiny(tmp_path, tie_word_embeddings=True))))
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state


def test_sharded_weights_are_joined(tmp_path: Path, tiny_folder: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    state, expected = load_state(resolve(str(tmp_path))), load_state(resolve(str(tiny_folder)))
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load_state(resolve(str(tmp_path)))


def test_pickled_weights_are_refused_with_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pickle \(pytorch_model\.bin\).*save_pretrained"):
        load_state(resolve(str(folder)))


def test_a_damaged_weight_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_state(resolve(str(folder)))


def test_a_config_of_an_unknown_type_is_an_error(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="nonesuch")
    with pytest.raises(ModelLoadError, match="nonesuch"):
        load_config(resolve(str(folder)))


def test_a_missing_tokenizer_is_an_error(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(resolve(str(folder)))


def test_the_tokenizer_keeps_its_chat_template(tiny_folder: Path) -> None:
    assert load_tokenizer(resolve(str(tiny_folder))).chat_template == CHAT_TEMPLATE


def test_eos_ids_come_from_the_generation_config(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[3, 5])
    assert eos_token_ids(resolve(str(folder))) == (3, 5)


def test_eos_ids_come_from_the_config_without_one(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert eos_token_ids(resolve(str(folder))) == (7,)


def test_eos_ids_come_from_the_tokenizer_when_no_config_says(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    assert eos_token_ids(resolve(str(folder))) == (EOS_ID,)


@pytest.mark.parametrize(
    ("stored", "dtype", "device", "chosen"),
    [
        (torch.float32, Dtype.AUTO, "cpu", torch.float32),
        (torch.bfloat16, Dtype.AUTO, "cpu", torch.bfloat16),
        (torch.float16, Dtype.AUTO, "cpu", torch.bfloat16),
        (torch.float16, Dtype.AUTO, "cuda", torch.float16),
        (torch.bfloat16, Dtype.FP32, "cpu", torch.float32),
    ],
)
def test_dtype_choice(tmp_path: Path, stored: torch.dtype, dtype: Dtype, device: str, chosen: torch.dtype) -> None:
    source = resolve(str(save_tiny(tmp_path, dtype=stored)))
    assert stored_dtype(source) is stored
    assert choose_dtype(dtype, source, device) is chosen


def test_a_hub_id_that_cannot_be_had_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"chain.0.model: 'nobody/nothing'.*smollm2-135m") as caught:
        load_config(resolve("nobody/nothing", "chain.0.model"))
    assert caught.value.key == "chain.0.model"


def test_a_hub_model_in_the_cache_is_used(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(tiny_folder))
    assert load_config(resolve("owner/model")).model_type == "llama"
    assert load_state(resolve("owner/model"))
