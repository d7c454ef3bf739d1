"""Products with 8- and 4-bit weights: what they stand for, and their bits whatever rows, threads and instructions."""

from __future__ import annotations

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.native import Team, matmul
from autopipe.core.kernels.quantise import GROUPS, dequantise, pack_quantised, packed_bytes, quantise

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")

FORMATS = (WeightFormat.INT8, WeightFormat.INT4)
INSTRUCTION_SETS = kernels.available_instruction_sets()
SHAPES = ((1, 1), (16, 64), (17, 31), (100, 64), (200, 577))  # [outputs, inputs]


def _operands(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_code_is_the_nearest_to_its_weight(weights, shape):
    _, weight = _operands(1, *shape)
    codes, scales = quantise(weight, weights)
    error = (dequantise(codes, scales, weights)[: shape[0], : shape[1]] - weight).abs()
    step = scales[..., :1].float().expand(-1, -1, GROUPS[weights]).flatten(1)[: shape[0], : shape[1]]
    slack = 0.51 if weights is WeightFormat.INT8 else 0.6  # a minimum is rounded to bf16
    assert (error <= slack * step).all()


def test_four_bits_keep_weights_that_have_sixteen_levels():
    levels = torch.randint(0, 16, (32, 96), generator=torch.Generator().manual_seed(0))
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = levels.float() * 0.125 - 1.0
    codes, scales = quantise(weight, WeightFormat.INT4)
    assert torch.equal(dequantise(codes, scales, WeightFormat.INT4), weight)


@pytest.mark.parametrize("weights", FORMATS)
def test_zeros_and_huge_weights_stay_finite(weights):
    weight = torch.zeros(16, 64)
    weight[3] = 1e30
    codes, scales = quantise(weight, weights)
    values = dequantise(codes, scales, weights)
    assert values.isfinite().all()
    assert (values[0] == 0).all()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_product_is_that_of_the_quantised_weights_but_for_rounding_the_inputs(weights, shape, isa):
    x, weight = _operands(13, *shape)
    codes, scales = quantise(weight, weights)
    stands_for = dequantise(codes, scales, weights)[: shape[0], : shape[1]]
    reference = x.double() @ stands_for.double().T
    out = matmul(x, pack_quantised(weight, weights), shape[0], Team(2), isa, weights)
    largest = x.abs().amax(1, keepdim=True).double() / 254 * 1.01  # half a step of a group whose largest is the row's
    bound = largest * stands_for.double().abs().sum(1)[None]
    assert ((out - reference).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("weights", FORMATS)
def test_bits_are_the_same_for_any_rows_threads_and_instruction_set(weights):
    x, weight = _operands(70, 200, 577)
    packed = pack_quantised(weight, weights)
    alone = torch.cat([matmul(row[None], packed, 200, Team(1), None, weights) for row in x[:20]])
    for isa in INSTRUCTION_SETS:
        for threads in (1, 2, 3):
            team = Team(threads)
            for rows in (*range(1, 20), 64, 70):
                out = matmul(x[:rows], packed, 200, team, isa, weights)
                assert torch.equal(out[:20], alone[:rows]), (isa, threads, rows)


@pytest.mark.parametrize("weights", FORMATS)
def test_packed_size_is_what_it_says(weights):
    for outputs, inputs in SHAPES:
        packed = pack_quantised(torch.ones(outputs, inputs), weights)
        assert tuple(packed.shape) == packed_bytes(outputs, inputs, weights)


def test_rows_of_zeros_give_zeros():
    packed = pack_quantised(torch.randn(16, 64), WeightFormat.INT8)
    assert (matmul(torch.zeros(2, 64), packed, 16, Team(1), None, WeightFormat.INT8) == 0).all()
