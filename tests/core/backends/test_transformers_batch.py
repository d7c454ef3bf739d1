"""Many sequences on one model of the transformers backend, together or by turns, against each alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.backends.transformers_attention import NAME as ATTENTION
from autopipe.core.backends.transformers_batch import TransformersBatchRunner
from autopipe.core.backends.transformers_layout import Layout
from autopipe.core.errors import ConfigError, ContextLengthError, KVMemoryError, UnsupportedModelError
from autopipe.core.kernels import has_kernels, reason_missing
from tests.tiny import tiny_model

KINDS = ("gpt2", "mistral_sliding", "qwen2")


native = pytest.mark.skipif(not has_kernels(), reason=reason_missing() or "kernels")


def backend_of(kind: str = "gpt2", *, kernels: bool = True, **options: Any) -> TransformersBackend:
    model = tiny_model(kind, **options)
    model.set_attn_implementation(ATTENTION)
    return TransformersBackend(model, kernels=kernels, threads=1)


def runner_of(kind: str = "gpt2", *, kv_bytes: int | None = None, **options: Any) -> TransformersBatchRunner:
    backend = backend_of(kind, **options)
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
    runner, single = (make(kind, kernels=kernels, dtype=dtype) for make in (runner_of, backend_of))
    assert runner.one_by_one == (not kernels or not has_kernels())
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


@native
def test_a_prompt_is_computed_by_itself_and_all_other_rows_together() -> None:
    runner, single = runner_of(), backend_of()
    prompts = [ids(5, 0), ids(9, 1), ids(7, 2)]
    runner.forward([(0, prompts[0], 1), (1, prompts[1], 0)])
    rows = runner.forward([(0, [1, 2], 2), (2, prompts[2], 1), (1, [3], 1)]).clone()
    assert [each.num_rows for each in runner.passes] == [7, 3]
    assert all(each.nanoseconds > 0 for each in runner.passes)
    for slot, text, got in ((0, [1, 2], rows[:2]), (2, [], rows[2:3]), (1, [3], rows[3:])):
        assert torch.equal(got, alone(single, prompts[slot], text)[-len(got) :])


@native
def test_many_rows_are_computed_in_groups() -> None:
    runner, single = runner_of(), backend_of()
    prompts, texts = [ids(5, n) for n in range(4)], [ids(length, 10 + length) for length in (30, 30, 30, 70)]
    runner.forward([(slot, prompt, 1) for slot, prompt in enumerate(prompts)])
    rows = runner.forward([(slot, text, len(text)) for slot, text in enumerate(texts)]).clone()
    assert [each.num_rows for each in runner.passes] == [70, 60, 30]
    for prompt, text, got in zip(prompts, texts, rows.split([30, 30, 30, 70]), strict=True):
        assert torch.equal(got, alone(single, prompt, text)[1:])


def test_where_sequences_take_turns_a_forward_says_how_long_each_took() -> None:
    runner = runner_of(kernels=False)
    runner.forward([(0, ids(5, 0), 1), (1, ids(9, 1), 0)])
    runner.best([(0, [1, 2], 2), (1, [3], 1)])
    assert [each.num_rows for each in runner.passes] == [2, 1]
    assert "padded" in runner.description


@native
def test_a_model_that_asks_its_cache_for_positions_takes_turns() -> None:
    """BioGPT looks its positions up by the length of the cache, and there is one length for all rows."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("biogpt", vocab_size=320, max_position_embeddings=512, initializer_range=0.3, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation(ATTENTION)
    backend = TransformersBackend(model, threads=1)
    assert backend.layout is Layout.ROWS
    runner = TransformersBatchRunner(backend, 4, 512)
    assert runner.one_by_one
    assert "independent of other sequences" in runner.description
    assert backend.length == 0


@native
def test_an_error_in_the_middle_of_a_stacked_forward_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, single = runner_of(), backend_of()
    prompts, texts = [ids(5, 0), ids(6, 1)], [ids(4, 2), ids(4, 3)]
    runner.forward([(slot, prompt, 1) for slot, prompt in enumerate(prompts)])
    segments = [(slot, texts[slot], 4) for slot in range(2)]

    def fails(_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr("autopipe.core.backends.transformers_stack.remember_keys", fails)
        with pytest.raises(RuntimeError, match="no"):
            runner.forward(segments)
    rows = runner.forward(segments).clone()
    for slot in range(2):
        assert torch.equal(rows[4 * slot : 4 * slot + 4], alone(single, prompts[slot], texts[slot])[1:])


def test_what_is_wrong_with_one_leaves_all_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, single = runner_of(kernels=False), backend_of(kernels=False)
    prompts, texts = [ids(5, 0), ids(6, 1)], [ids(4, 2), ids(4, 3)]
    for slot in range(2):
        runner.forward([(slot, prompts[slot], 1)])
    with pytest.raises(ConfigError, match="ids"):
        runner.forward([(0, texts[0], 4), (1, [10**6], 1)])
    with pytest.raises(ContextLengthError):
        runner.forward([(0, texts[0], 4), (1, [1] * 600, 1)])
    usual, calls = TransformersBackend.call, list[int]()

    def second_fails(backend: TransformersBackend, tokens: list[int], *args: Any, **options: Any) -> torch.Tensor:
        calls.append(len(tokens))
        if len(calls) == 2:
            raise RuntimeError("no")
        return usual(backend, tokens, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersBackend, "call", second_fails)
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
    runner = TransformersBatchRunner(backend, 2, 512, drafts=True)
    assert not runner.exact
    text = ids(90, 0)
    for begin in range(0, 90, 30):
        runner.forward([(0, text[begin : begin + 30], 0)])
    assert torch.allclose(runner.forward([(0, [7], 1)])[0], alone(backend, text, [7])[1], atol=1e-3)
