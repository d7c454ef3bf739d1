"""The fused backend on native kernels, against transformers and against itself, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from autopipe.core import kernels
from autopipe.core.backends.base import best_ids
from autopipe.core.backends.conformance import CHECKS, Subject
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError, UnsupportedModelError
from autopipe.core.kernels import loader
from tests.tiny import tiny_config, tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ODD: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 331,
    "head_dim": 24, "max_position_embeddings": 700,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "even": {},
    "odd_sizes": ODD,
    "wide_heads": {"hidden_size": 128, "head_dim": 80, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "usual_heads": {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
}


@pytest.fixture(autouse=True, params=kernels.available_instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)
    return request.param


def make(kind: str = "llama", dtype: torch.dtype = torch.float32, threads: int = 2, **overrides: Any) -> FusedBackend:
    model = tiny_model(kind, dtype=dtype, **overrides)
    return FusedBackend(model.config, tiny_state(model), dtype=dtype, threads=threads)


def reference(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """float64 logits after each id, [len(ids), vocab]."""
    with torch.inference_mode():
        return model.double()(torch.tensor([ids])).logits[0]


def token_ids(count: int, vocab: int = 100, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("size", SIZES)
def test_fp32_forward_is_as_near_float64_as_transformers_fp32(kind, size):
    overrides = {key: value for key, value in SIZES[size].items() if kind != "qwen2" or key != "head_dim"}
    model = tiny_model(kind, **overrides)
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    ids = token_ids(300)
    logits = backend.forward(ids).clone()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    expected = reference(model, ids)
    assert relative_error(logits, expected) <= 1.5 * relative_error(theirs, expected)


@pytest.mark.parametrize("kind", FAMILY)
def test_bf16_forward_is_near_float64_on_the_same_weights(kind):
    model = tiny_model(kind, dtype=torch.bfloat16)
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.bfloat16)
    ids = token_ids(60)
    logits = backend.forward(ids).clone()
    expected = reference(model, ids)
    assert relative_error(logits, expected) < 0.02


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500000.0,
        },
    ],
    ids=["linear", "llama3"],
)  # fmt: skip
def test_rotary_scaling_equals_transformers(scaling):
    model = tiny_model("llama", rope_parameters=scaling, head_dim=32)
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    ids = token_ids(200)
    logits = backend.forward(ids).clone()
    expected = reference(model, ids)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("silenced", ["self_attn.o_proj", "mlp.down_proj"])
def test_mlp_alone_and_attention_alone_agree_with_float64(silenced):
    model = tiny_model("qwen3", num_hidden_layers=1)
    with torch.no_grad():
        model.get_parameter(f"model.layers.0.{silenced}.weight").zero_()
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    ids = token_ids(50)
    logits = backend.forward(ids).clone()
    expected = reference(model, ids)
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_rows_have_the_same_bits_for_1_to_64_rows(dtype, size):
    backend = make(dtype=dtype, **SIZES[size])
    prompt, text = token_ids(20), token_ids(64, seed=1)
    backend.prefill(prompt)
    alone = torch.cat([backend.forward([token]).clone() for token in text])
    for rows in range(1, 65):
        backend.rollback(len(prompt))
        assert torch.equal(backend.forward(text[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [[300], [1], [2, 5], [64, 1], [255, 2], [256, 44], [257]])
def test_any_split_of_a_text_has_the_same_bits(dtype, sizes):
    backend = make("qwen3", dtype=dtype)
    text = token_ids(300)
    whole = backend.forward(text).clone()
    backend.reset()
    done = turn = 0
    while done < len(text):
        part = text[done : done + sizes[turn % len(sizes)]]
        logits = backend.prefill(part)[None] if turn % 2 else backend.forward(part)
        done, turn = done + len(part), turn + 1
        assert torch.equal(logits, whole[done - logits.shape[0] : done])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_do_not_change_bits(dtype):
    backend = make(dtype=dtype, threads=1, **ODD)
    text = token_ids(80)
    results = []
    for threads in (1, 2, 3):
        backend.set_threads(threads)
        backend.reset()
        backend.prefill(text[:40])
        results.append(torch.cat([backend.forward(text[40:43]).clone(), backend.forward(text[43:]).clone()]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_set_threads_keeps_the_cache():
    backend, other = make(), make()
    text = token_ids(30)
    backend.prefill(text[:20])
    other.prefill(text[:20])
    backend.set_threads(3)
    assert torch.equal(backend.forward(text[20:]), other.forward(text[20:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rolled_back_tokens_leave_no_trace(dtype):
    backend = make(dtype=dtype)
    text = token_ids(40)
    expected = backend.forward(text).clone()
    for length in (0, 1, 15, 16, 17, 39):
        backend.rollback(0)
        backend.forward(text[:length] or [1])
        backend.rollback(min(length, backend.length))
        backend.forward(token_ids(40 - length, seed=7))
        backend.rollback(length)
        assert torch.equal(backend.forward(text[length:]), expected[length:])


def test_cache_grows_beyond_a_page_without_changing_bits():
    backend = make(max_position_embeddings=1200)
    text = token_ids(1100)
    whole = backend.forward(text)[-1].clone()
    backend.reset()
    for start in range(0, 1100, 50):
        last = backend.forward(text[start : start + 50])[-1]
    assert torch.equal(last, whole)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_contract(check, dtype):
    model = tiny_model("qwen3", dtype=dtype)  # its norms keep large random weights from amplifying bf16 rounding
    backend = FusedBackend(model.config, tiny_state(model), dtype=dtype)
    trusted = model.double()
    tolerance = 1e-3 if dtype == torch.float32 else 0.5
    CHECKS[check](Subject(lambda: backend, lambda ids: reference(trusted, list(ids)).float(), tolerance))


def test_errors_leave_the_cache_unchanged():
    backend = make()
    backend.prefill(token_ids(5))
    for wrong in ([], [320], [3, -1]):
        with pytest.raises(ConfigError):
            backend.forward(wrong)
    with pytest.raises(ContextLengthError):
        backend.forward(token_ids(508))
    for length in (-1, 6):
        with pytest.raises(RollbackError):
            backend.rollback(length)
    assert backend.length == 5


def test_max_length_limits_the_context():
    model = tiny_model()
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32, max_length=10)
    backend.prefill(token_ids(10))
    with pytest.raises(ContextLengthError, match="10"):
        backend.forward([1])


def test_max_length_beyond_the_model_is_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="max_length"):
        FusedBackend(model.config, tiny_state(model), dtype=torch.float32, max_length=513)


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_bad_thread_counts_are_refused(threads):
    with pytest.raises(ConfigError, match="threads"):
        make(threads=threads)


def test_missing_and_misshapen_tensors_are_named():
    model = tiny_model()
    state = tiny_state(model)
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong in (None, torch.zeros(3, 3), torch.zeros(128, 64, dtype=torch.int8)):
        broken = {key: value for key, value in state.items() if key != name}
        if wrong is not None:
            broken[name] = wrong
        with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj"):
            FusedBackend(model.config, broken, dtype=torch.float32)


def test_fp16_on_the_cpu_is_refused_with_the_reason():
    model = tiny_model()
    with pytest.raises(UnsupportedModelError, match="float16 on cpu"):
        FusedBackend(model.config, tiny_state(model), dtype=torch.float16)


def test_cost_notes_count_what_a_forward_reads():
    config = tiny_config(tie_word_embeddings=False)
    notes = make(tie_word_embeddings=False).cost_notes()
    layer = 64 * (4 + 2 + 2) * 16 + 64 * 64 + 3 * 64 * 128
    assert notes.weight_bytes is not None
    assert notes.weight_bytes == pytest.approx(4 * (2 * layer + config.vocab_size * 64), rel=0.02)
    assert notes.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def with_head(head: torch.Tensor, dtype: torch.dtype) -> FusedBackend:
    """A tiny model whose output head is this one, [vocab, 64]."""
    model = tiny_model("llama", dtype=dtype, vocab_size=len(head))
    state = {**tiny_state(model), "lm_head.weight": head.to(dtype)}
    backend = FusedBackend(model.config, state, dtype=dtype, threads=2)
    backend.prepare_best()
    return backend


def heads(hidden: int) -> dict[str, torch.Tensor]:
    """Output heads on which a coarse look is of little help."""
    draw = torch.Generator().manual_seed(3)
    random = torch.randn(303, hidden, generator=draw)
    lone = torch.zeros(303, hidden)
    lone[250] = random[0]
    whole = torch.randint(-126, 127, (6000, hidden), generator=draw).float()
    whole[:, ::32] = 127  # int8 holds these exactly: all that is off is the hidden state
    return {
        "exact_in_int8": whole / 1024,
        "equal_rows": random[:1].expand(303, hidden).clone(),
        "pairs": random.repeat_interleave(2, 0)[:303].clone(),
        "nearly_equal": random[:1] + 1e-3 * random,
        "one_row_is_huge": torch.cat((random[:100], 1e4 * random[:1], random[101:])),
        "outliers": random * (1 + 500 * (torch.arange(hidden) == 5)),
        "tiny": 1e-6 * random,
        "one_row_alone": lone,
        "nothing": torch.zeros(303, hidden),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", heads(1))
def test_best_ids_are_right_whatever_the_head(head, dtype):
    hidden = tiny_model("llama").config.hidden_size
    backend = with_head(heads(hidden)[head], dtype)
    backend.prefill(token_ids(3))
    for seed in range(12):
        ids = token_ids(1 + seed, seed=seed)
        expected = best_ids(backend.forward(ids))
        backend.rollback(3)
        assert backend.best(ids) == expected
        backend.rollback(3)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_best_ids_do_not_depend_on_threads(threads):
    backend = with_head(heads(64)["equal_rows"] if threads < 3 else heads(64)["pairs"], torch.float32)
    backend.set_threads(threads)
    backend.prefill([1, 2])
    expected = best_ids(backend.forward([5, 6, 7]))
    backend.rollback(2)
    assert backend.best([5, 6, 7]) == expected


def test_there_is_no_best_id_among_logits_that_are_not_numbers():
    head = heads(64)["pairs"]
    head[:] = torch.nan
    backend = with_head(head, torch.float32)
    backend.prefill([1, 2])
    assert backend.best([3, 4]) == [-1, -1]
