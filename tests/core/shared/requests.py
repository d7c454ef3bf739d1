"""Requests for a pipeline in this process, and what the target says to them alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_batch import batch_runner
from autopipe.core.ngram import NgramDrafter
from autopipe.core.picker import Picker
from autopipe.core.plan import NgramOptions
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.options import SharingOptions
from autopipe.core.shared.pipeline import SharedPipeline
from autopipe.core.shared.sequence import SharedRequest
from tests.tiny import tiny_model, tiny_state

VOCAB = 320


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@lru_cache
def _model(dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    model = tiny_model("qwen3", dtype=dtype)
    return model.config, tiny_state(model)


@lru_cache
def _single(dtype: torch.dtype) -> FusedBackend:
    config, state = _model(dtype)
    return FusedBackend(config, state, dtype=dtype, threads=1)


def make_pipeline(
    dtype: torch.dtype = torch.float32,
    *,
    window: int | None = 6,
    gate: bool = True,
    kv_bytes: int | None = None,
    threads: int = 1,
    **options: Any,
) -> SharedPipeline:
    """A tiny model; `window` None: no drafts."""
    sharing = SharingOptions.parse({"max_active": 16, "max_batch": 8, "max_rows": 64, "cached_sequences": 8, **options})
    config, state = _model(dtype)
    slots = sharing.max_active + (sharing.cached_sequences if sharing.prefix_cache else 0)
    runner = batch_runner(config, state, dtype=dtype, threads=threads, slots=slots, kv_bytes=kv_bytes)
    pipeline = SharedPipeline(runner, sharing)
    if window is not None:
        ngram = NgramOptions(gate=gate)
        pipeline.configure(DraftingConfig(ngram=ngram, window=window), lambda: NgramDrafter(ngram))
    return pipeline


def request(
    number: int,
    prompt: Sequence[int],
    *,
    eos: Sequence[int] = (),
    output: Sequence[int] = (),
    vocab: int = VOCAB,
    **params: Any,
) -> SharedRequest:
    parsed = SamplingParams.parse({"max_new_tokens": 24, **params})

    def picker(vocab_size: int, *, is_target: bool = False) -> Picker:
        return Picker(
            parsed, vocab_size=vocab_size, eos_token_ids=eos, prompt_length=len(prompt), is_target=is_target, stage=1
        )

    return SharedRequest(
        id=number,
        tokens=[*prompt, *output],
        prompt_length=len(prompt),
        end=len(prompt) + parsed.max_new_tokens,
        eos_token_ids=frozenset(eos),
        picker=picker(vocab, is_target=True),
        drafter_picker=picker,
    )


class Collected:
    """Runs a pipeline and keeps what each request got."""

    def __init__(self, pipeline: SharedPipeline) -> None:
        self.pipeline = pipeline
        self.output: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, str | None] = {}
        self.errors: dict[int, Exception] = {}
        self.steps = 0
        self.longest_gap: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def step(self) -> None:
        report = self.pipeline.step()
        self.steps += 1
        for served in report.served:
            self.output.setdefault(served.request, []).extend(served.token_ids)
            self.logprobs.setdefault(served.request, []).extend(served.logprobs or [])
            if served.finish_reason is not None:
                self.reasons[served.request] = served.finish_reason
            if served.error is not None:
                self.errors[served.request] = served.error
            gap = self.steps - self._last.get(served.request, self.steps)
            self.longest_gap[served.request] = max(gap, self.longest_gap.get(served.request, 0))
            self._last[served.request] = self.steps

    def run(self, limit: int = 5000) -> dict[int, list[int]]:
        while self.pipeline.has_work:
            self.step()
            assert self.steps < limit, "the pipeline does not come to an end"
        return self.output


def alone(
    prompt: Sequence[int], dtype: torch.dtype = torch.float32, *, eos: Sequence[int] = (), **params: Any
) -> list[int]:
    """Plain decoding by the single-sequence backend."""
    parsed = SamplingParams.parse({"max_new_tokens": 24, **params})
    backend = _single(dtype)
    backend.reset()
    picker = Picker(parsed, vocab_size=VOCAB, eos_token_ids=eos, prompt_length=len(prompt))
    tokens = list(prompt)
    logits = backend.prefill(tokens)[None]
    while True:
        tokens += picker.verify(logits, tokens).token_ids
        if len(tokens) == len(prompt) + parsed.max_new_tokens or tokens[-1] in eos:
            return tokens[len(prompt) :]
        logits = backend.forward(tokens[-1:])
