"""Sequences that take turns on one model of the transformers backend, against each alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autopipe.core.backends.transformers import Layout, TransformersBackend
from autopipe.core.backends.transformers_batch import TransformersBatchRunner
from autopipe.core.errors import ConfigError, ContextLengthError, KVMemoryError, UnsupportedModelError
from tests.tiny import tiny_model

KINDS = ("gpt2", "mistral_sliding", "qwen2")


def runner_of(kind: str = "gpt2", *, kernels: bool = True, kv_bytes: int | None = None, **options: Any) -> Any:
    backend = TransformersBackend(tiny_model(kind, **options), kernels=kernels, threads=1)
    return TransformersBatchRunner(backend, slots=6, max_length=backend.max_length, kv_bytes=kv_bytes)


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=count)


def alone(backend: TransformersBackend, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits after the prompt and after each token of the text, one sequence, one token at a time."""
    backend.reset()
    return torch.stack([backend.prefill(prompt), *(backend.forward([token])[0] for token in text)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_does_not_notice_its_company(kind: str, kernels: bool, dtype: torch.dtype) -> None:
    runner = runner_of(kind, kernels=kernels, dtype=dtype)
    single = TransformersBackend(tiny_model(kind, dtype=dtype), kernels=kernels, threads=1)
    chance = random.Random(1)
    prompts = [ids(length, seed) for seed, length in enumerate((1, 3, 40, 130))]
    texts = [ids(60, 100 + slot) for slot in range(4)]
    got = [[runner.forward([(slot, prompt, 1)])[0].clone()] for slot, prompt in enumerate(prompts)]
    done = [0] * 4
    while any(count < 60 for count in done):
        chosen = [slot for slot in range(4) if done[slot] < 60 and chance.random() < 0.7]
        counts = {slot: min(chance.randint(1, 9), 60 - done[slot]) for slot in chosen}
        if not chosen:
            continue
        segments = [(slot, texts[slot][done[slot] : done[slot] + n], n) for slot, n in counts.items()]
        rows = list(runner.forward(segments).clone())
        for slot, count in counts.items():
            kept = chance.randint(1, count)  # the rest is rolled back and computed again
            got[slot] += rows[:kept]
            del rows[:count]
            done[slot] += kept
            runner.rollback(slot, len(prompts[slot]) + done[slot])
    for slot in range(4):
        assert torch.equal(torch.stack(got[slot]), alone(single, prompts[slot], texts[slot]))


def test_a_forward_says_how_long_each_sequence_took() -> None:
    runner = runner_of()
    runner.forward([(0, ids(5, 0), 1), (1, ids(9, 1), 0)])
    assert [each.num_rows for each in runner.passes] == [5, 9]
    assert all(each.nanoseconds > 0 for each in runner.passes)
    runner.best([(0, [1, 2], 2)])
    assert [each.num_rows for each in runner.passes] == [2]


def test_what_is_wrong_with_one_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, single = runner_of(), TransformersBackend(tiny_model("gpt2"), threads=1)
    prompts, texts = [ids(5, 0), ids(6, 1)], [ids(4, 2), ids(4, 3)]
    for slot in range(2):
        runner.forward([(slot, prompts[slot], 1)])
    with pytest.raises(ConfigError, match="ids"):
        runner.forward([(0, texts[0], 4), (1, [10**6], 1)])
    with pytest.raises(ContextLengthError):
        runner.forward([(0, texts[0], 4), (1, [1] * 600, 1)])
    usual, calls = TransformersBackend.forward, list[int]()

    def second_fails(backend: TransformersBackend, tokens: Sequence[int]) -> torch.Tensor:
        calls.append(len(tokens))
        if len(calls) == 2:
            raise RuntimeError("no")
        return usual(backend, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersBackend, "forward", second_fails)
        with pytest.raises(RuntimeError, match="no"):
            runner.forward([(0, texts[0], 4), (1, texts[1], 4)])
    assert [runner.length(slot) for slot in range(2)] == [5, 6]
    rows = runner.forward([(0, texts[0], 4), (1, texts[1], 4)]).clone()
    for slot in range(2):
        assert torch.equal(rows[4 * slot : 4 * slot + 4], alone(single, prompts[slot], texts[slot])[1:])


def test_memory_is_bounded_given_back_and_always_enough_for_one() -> None:
    per_token = runner_of().kv_bytes_per_token
    assert per_token == 2 * 2 * 64 * 4  # keys and values, 2 layers of 64 numbers in fp32
    runner = runner_of(kv_bytes=600 * per_token)
    assert (runner.capacity_tokens, runner.free_tokens()) == (600, 600)
    runner.forward([(0, ids(300, 0), 1)])
    assert 0 < runner.free_tokens() <= 300
    assert runner.kv_bytes_in_use() == (600 - runner.free_tokens()) * per_token
    with pytest.raises(KVMemoryError):
        runner.forward([(1, ids(300, 1), 1)])
    assert runner.length(1) == 0
    runner.reset(0)
    assert runner.free_tokens() == 600
    runner.forward([(1, ids(512, 1), 1)])


def test_nothing_is_taken_over_from_another_sequence() -> None:
    runner = runner_of()
    runner.forward([(0, ids(9, 0), 1)])
    with pytest.raises(UnsupportedModelError, match="whole"):
        runner.copy_prefix(0, 1, 8)


def test_a_drafter_may_have_the_fastest_shapes() -> None:
    backend = TransformersBackend(tiny_model("gpt2"), exact=False)
    assert backend.layout is Layout.FREE
    assert not TransformersBatchRunner(backend, 2, 64).exact
