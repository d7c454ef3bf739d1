"""Layers that processes share: one file for the same weights, another for others, and never a damaged one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.core import kernels
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_batch import batch_runner
from autopipe.core.backends.fused_config import shape_of
from autopipe.core.backends.fused_weights import DecoderTensors
from autopipe.core.backends.packed_decoder import PackedDecoder
from autopipe.core.backends.packed_layers import FOLDER, MappedLayer, map_layer
from autopipe.core.errors import ModelLoadError
from autopipe.core.kernels.formats import WeightFormat
from tests.tiny import tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
IDS = [7, 40, 41, 99, 3, 250, 16, 77]
MODEL = tiny_model(num_hidden_layers=4)
STATE = tiny_state(MODEL)
SHAPE = shape_of(MODEL.config)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def mapped(index: int = 1, dtype: torch.dtype = torch.bfloat16) -> MappedLayer:
    return map_layer(SHAPE, dtype, DecoderTensors(SHAPE, STATE, dtype).layer(index))


def weights_files(cache: Path) -> list[Path]:
    return sorted((cache / FOLDER).glob("*/weights.bin"))


def mapped_files(folder: Path) -> list[str]:
    """Files below a folder that this process has mapped, each as often as it has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[-1] for line in lines if str(folder) in line]


def test_a_layer_is_written_once_and_mapped_from_then_on(empty_cache: Path) -> None:
    first = mapped()
    (file,) = weights_files(empty_cache)
    written = file.stat().st_mtime_ns
    assert file.stat().st_size == first.num_bytes
    content = first.memory.copy()
    assert mapped() is first, "this process needs no second mapping"
    assert len(mapped_files(empty_cache)) == 1
    del first
    assert mapped_files(empty_cache) == [], "nobody reads it any more"
    assert np.array_equal(mapped().memory, content)
    assert weights_files(empty_cache) == [file]
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("other", ["layer", "dtype", "weight"])
def test_other_weights_have_another_file(empty_cache: Path, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped()
    if other == "weight":
        name = "model.layers.1.mlp.up_proj.weight"
        changed = STATE[name].clone()
        changed[-1, -1] += 1
        monkeypatch.setitem(STATE, name, changed)
    mapped(2 if other == "layer" else 1, torch.float32 if other == "dtype" else torch.bfloat16)
    assert len(weights_files(empty_cache)) == 2


@pytest.mark.parametrize("damage", ["a bit", "cut", "empty", "gone", "no digest"])
def test_a_damaged_file_is_written_anew(empty_cache: Path, damage: str) -> None:
    expected = mapped().memory.copy()  # and the mapping is given up
    (file,) = weights_files(empty_cache)
    data = bytearray(file.read_bytes())
    if damage == "a bit":
        data[100] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-64])
    elif damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        (file.parent / "sha256").unlink()
    assert np.array_equal(mapped().memory, expected)


@DTYPES
@pytest.mark.parametrize("layers", [(0,), (1, 3), (0, 1, 2, 3)])
def test_a_target_with_shared_layers_has_the_same_logits_bit_for_bit(
    empty_cache: Path, dtype: torch.dtype, layers: Sequence[int]
) -> None:
    alone = FusedBackend(MODEL.config, STATE, dtype=dtype, threads=2)
    sharing = FusedBackend(MODEL.config, STATE, dtype=dtype, threads=2, shared_layers=layers)
    assert torch.equal(sharing.forward(IDS), alone.forward(IDS))
    assert "that processes share" in sharing.cost_notes().notes
    assert sharing.cost_notes().weight_bytes == alone.cost_notes().weight_bytes
    batch = batch_runner(MODEL.config, STATE, dtype=dtype, threads=1, slots=2, shared_layers=layers)
    alone.reset()
    assert torch.equal(batch.forward([(0, IDS, len(IDS))]), alone.forward(IDS))
    assert len(weights_files(empty_cache)) == len(layers)


def test_shared_layers_are_not_in_a_decoders_own_memory(empty_cache: Path) -> None:
    whole = PackedDecoder(SHAPE, STATE, torch.bfloat16)
    sharing = PackedDecoder(SHAPE, STATE, torch.bfloat16, shared_layers=(0, 1))
    assert whole.own_bytes - sharing.own_bytes == sharing.shared_bytes == 2 * mapped().num_bytes


def test_a_file_that_cannot_be_opened_is_left_alone(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped()
    (file,) = weights_files(empty_cache)

    def no_descriptors(self: Path, *args: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_descriptors)
        with pytest.raises(ModelLoadError, match="Too many open files"):
            mapped()
    assert weights_files(empty_cache) == [file]
    mapped()


def test_layers_that_the_model_has_not_are_not_looked_for(empty_cache: Path) -> None:
    assert PackedDecoder(SHAPE, STATE, torch.bfloat16, shared_layers=(3, 9)).shared_bytes == mapped(3).num_bytes


def test_quantised_weights_are_not_shared(empty_cache: Path) -> None:
    quantised = PackedDecoder(SHAPE, STATE, torch.bfloat16, weights=WeightFormat.INT8, shared_layers=(0, 1))
    assert quantised.shared_bytes == 0
    assert not weights_files(empty_cache)


def test_without_a_cache_layers_are_packed_like_others_and_that_is_said(
    empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty_cache.write_text("a file where the folder would be")
    backend = FusedBackend(MODEL.config, STATE, dtype=torch.float32, threads=1, shared_layers=(0, 1))
    assert "AUTOPIPE_CACHE" in backend.shortfalls[0]
    assert "not shared" in caplog.text
    alone = FusedBackend(MODEL.config, STATE, dtype=torch.float32, threads=1)
    assert torch.equal(backend.forward(IDS), alone.forward(IDS))
