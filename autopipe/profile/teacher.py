"""The target's greedy output, and what a drafter would have picked at every position of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from autopipe.core.backends.base import StageBackend

_BLOCK = 32
"""Positions of a teacher-forced forward: few enough for a large vocabulary's logits."""


def greedy_output(
    backend: StageBackend, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]
) -> dict[str, Any]:
    """Plain greedy decoding, as the engine does it without drafters.

    Returns:
        token_ids; finish_reason (`stop`, `length`); decode_s, seconds after the first token; pick_s, median
        seconds of picking a token from logits.
    """
    from autopipe.core.picker import Picker
    from autopipe.core.sampling import SamplingParams

    room = backend.max_length - len(prompt)
    params = SamplingParams(max_new_tokens=min(max_new_tokens, room))
    picker = Picker(params, vocab_size=backend.vocab_size, eos_token_ids=eos, prompt_length=len(prompt))
    backend.reset()
    tokens, pick_s = list(prompt), list[float]()
    logits = backend.prefill(tokens)[None]  # [1, vocab]
    started = time.monotonic()
    while True:
        picking = time.monotonic()
        tokens += picker.verify(logits, tokens).token_ids
        pick_s.append(time.monotonic() - picking)
        finished = tokens[-1] in eos
        if finished or len(tokens) - len(prompt) == params.max_new_tokens:
            break
        logits = backend.forward(tokens[-1:])  # [1, vocab]
    decode_s = time.monotonic() - started
    backend.reset()
    return {
        "token_ids": tokens[len(prompt) :],
        "finish_reason": "stop" if finished else "length",
        "decode_s": decode_s,
        "pick_s": sorted(pick_s)[len(pick_s) // 2],
    }


def forced_picks(backend: StageBackend, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> list[int]:
    """The greedy pick at each position of `output`, given the prompt and the output before it.

    Args:
        vocab_size: the target's: no other tokens can be picked.

    Where prompt and output are too long for the stage the rest is -1: it would sit out.
    """
    usable = min(vocab_size, backend.vocab_size)
    length = min(len(output), max(0, backend.max_length - len(prompt) + 1))
    if length == 0:
        return [-1] * len(output)
    backend.reset()
    picks = [int(backend.prefill(prompt)[:usable].argmax())]
    for start in range(0, length - 1, _BLOCK):
        block = output[start : min(start + _BLOCK, length - 1)]
        picks += backend.forward(block)[:, :usable].argmax(dim=1).tolist()  # [n]
    backend.reset()
    return picks + [-1] * (len(output) - len(picks))
