"""What the native kernels keep of a key or value: its nearest bf16, ties to even."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.core import kernels
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_native import PAGE_TOKENS, NativeRunner
from autopipe.core.kernels import loader
from tests.tiny import tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")

HALF = 2.0**-8
"""Half of the distance between two bf16 numbers from 1 to 2."""
SUMS = [
    (1.0, HALF),  # a tie, down to the even neighbour
    (1.0 + 2 * HALF, HALF),  # a tie, up to the even neighbour
    (-1.0, -HALF),
    (1.0, 1.25 * HALF),
    (1.0, 0.75 * HALF),
    (255.0, 1.0 - 2.0**-8),  # into the next power of two
    (float("inf"), 1.0),
    (float("nan"), 1.0),
    (-float("nan"), 0.0),
    (0.0, 0.0),
]
LANES = 16


@pytest.fixture(autouse=True, params=kernels.available_instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)


def cached_values(head_dim: int, sums: list[tuple[float, float]]) -> torch.Tensor:
    """The values of a one-layer model's first position, whose i-th is the sum of the i-th pair: bf16 [head_dim]."""
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny_model(
        dtype=torch.bfloat16, hidden_size=64, head_dim=head_dim, rms_norm_eps=0.0, tie_word_embeddings=False, **shape
    )
    state = tiny_state(model)
    state["model.embed_tokens.weight"].fill_(1)  # its norm is 1 exactly
    state["model.layers.0.input_layernorm.weight"].fill_(1)
    weights = state["model.layers.0.self_attn.v_proj.weight"].zero_()  # [head_dim, hidden]
    weights[:, :2] = torch.tensor([sums[i % len(sums)] for i in range(head_dim)], dtype=torch.bfloat16)
    backend = FusedBackend(model.config, state, dtype=torch.bfloat16, threads=1)
    backend.prefill([3])
    runner = backend._runner
    assert isinstance(runner, NativeRunner)
    size = PAGE_TOKENS * (head_dim + -(-head_dim // LANES) * LANES)
    page = np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(runner._pages[0].address))
    values = page[PAGE_TOKENS * head_dim :]  # keys first; then [head_dim/16][positions/2][16][2]
    found = [values[i // LANES * PAGE_TOKENS * LANES + 2 * (i % LANES)] for i in range(head_dim)]
    bits = torch.tensor(np.array(found).astype(np.int32).astype(np.int16))
    backend.close()
    return bits.view(torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 24])
def test_a_value_is_kept_as_its_nearest_bf16_and_a_nan_as_one(head_dim: int) -> None:
    expected = torch.tensor([sum(SUMS[i % len(SUMS)]) for i in range(head_dim)], dtype=torch.float32).bfloat16()

    torch.testing.assert_close(cached_values(head_dim, SUMS), expected, rtol=0, atol=0, equal_nan=True)
