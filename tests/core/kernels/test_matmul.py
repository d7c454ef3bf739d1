"""Few-row products against float64, and their bits whatever the number of rows and threads."""

from __future__ import annotations

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels.native import Team, matmul
from autopipe.core.kernels.packing import pack_matrix, pack_pair

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")

INSTRUCTION_SETS = kernels.available_instruction_sets()
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((1, 1), (16, 32), (17, 31), (100, 64), (200, 577))  # [outputs, inputs]


@pytest.fixture(scope="module", params=(1, 2, 3))
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param)


def _operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return x.bfloat16().float(), weight  # so that the bf16 product need not round it


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_agrees_with_float64(isa, dtype, shape, team):
    x, weight = _operands(13, *shape, dtype)
    reference = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T  # rounding errors grow with the sum of magnitudes
    out = matmul(x, pack_matrix(weight), shape[0], team, isa)
    assert ((out - reference).abs() <= 1e-5 * scale).all()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_has_the_same_bits_for_1_to_64_rows(isa, dtype, shape, team):
    x, weight = _operands(70, *shape, dtype)
    packed = pack_matrix(weight)
    alone = torch.cat([matmul(row[None], packed, shape[0], team, isa) for row in x])
    for rows in (*range(1, 65), 70):
        assert torch.equal(matmul(x[70 - rows :], packed, shape[0], team, isa), alone[70 - rows :]), rows


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_bits(isa, dtype):
    x, weight = _operands(9, 200, 577, dtype)
    packed = pack_matrix(weight)
    results = [matmul(x, packed, 200, Team(threads), isa) for threads in (1, 2, 3, 7)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_be_bf16_and_get_a_bias_before_they_are_rounded(isa, dtype, shape, team):
    x, weight = _operands(9, *shape, dtype)
    packed, bias = pack_matrix(weight), torch.linspace(-3, 3, shape[0])
    plain = matmul(x, packed, shape[0], team, isa)
    assert torch.equal(matmul(x, packed, shape[0], team, isa, bias=bias), plain + bias)
    assert torch.equal(matmul(x.bfloat16(), packed, shape[0], team, isa), plain.bfloat16())
    assert torch.equal(matmul(x.bfloat16(), packed, shape[0], team, isa, bias=bias), (plain + bias).bfloat16())


@pytest.mark.skipif("avx512" not in INSTRUCTION_SETS, reason="needs AVX-512")
@pytest.mark.parametrize("dtype", DTYPES)
def test_avx2_and_avx512_give_the_same_bits(dtype):
    x, weight = _operands(9, 200, 577, dtype)
    packed, team = pack_matrix(weight), Team(2)
    assert torch.equal(matmul(x, packed, 200, team, "avx2"), matmul(x, packed, 200, team, "avx512"))


def test_bf16_packing_puts_pairs_of_inputs_side_by_side():
    weight = torch.arange(3 * 5).view(3, 5).bfloat16()
    packed = pack_matrix(weight)
    assert packed.shape == (1, 3, 16, 2)
    assert packed[0, 1, 2].tolist() == [weight[2, 2].item(), weight[2, 3].item()]
    assert packed[0, 2, 0].tolist() == [weight[0, 4].item(), 0.0]
    assert not packed[0, :, 3:].any()


def test_pair_packing_takes_blocks_by_turns():
    gate, up = torch.full((32, 4), 1.0), torch.full((32, 4), 2.0)
    assert pack_pair(gate, up)[:, 0, 0, 0].tolist() == [1.0, 2.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1100)])
def test_packing_moves_every_number_to_its_place_and_pads_with_zeros(dtype, shape):
    outputs, inputs = shape
    whole = torch.int16 if dtype is torch.bfloat16 else torch.int32
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-(1 << 14), 1 << 14, shape, dtype=whole, generator=generator).view(
        dtype
    )  # hardly any two alike
    per_step = 2 if dtype is torch.bfloat16 else 1
    padded = torch.nn.functional.pad(weight, (0, -inputs % per_step, 0, -outputs % 16))
    expected = padded.view(-1, 16, padded.shape[1] // per_step, per_step).permute(0, 2, 1, 3)
    expected = expected.contiguous().view(whole)
    assert torch.equal(pack_matrix(weight).view(whole), expected)
    assert torch.equal(pack_matrix(weight.T.contiguous().T).view(whole), expected)
    into = torch.full(padded.shape, 9.0, dtype=dtype)
    pack_matrix(weight, into)
    assert torch.equal(into.view(expected.shape).view(whole), expected)
    other = weight.flip(1)
    pair = pack_pair(weight, other, torch.full((2 * padded.shape[0], padded.shape[1]), 9.0, dtype=dtype)).view(whole)
    assert torch.equal(pair[0::2], expected)
    assert torch.equal(pair[1::2], pack_matrix(other).view(whole))


def test_what_cannot_be_packed_is_refused():
    weight = torch.zeros(16, 32)
    for bad in (
        lambda: pack_matrix(weight.half()),
        lambda: pack_matrix(weight, torch.zeros(16, 32, dtype=torch.bfloat16)),
        lambda: pack_pair(weight, torch.zeros(16, 16)),
        lambda: pack_pair(weight, weight.bfloat16()),
    ):
        with pytest.raises(AutoPipeError, match="packed"):
            bad()
