"""Drafters of the target's own layers: they compute what PEFT computes, change at once, and never harm the target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from autopipe.core.backends.conformance import CHECKS, Subject
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.shared_base import SharedBaseBackend
from autopipe.core.errors import AutoPipeError, ConfigError, ModelLoadError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import can_screen
from autopipe.core.models.shared_base import check_drafter, read_drafter_info, read_head_ids, truncated_base
from tests.drafts.distilling import tiny_drafter
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_state

IDS = [7, 40, 41, 99, 3, 250, 16, 77]
MODEL = tiny_model(num_hidden_layers=4)
STATE = tiny_state(MODEL)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_drafter(tmp_path_factory.mktemp("drafters") / "chat", seed=1))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_drafter(tmp_path_factory.mktemp("drafters") / "code", seed=2, layers=(0, 2, 3)))


@pytest.fixture
def copy(chat: str, tmp_path: Path) -> Path:
    """A drafter that a test may damage."""
    return Path(shutil.copytree(chat, tmp_path / "copy"))


def _backend(*adapters: str, dtype: torch.dtype = torch.float32) -> SharedBaseBackend:
    return SharedBaseBackend(MODEL.config, lambda: STATE, adapters, dtype=dtype, threads=1)


@torch.no_grad()
def _reference(folder: str, ids: Sequence[int]) -> torch.Tensor:
    """PEFT's logits on the truncated base, spread over the vocabulary; -1e4 stands for a token the head lacks."""
    info = read_drafter_info(folder)
    head_ids = read_head_ids(folder, info)
    base = truncated_base(MODEL.config, STATE, info.layers, head_ids)
    logits = PeftModel.from_pretrained(base, folder)(torch.tensor([ids])).logits[0]
    return torch.full((len(ids), VOCAB_SIZE), -1e4).index_copy_(1, head_ids, logits)


class _Finite(SharedBaseBackend):
    """-inf as a number, so that logits can be subtracted."""

    def _append(self, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        return super()._append(ids, num_logits).clamp(min=-1e4)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_keeps_the_contract_of_backends(check: object, chat: str) -> None:
    def make() -> SharedBaseBackend:
        return _Finite(MODEL.config, lambda: STATE, [chat], dtype=torch.float32, threads=2)

    check(Subject(make, lambda ids: _reference(chat, ids), 2e-4))  # type: ignore[operator]


def test_a_token_that_the_head_lacks_is_never_drafted(chat: str) -> None:
    kept = set(read_head_ids(chat, read_drafter_info(chat)).tolist())
    logits = _backend(chat).forward(IDS)
    assert {index for index in range(VOCAB_SIZE) if logits[0, index] > -torch.inf} == kept
    assert set(logits.argmax(-1).tolist()) <= kept


def test_in_bf16_it_is_close_to_fp32(chat: str) -> None:
    full, half = (_backend(chat, dtype=dtype).forward(IDS) for dtype in (torch.float32, torch.bfloat16))
    finite = full > -torch.inf
    assert (full[finite] - half[finite]).std() < 0.05 * full[finite].std()


def test_adapters_loaded_together_change_without_a_trace_of_each_other(chat: str, code: str) -> None:
    backend = _backend(chat, code)
    for _ in range(2):
        for folder in (chat, code):
            backend.select(folder)
            assert backend.length == 0
            assert torch.equal(backend.forward(IDS), _backend(folder).forward(IDS))


def test_best_finds_the_same_with_a_screen_whichever_drafter_is_in_use(chat: str, code: str) -> None:
    plain, prepared = _backend(chat, code), _backend(chat)
    prepared.prepare_best()
    prepared.add(code)
    for folder in (chat, code, chat):
        for backend in (plain, prepared):
            backend.select(folder)
            backend.reset()
        assert prepared._native._weights.has_screen == can_screen(None, WeightFormat.FP32)
        found = prepared.best(IDS)
        assert found == plain.best(IDS)
        plain.reset()
        assert found == plain.forward(IDS).argmax(-1).tolist()


def test_a_change_reads_nothing(chat: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(chat, code)
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr("pathlib.Path.open", lambda *_: pytest.fail("a file was opened"))
    monkeypatch.setattr("autopipe.core.backends.shared_base.split_lora", lambda *_: pytest.fail("loaded again"))
    backend.select(code)


def test_an_adapter_that_is_not_loaded_leaves_the_old_one_active(chat: str) -> None:
    backend = _backend(chat)
    expected = backend.forward(IDS).clone()
    with pytest.raises(ConfigError, match="adapter"):
        backend.select("elsewhere")
    backend.reset()
    assert torch.equal(backend.forward(IDS), expected)


def _unknown_key(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.qq_proj.lora_A.weight"] = torch.zeros(4, 64)
    save_file(tensors, folder / "adapter_model.safetensors")


def _missing_half(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")


def _wrong_rank(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))


def _smaller_head(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lm_head" in name)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "adapter_model.safetensors")


def _wrong_vocabulary(folder: Path) -> None:
    info = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps({**info, "vocab_size": VOCAB_SIZE + 64}))


def _ids_beyond_the_vocabulary(folder: Path) -> None:
    ids = load_file(folder / "drafter.safetensors")["head_ids"]
    save_file({"head_ids": ids + 200}, folder / "drafter.safetensors")


def _another_target(folder: Path) -> None:
    info = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps({**info, "base_fingerprint": "0" * 16}))


def _layer_that_is_not_there(folder: Path) -> None:
    info = json.loads((folder / "drafter.json").read_text())
    (folder / "drafter.json").write_text(json.dumps({**info, "layers": [0, 1, 9]}))


def _torn_file(folder: Path) -> None:
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])


