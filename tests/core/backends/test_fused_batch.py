"""Many sequences in one forward, against the same sequences alone, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.backends.batch import BatchRunner
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_batch import batch_runner
from autopipe.core.errors import (
    ConfigError,
    ContextLengthError,
    KVMemoryError,
    RollbackError,
    UnsupportedModelError,
)
from autopipe.core.kernels import loader
from autopipe.core.kernels.formats import WeightFormat
from tests.tiny import tiny_config, tiny_model, tiny_state

native = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
ODD: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 331,
    "head_dim": 24, "max_position_embeddings": 700,
}  # fmt: skip
QWEN: dict[str, Any] = {"family": "qwen3", "tie_word_embeddings": True}


@pytest.fixture(params=kernels.available_instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)
    return request.param


@pytest.fixture(params=["native", "torch"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and not kernels.has_kernels():
        pytest.skip(kernels.reason_missing())
    if request.param == "torch":
        monkeypatch.setattr("autopipe.core.backends.fused_batch.has_kernels", lambda: False)
    return request.param


def make(dtype: torch.dtype = torch.float32, slots: int = 8, threads: int = 2, **options: Any) -> BatchRunner:
    overrides = {key: options.pop(key) for key in list(options) if key not in ("kv_bytes", "max_length")}
    model = tiny_model(overrides.pop("family", "llama"), dtype=dtype, **overrides)
    return batch_runner(model.config, tiny_state(model), dtype=dtype, threads=threads, slots=slots, **options)


def single(dtype: torch.dtype = torch.float32, threads: int = 2, **overrides: Any) -> FusedBackend:
    model = tiny_model(overrides.pop("family", "llama"), dtype=dtype, **overrides)
    return FusedBackend(model.config, tiny_state(model), dtype=dtype, threads=threads)


def text(count: int, seed: int, vocab: int = 100) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(backend: FusedBackend, ids: list[int]) -> torch.Tensor:
    """Logits after each id of a sequence by itself, [len(ids), vocab]."""
    backend.reset()
    return backend.forward(ids).clone()


@native
@DTYPES
@pytest.mark.parametrize("sizes", [{}, ODD, QWEN], ids=["even", "odd", "qwen3"])
def test_every_row_has_the_bits_it_has_alone(isa, dtype, sizes):
    texts = [text(length, seed) for seed, length in enumerate((3, 150, 64, 65, 1, 17))]
    backend = single(dtype, **sizes)
    expected = [alone(backend, ids) for ids in texts]
    runner = make(dtype, **sizes)
    order = random.Random(0)
    left = {slot: list(ids) for slot, ids in enumerate(texts)}
    while left:
        chosen = order.sample(sorted(left), order.randint(1, len(left)))
        segments = [(slot, left[slot][: order.choice((1, 2, 7, 63, 150))]) for slot in chosen]
        logits = runner.forward([(slot, ids, len(ids)) for slot, ids in segments])
        row = 0
        for slot, ids in segments:
            done = len(texts[slot]) - len(left[slot])
            assert torch.equal(logits[row : row + len(ids)], expected[slot][done : done + len(ids)])
            row += len(ids)
            left[slot] = left[slot][len(ids) :]
            if not left[slot]:
                del left[slot]


@native
@DTYPES
def test_more_rows_than_one_sweep_takes_keep_their_bits(dtype):
    texts = [text(length, seed) for seed, length in enumerate((150, 300, 100, 77))]
    backend = single(dtype)
    expected = [alone(backend, ids)[-3:] for ids in texts]
    logits = make(dtype).forward([(slot, ids, 3) for slot, ids in enumerate(texts)])
    assert torch.equal(logits, torch.cat(expected))


@native
@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.INT4])
def test_with_quantised_weights_a_sequence_never_notices_its_company(isa, weights):
    texts = [text(length, seed) for seed, length in enumerate((30, 5, 70))]
    model = tiny_model(dtype=torch.bfloat16)
    options = {"dtype": torch.bfloat16, "threads": 2, "weights": weights}
    backend = FusedBackend(model.config, tiny_state(model), **options)
    expected = torch.cat([alone(backend, ids)[-3:] for ids in texts])
    runner = batch_runner(model.config, tiny_state(model), **options)
    assert torch.equal(runner.forward([(slot, ids, 3) for slot, ids in enumerate(texts)]), expected)


@native
@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_does_not_change_bits(dtype, threads):
    texts = [text(length, seed) for seed, length in enumerate((150, 2, 40))]
    backend = single(dtype, **ODD)
    expected = torch.cat([alone(backend, ids)[-2:] for ids in texts])
    runner = make(dtype, threads=threads, **ODD)
    assert torch.equal(runner.forward([(slot, ids, 2) for slot, ids in enumerate(texts)]), expected)


def test_only_wanted_rows_are_returned(kind):
    runner = make()
    every = runner.forward([(0, text(20, 0), 20), (1, text(10, 1), 10)]).clone()
    runner.reset(0)
    runner.reset(1)
    some = runner.forward([(1, text(10, 1), 0), (0, text(20, 0), 4)])
    assert torch.equal(some, every[16:20])


@DTYPES
def test_a_sequence_never_notices_its_company(kind, dtype):
    ids = text(17, 0)
    expected = make(dtype).forward([(5, ids, 17)]).clone()
    runner = make(dtype)
    runner.forward([(2, text(20, 1), 1), (5, ids[:11], 0), (3, text(3, 2), 3)])
    for n in range(11, 17):
        logits = runner.forward([(3, [7], 1), (5, ids[n : n + 1], 1), (2, text(9, n), 0)])
        assert torch.equal(logits[1], expected[n])


@DTYPES
def test_rolled_back_tokens_leave_no_trace(kind, dtype):
    count, lengths = (68, (0, 1, 63, 64, 65)) if kind == "native" else (11, (0, 1, 8))  # torch has no pages
    ids = text(count, 0)
    runner = make(dtype)
    expected = runner.forward([(0, ids, count)]).clone()
    for length in lengths:
        runner.rollback(0, length)
        runner.forward([(0, text(count - length, 9), 1), (1, [1], 1)])
        runner.rollback(0, length)
        assert runner.length(0) == length
        assert torch.equal(runner.forward([(0, ids[length:], count - length)]), expected[length:])


@DTYPES
@pytest.mark.parametrize("length", [0, 1, 64, 65, 80])
def test_a_copied_prefix_is_as_good_as_a_computed_one(kind, dtype, length):
    length = length if kind == "native" else length // 8  # torch has no pages
    first, rest = text(length + 3, 0), text(5, 1)
    runner = make(dtype)
    expected = runner.forward([(0, first[:length] + rest, 5)]).clone()
    runner.reset(0)
    runner.forward([(0, first, 1)])
    runner.copy_prefix(0, 1, length)
    assert runner.length(1) == length
    assert torch.equal(runner.forward([(1, rest, 5)]), expected)


@DTYPES
def test_sequences_that_share_a_prefix_do_not_disturb_each_other(kind, dtype):
    first = text(70, 0)
    runner = make(dtype)
    after = runner.forward([(0, [*first, 5, 6, 7], 3)]).clone()
    runner.rollback(0, 70)
    for slot in (1, 2):
        runner.copy_prefix(0, slot, 70)
    runner.forward([(1, text(9, 3), 1), (2, text(3, 4), 1)])
    runner.rollback(1, 62)
    runner.forward([(1, text(9, 5), 1)])
    assert torch.equal(runner.forward([(0, [5, 6, 7], 3)]), after)
    runner.reset(0)
    runner.copy_prefix(2, 0, 70)
    runner.reset(2)
    assert torch.equal(runner.forward([(0, [5, 6, 7], 3)]), after)


@native
def test_a_shared_prefix_takes_memory_once_and_all_of_it_is_given_back():
    runner = make()
    runner.forward([(0, text(128, 0), 0)])
    one = runner.kv_bytes_in_use()
    for slot in range(1, 8):
        runner.copy_prefix(0, slot, 128)
    assert runner.kv_bytes_in_use() == one
    runner.forward([(slot, [1], 1) for slot in range(8)])
    assert runner.kv_bytes_in_use() == one + 8 * one // 2
    for slot in range(8):
        runner.reset(slot)
    assert runner.kv_bytes_in_use() == 0


@native
def test_without_room_nothing_changes():
    page = 64 * 2 * 2 * 2 * 16 * 4
    runner = make(kv_bytes=8 * page)
    runner.forward([(0, text(200, 0), 1), (1, text(190, 1), 1)])
    assert runner.free_tokens() == 64
    with pytest.raises(KVMemoryError):
        runner.forward([(2, text(60, 2), 1), (0, text(60, 2), 1)])
    assert [runner.length(slot) for slot in range(3)] == [200, 190, 0]
    assert runner.free_tokens() == 64
    expected = make().forward([(0, [*text(190, 1), 9], 1)]).clone()
    assert torch.equal(runner.forward([(1, [9], 1)]), expected)


def test_bad_calls_are_refused_and_change_nothing(kind):
    runner = make(slots=2)
    runner.forward([(0, [1, 2], 1)])
    wrong: list[Any] = [
        [], [(2, [1], 1)], [(-1, [1], 1)], [(0, [], 0)], [(0, [320], 1)], [(0, [-1], 1)], [(0, [1], 2)], [(0, [1], -1)],
        [(0, [1], 1), (0, [2], 1)], [(1, [1], 1), (0, [999], 1)],
    ]  # fmt: skip
    for segments in wrong:
        with pytest.raises(ConfigError):
            runner.forward(segments)
    with pytest.raises(ContextLengthError):
        runner.forward([(1, [1], 1), (0, text(511, 0), 1)])
    for length in (-1, 3):
        with pytest.raises(RollbackError):
            runner.rollback(0, length)
    for source, destination, length in ((0, 0, 1), (0, 1, 3), (0, 1, -1), (0, 2, 1)):
        with pytest.raises(ConfigError):
            runner.copy_prefix(source, destination, length)
    assert [runner.length(slot) for slot in range(2)] == [2, 0]


def test_bad_options_are_refused():
    model = tiny_model()
    for option in ({"slots": 0}, {"max_length": 513}, {"max_length": 0}, {"threads": 5000}, {"kv_bytes": 1000}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            batch_runner(model.config, tiny_state(model), dtype=torch.float32, **option)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        batch_runner(tiny_config("gpt2"), {}, dtype=torch.float32)


def test_the_torch_fallback_says_that_sequences_run_one_after_another(kind):
    description = make().description
    assert ("one sequence after another" in description) == (kind == "torch")


@native
def test_a_model_of_the_backend_and_of_the_batch_agree_after_threads_change():
    runner = make()
    ids = text(40, 0)
    runner.forward([(0, ids, 1)])
    runner.set_threads(3)
    backend = single()
    backend.prefill(ids)
    assert torch.equal(runner.forward([(0, [4], 1)]), backend.forward([4]))
