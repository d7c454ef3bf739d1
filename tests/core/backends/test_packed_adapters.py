"""LoRA beside the weights: the kernels add up @ down @ x, whatever the shapes, ranks, instruction set and company."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.backends.fused_config import shape_of
from autopipe.core.backends.fused_native import NativeRunner
from autopipe.core.backends.packed_decoder import PackedDecoder
from autopipe.core.errors import UnsupportedModelError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.loader import available_instruction_sets
from autopipe.core.models.adapters import LowRank
from tests.tiny import tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
IDS = [7, 40, 41, 99, 3, 250, 16, 77, 8, 9, 10, 11, 12, 13]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = {
    "blocks": tiny_model(),
    "straddling": tiny_model(num_attention_heads=8, num_key_value_heads=1, intermediate_size=72),
    "bias": tiny_model("qwen2"),
    "head norms": tiny_model("qwen3"),
}


@pytest.fixture(autouse=True)
def _cache(empty_cache: Path) -> None:
    """Shared layers are written to a cache of the test's own."""


def adapters(state: Mapping[str, torch.Tensor], ranks: Mapping[str, int], scale: float = 0.5) -> dict[str, LowRank]:
    """Random LoRA for modules by the end of their name."""
    draw = torch.Generator().manual_seed(1)
    made = {}
    for name, weight in state.items():
        rank = ranks.get(name.split(".")[-2], 0) if ".layers." in name and weight.ndim == 2 else 0
        if rank:
            down, up = (
                0.1 * torch.randn(*size, generator=draw) for size in ((rank, weight.shape[1]), (len(weight), rank))
            )
            made[name.removesuffix(".weight")] = LowRank(down, up, scale, transposed=False)
    return made


def merged(state: Mapping[str, torch.Tensor], added: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    return {**state, **{f"{name}.weight": a.added_to(state[f"{name}.weight"]) for name, a in added.items()}}


@pytest.mark.parametrize("isa", available_instruction_sets() or ("none",))
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "ranks",
    [dict.fromkeys(MATRICES, 4), dict.fromkeys(MATRICES, 5), {"q_proj": 3, "v_proj": 8, "up_proj": 2}, {"k_proj": 40}],
    ids=["all", "odd", "some", "wide"],
)
def test_it_computes_what_merged_weights_compute(isa: str, kind: str, ranks: dict[str, int]) -> None:
    model = MODELS[kind]
    state, shape = tiny_state(model), shape_of(model.config)
    added = adapters(state, ranks)
    beside = NativeRunner.of(PackedDecoder(shape, state, torch.float32, isa, shared_layers=(0, 1), adapters=added), 2)
    whole = NativeRunner(shape, merged(state, added), torch.float32, 2, isa)
    plain = NativeRunner(shape, state, torch.float32, 2, isa)
    logits, expected = (runner.run(IDS, 0, len(IDS)) for runner in (beside, whole))
    assert (logits - expected).abs().max() < 2e-4
    assert (logits - plain.run(IDS, 0, len(IDS))).abs().max() > 0.1, "the adapters change nothing: this test says less"


@pytest.mark.parametrize("isa", available_instruction_sets() or ("none",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_in_any_company(isa: str, dtype: torch.dtype, threads: int) -> None:
    model = tiny_model()
    state, shape = tiny_state(model), shape_of(model.config)
    runner = NativeRunner.of(
        PackedDecoder(shape, state, dtype, isa, adapters=adapters(state, dict.fromkeys(MATRICES, 5)))
    )
    runner.set_threads(threads)
    together = runner.run(IDS, 0, len(IDS)).clone()
    for count in (1, 2, 5):
        for at in range(0, len(IDS), count):
            part = IDS[at : at + count]
            assert torch.equal(runner.run(part, at, len(part)), together[at : at + len(part)])


def test_in_bf16_it_is_close_to_fp32() -> None:
    model = tiny_model()
    state = {name: tensor.bfloat16().float() for name, tensor in tiny_state(model).items()}
    added = adapters(state, dict.fromkeys(MATRICES, 4))
    full, half = (
        NativeRunner.of(PackedDecoder(shape_of(model.config), state, dtype, adapters=added), 1).run(IDS, 0, len(IDS))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (full - half).std() < 0.05 * full.std()


def test_the_base_stays_as_it_is_and_serves_several_adapters(empty_cache: Path) -> None:
    model = tiny_model()
    state, shape = tiny_state(model), shape_of(model.config)
    first, second = (
        PackedDecoder(
            shape, state, torch.bfloat16, shared_layers=(0, 1), adapters=adapters(state, {"o_proj": 4}, scale)
        )
        for scale in (0.5, 1.0)
    )
    alone = NativeRunner(shape, state, torch.bfloat16, 1)
    expected = alone.run(IDS, 0, len(IDS)).clone()
    runner = NativeRunner.of(first, 1)
    one = runner.run(IDS, 0, len(IDS)).clone()
    runner.use(second)
    assert not torch.equal(runner.run(IDS, 0, len(IDS)), one)
    runner.use(first)
    assert torch.equal(runner.run(IDS, 0, len(IDS)), one)
    plain = NativeRunner(shape, state, torch.bfloat16, 1, shared_layers=(0, 1))
    assert torch.equal(plain.run(IDS, 0, len(IDS)), expected)
    assert len(list((empty_cache / "packed-layers").glob("*/weights.bin"))) == 2, "one file a layer, for all of them"


def test_lora_beside_quantised_weights_is_refused() -> None:
    model = tiny_model()
    state, shape = tiny_state(model), shape_of(model.config)
    with pytest.raises(UnsupportedModelError, match="quantised"):
        PackedDecoder(shape, state, torch.bfloat16, weights=WeightFormat.INT8, adapters=adapters(state, {"q_proj": 4}))