def _dora(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))


DAMAGES = (
    _unknown_key,
    _missing_half,
    _wrong_rank,
    _smaller_head,
    _wrong_vocabulary,
    _ids_beyond_the_vocabulary,
    _another_target,
    _layer_that_is_not_there,
    _torn_file,
    _dora,
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_drafter_that_does_not_fit_is_refused_and_the_old_one_stays(damage: object, chat: str, copy: Path) -> None:
    backend = _backend(chat)
    expected = backend.forward(IDS).clone()
    damage(copy)  # type: ignore[operator]
    with pytest.raises(AutoPipeError) as refused:
        backend.add(str(copy))
    assert str(copy) in str(refused.value)
    with pytest.raises(AutoPipeError):
        check_drafter(str(copy), MODEL.config, STATE)
    assert backend.adapters == (chat,)
    backend.reset()
    assert torch.equal(backend.forward(IDS), expected)


def test_drafters_of_other_sizes_do_not_share_a_stage(chat: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        _backend(chat, str(tiny_drafter(tmp_path / "small", head=100)))


def test_a_drafter_of_another_model_is_refused(chat: str) -> None:
    other = tiny_state(tiny_model(num_hidden_layers=4, seed=5))
    with pytest.raises(ModelLoadError, match="other weights"):
        SharedBaseBackend(MODEL.config, lambda: other, [chat], dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attaching_and_changing_drafters_never_changes_the_targets_logits_by_one_bit(
    dtype: torch.dtype, chat: str, code: str
) -> None:
    before = {name: tensor.clone() for name, tensor in STATE.items()}
    target = FusedBackend(MODEL.config, STATE, dtype=dtype, threads=1)
    alone = target.forward(IDS).clone()
    drafter = _backend(chat, code, dtype=dtype)
    drafter.forward(IDS)
    drafter.select(code)
    drafter.forward(IDS)
    target.reset()
    assert torch.equal(target.forward(IDS), alone)
    assert torch.equal(FusedBackend(MODEL.config, STATE, dtype=dtype, threads=1).forward(IDS), alone)
    assert all(torch.equal(STATE[name], tensor) for name, tensor in before.items())


def test_a_layer_with_a_matrix_that_the_adapter_saved_in_full_is_not_the_targets(chat: str, copy: Path) -> None:
    tensors = load_file(copy / "adapter_model.safetensors")
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    del tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    tensors[f"{module}.weight"] = 2 * STATE["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, copy / "adapter_model.safetensors")
    whole, without = (_backend(folder)._loaded[folder].weights for folder in (chat, str(copy)))
    assert without.shared_bytes == whole.shared_bytes * 2 // 3


def test_of_the_target_nothing_is_copied(chat: str, empty_cache: Path) -> None:
    backend = _backend(chat)
    assert backend._embedding.data_ptr() == STATE["model.embed_tokens.weight"].data_ptr()
    weights = backend._loaded[chat].weights
    matrices = sum(t.numel() for name, t in STATE.items() if ".layers." in name and t.ndim == 2) * 3 // 4
    assert weights.shared_bytes == 4 * matrices
    own = sum(t.numel() for t in load_file(Path(chat) / "adapter_model.safetensors").values())
    assert weights.own_bytes < 4 * (4 * own + 2**14), "LoRA, padded to blocks of 16, norms and head"
    assert (backend.cost_notes().weight_bytes or 0) == weights.own_bytes + weights.shared_bytes
