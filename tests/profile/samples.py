"""A small profile made by hand, and a backend that says a fixed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopipe.core.backends.base import StageBackend
from autopipe.core.plan import NgramOptions
from autopipe.profile import Profile, PromptRecord
from autopipe.profile.ngram_replay import replay

SMALL = {"model": "acme/small"}
BIG = {"model": "acme/big", "dtype": "bf16"}
PROMPT = (5, 6, 7, 8)
LOOP = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4)
"""An output that an n-gram drafter foresees in part."""
OTHER = (10, 11, 12, 13, 14, 15, 16, 17)


def points(milliseconds: dict[int, float], context: int = 64) -> list[dict[str, Any]]:
    return [
        {"context": context, "tokens": n, "seconds": value / 1e3, "p90_s": value / 1e3}
        for n, value in milliseconds.items()
    ]


def stage_profile(name: str, stage: dict[str, Any], *, one_ms: float) -> dict[str, Any]:
    """A stage that takes `one_ms` for a token on one thread and half of that on two; double for 8 tokens."""
    return {
        "name": name,
        "stage": stage,
        "device": "cpu",
        "vocab_size": 100,
        "max_length": 2048,
        "exact": True,
        "choice": "made up",
        "load_s": 2.0,
        "start_s": 1.0,
        "memory": {"rss_bytes": 4096, "pss_bytes": None, "weight_bytes": 1024, "kv_bytes_per_token": 8},
        "curves": [
            {
                "threads": threads,
                "verify": points({1: one_ms / threads, 8: 2 * one_ms / threads}, 64)
                + points({1: 3 * one_ms / threads, 8: 6 * one_ms / threads}, 1024),
                "prefill": points({4: 2 * one_ms, 64: 20 * one_ms}, 0),
            }
            for threads in (1, 2)
        ],
    }


def prompt_records() -> list[PromptRecord]:
    records = (("loop", "code", LOOP), ("other", "chat", OTHER))
    return [
        PromptRecord(name=name, kind=kind, prompt_ids=PROMPT, output_ids=output, finish_reason="length", decode_s=0.1)
        for name, kind, output in records
    ]


def profile_data() -> dict[str, Any]:
    """Fields of a whole profile."""
    records = prompt_records()
    return {
        "content_hash": "0123",
        "created_at": "2026-01-01T00:00:00+00:00",
        "took_s": 1.0,
        "machine": {
            "fingerprint": "abc",
            "platform": "Linux x86_64",
            "cpu": None,
            "cores": 2,
            "memory_bytes": 1 << 30,
            "gpus": [],
            "libraries": {"torch": "2"},
        },
        "settings": {
            "plan": {"chain": [{"model": "ngram"}, SMALL, BIG]},
            "threads": [1, 2],
            "contexts": [64, 1024],
            "verify_tokens": [1, 8],
            "prefill_tokens": [4, 64],
            "repeats": 1,
            "prompts": ["custom"],
            "max_new_tokens": 24,
        },
        "stages": [stage_profile("small", SMALL, one_ms=1.0), stage_profile("big", BIG, one_ms=10.0)],
        "engine": {
            "start_s": 5.0,
            "settings_s": 0.001,
            "join_s": {"small": 3.5},
            "leave_s": {"small": 0.01},
            "step_s": 0.0101,
            "step_overhead_s": 0.0,
            "handover_s": 0.0002,
        },
        "contention": [
            {"stage": "small", "other": "big", "threads": 1, "factor": 1.5},
            {"stage": "big", "other": "small", "threads": 1, "factor": 1.2},
        ],
        "prompts": [record.model_dump() for record in records],
        "agreement": [{"drafter": "small", "agrees": ["110" * 8, "1" * 8], "wrong_equal": {}}],
        "ngram": {**replay(NgramOptions(), records).model_dump(), "draft_s": 0.0},
    }


def sample_profile() -> Profile:
    return Profile.parse(profile_data())


class ScriptedBackend(StageBackend):
    """Says `text` whatever it is given, and remembers how many tokens each forward had."""

    def __init__(self, text: Sequence[int], *, vocab_size: int = 100, max_length: int = 10_000) -> None:
        self.name = "scripted"
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.exact = True
        self.text = list(text)
        self.forwards: list[int] = []
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        return self._append(len(ids))[-1]

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        self.forwards.append(len(ids))
        return self._append(len(ids))

    def rollback(self, length: int) -> None:
        self._length = length

    def _append(self, count: int) -> torch.Tensor:
        logits = torch.zeros(count, self.vocab_size)
        for row in range(count):
            position = self._length + row + 1
            logits[row, self.text[position] if position < len(self.text) else 0] = 1.0
        self._length += count
        return logits
