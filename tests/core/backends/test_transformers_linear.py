"""Linear layers on our own kernels: the right numbers, independent rows, and a way back."""

from __future__ import annotations

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from autopipe.core.backends.transformers_linear import KernelLinear, KernelLinears, KernelTeam, fits_kernels
from autopipe.core.kernels import has_kernels
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no kernels for this CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (33, 17), (576, 100)])
def test_equals_torch(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    rows = torch.randn(2, 5, inputs).to(dtype)
    expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    result = KernelLinear(weight, bias, KernelTeam(2))(rows)
    assert result.dtype is dtype
    tolerance = 1e-4 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(result.double(), expected, atol=tolerance * inputs**0.5, rtol=tolerance)


def test_another_number_of_inputs_is_refused_as_torch_would() -> None:
    """Reading on beyond a row's end would be reading somebody else's memory."""
    layer = KernelLinear(torch.randn(8, 32), None, KernelTeam(1))
    for inputs in (31, 33, 64):
        with pytest.raises(RuntimeError, match="32 inputs"):
            layer(torch.randn(2, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_among_any_number_of_rows_and_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(100, 70).to(dtype), torch.randn(300, 70).to(dtype)
    alone = [KernelLinear(weight, None, KernelTeam(threads)) for threads in (1, 2, 3)]
    expected = torch.cat([alone[0](row[None]) for row in rows])
    for layer in alone:
        for count in (1, 2, 7, 8, 9, 64, 300):
            assert torch.equal(layer(rows[:count]), expected[:count])


def test_layers_of_different_widths_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    team = KernelTeam(1)
    wide, narrow = KernelLinear(torch.randn(8, 40), None, team), KernelLinear(torch.randn(8, 33), None, team)
    rows = torch.randn(4, 33)
    expected = narrow(rows)
    wide(torch.full((4, 40), 1e9))
    assert torch.equal(narrow(rows), expected)


def test_all_linear_layers_are_replaced_and_can_be_put_back() -> None:
    model = tiny_model()
    before = model(torch.tensor([[1, 2, 3]])).logits
    linears = KernelLinears(model, 1)
    assert not [module for module in model.modules() if type(module) is torch.nn.Linear]
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, before, atol=1e-3, rtol=1e-3)
    linears.restore()
    assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, before)


def test_gpt2s_transposed_layers_are_replaced_too() -> None:
    model = tiny_model("gpt2")
    before = model(torch.tensor([[1, 2, 3]])).logits
    KernelLinears(model, 1)
    assert not [module for module in model.modules() if isinstance(module, Conv1D)]
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])).logits, before, atol=1e-3, rtol=1e-3)


def test_fp16_does_not_fit() -> None:
    assert fits_kernels(tiny_model())
    assert not fits_kernels(tiny_model(dtype=torch.float16))
