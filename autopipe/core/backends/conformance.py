"""The contract of `StageBackend`, as checks that anybody can run on a backend of their own.

All at once:

    check_backend(lambda: MyBackend(...), reference_logits, tolerance=1e-3)

or one by one, as tests:

    @pytest.mark.parametrize("check", CHECKS)
    def test_contract(check):
        CHECKS[check](Subject(make_backend, reference_logits, tolerance=1e-3))

`make_backend()` gives a backend with an empty cache, each time a new one (or the same one after `reset`, where
loading is dear; then state carried from one request to the next shows less). `reference_logits(ids)` gives what a
trusted model says of a whole sequence: float32 [len(ids), vocab_size], row i the logits after ids[i].
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from autopipe.core.backends.base import best_ids
from autopipe.core.backends.conformance_subject import (
    ConformanceError,
    MakeBackend,
    ReferenceLogits,
    Subject,
    continued,
    require,
    require_close,
    require_error,
    require_same,
    split,
)
from autopipe.core.errors import ConfigError, ContextLengthError, RollbackError

__all__ = ["CHECKS", "ConformanceError", "Subject", "check_backend"]

_FILLABLE = 1024
"""Contexts up to this length are filled to the last token."""


def fresh_backend_is_empty(subject: Subject) -> None:
    """A backend starts with length 0, states its limits, and `reset` brings it back to length 0."""
    check = "fresh_backend_is_empty"
    backend = subject.backend()
    require(check, backend.length == 0, f"length is {backend.length} before any token")
    require(
        check,
        backend.vocab_size > 0 and backend.max_length > 0,
        "vocab_size and max_length are to be positive",
    )
    prompt, _ = subject.ids(backend)
    backend.prefill(prompt)
    backend.reset()
    require(check, backend.length == 0, f"length is {backend.length} after reset")


def logits_have_the_right_form(subject: Subject) -> None:
    """Logits are float32 on the CPU: [vocab_size] from prefill, [n, vocab_size] from forward; length grows by n."""
    check = "logits_have_the_right_form"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    calls: list[tuple[list[int], ReferenceLogits, tuple[int, ...]]] = [(prompt, backend.prefill, (backend.vocab_size,))]
    calls += [(group, backend.forward, (len(group), backend.vocab_size)) for group in split(text, [1, 3, 5])]
    for ids, call, shape in calls:
        before = backend.length
        logits = call(ids)
        require(check, tuple(logits.shape) == shape, f"shape {tuple(logits.shape)}, not {shape}")
        require(check, logits.dtype is torch.float32, f"dtype {logits.dtype}, not float32")
        require(check, logits.device.type == "cpu", f"logits on {logits.device}, not on the CPU")
        grown = backend.length - before
        require(check, grown == len(ids), f"length grew by {grown} for {len(ids)} tokens")


def logits_equal_the_reference(subject: Subject) -> None:
    """Prefill and forward agree with the reference within the tolerance, for several groupings."""
    check = "logits_equal_the_reference"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    reference = subject.reference_logits([*prompt, *text])
    for sizes in ([1], [2], [8], [len(text)]):
        backend.reset()
        rows = [backend.prefill(prompt).clone()[None]]
        rows += [backend.forward(group).clone() for group in split(text, sizes)]
        require_close(check, subject, torch.cat(rows), reference[len(prompt) - 1 :], f"groups of {sizes[0]}")


def prefill_is_deterministic(subject: Subject) -> None:
    """The same prefill gives bitwise the same logits, and so do the forwards after it."""
    check = "prefill_is_deterministic"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    runs = []
    for _ in range(2):
        backend.reset()
        runs.append((backend.prefill(prompt).clone(), backend.forward(text).clone()))
    require_same(check, runs[0][0], runs[1][0], "a second prefill")
    require_same(check, runs[0][1], runs[1][1], "the forward after a second prefill")


def rollback_and_forward_again(subject: Subject) -> None:
    """After a roll-back to any length, also 0, what follows is bitwise what a fresh run gives."""
    check = "rollback_and_forward_again"
    prompt, text = subject.ids(subject.backend())
    wrong = text[::-1]
    for kept in range(len(text) + 1):
        backend = subject.backend()
        backend.prefill(prompt)
        if kept:
            backend.forward(text[:kept])
        length = backend.length
        backend.forward(wrong[: len(text) - kept + 1])
        backend.rollback(length)
        require(check, backend.length == length, f"length is {backend.length} after a roll-back to {length}")
        again = backend.forward((text[kept:] or text[:1])[:5]).clone()

        fresh = subject.backend()
        fresh.prefill(prompt)
        if kept:
            fresh.forward(text[:kept])
        require_same(check, again, fresh.forward((text[kept:] or text[:1])[:5]), f"a roll-back to {length}")


def rollback_into_a_prompt(subject: Subject) -> None:
    """A roll-back into the prefilled tokens leaves what the reference says; to 0, bitwise what a fresh run gives."""
    check = "rollback_into_a_prompt"
    prompt, text = subject.ids(subject.backend())
    reference = subject.reference_logits([*prompt, *text])
    for kept in range(len(prompt)):
        backend = subject.backend()
        backend.prefill([*prompt[:kept], *text[: len(prompt) - kept]])
        backend.forward(text[:3])
        backend.rollback(kept)
        rows = backend.forward([*prompt[kept:], *text])
        require_close(check, subject, rows, reference[kept:], f"a roll-back to {kept}")
    backend = subject.backend()
    first = backend.prefill(prompt).clone()
    backend.forward(text)
    backend.rollback(0)
    require_same(check, backend.prefill(prompt), first, "a prefill after a roll-back to 0")


def rejected_drafts_leave_no_trace(subject: Subject) -> None:
    """Drafts forwarded and rolled back at every position change nothing (bitwise if `exact`)."""
    check = "rejected_drafts_leave_no_trace"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    draw = random.Random(subject.seed)
    backend.prefill(prompt)
    plain = torch.cat([backend.forward([token]).clone() for token in text])
    backend.reset()
    backend.prefill(prompt)
    rows: list[torch.Tensor] = []
    while len(rows) < len(text):
        right = text[len(rows) : len(rows) + draw.randint(1, 4)]
        room = backend.max_length - backend.length - len(right)
        wrong = [draw.randrange(backend.vocab_size) for _ in range(min(draw.randint(0, 4), room))]
        rows += list(backend.forward([*right, *wrong])[: len(right)].clone())
        backend.rollback(len(prompt) + len(rows))
    if backend.exact:
        require_same(check, torch.stack(rows), plain, "drafting with rejections")
    else:
        require_close(check, subject, torch.stack(rows), plain, "drafting with rejections")


def too_long_a_rollback_is_an_error(subject: Subject) -> None:
    """`rollback` to a negative length or beyond `length` raises RollbackError and changes nothing."""
    check = "too_long_a_rollback_is_an_error"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    require_error(check, RollbackError, lambda: backend.rollback(1), "a roll-back of an empty cache to 1")
    expected = continued(subject, prompt, text)
    backend.prefill(prompt)
    for length in (-1, len(prompt) + 1, len(prompt) + 1000):
        require_error(check, RollbackError, lambda: backend.rollback(length), f"a roll-back to {length}")  # noqa: B023 - called at once
        require(check, backend.length == len(prompt), f"length is {backend.length} after a refused roll-back")
    require_same(check, backend.forward(text), expected, "a refused roll-back")


def best_is_what_forward_says(subject: Subject) -> None:
    """`best` gives the lowest id of the largest logit of every row `forward` gives, and leaves the same cache."""
    check = "best_is_what_forward_says"
    backend = subject.backend()
    backend.prepare_best()
    prompt, text = subject.ids(backend)
    backend.prefill(prompt)
    for group in split(text, [1, 4, 9]):
        before = backend.length
        expected = best_ids(backend.forward(group))
        backend.rollback(before)
        found = backend.best(group)
        require(check, found == expected, f"{found} after {before} tokens, forward's rows say {expected}")
        grown = backend.length - before
        require(check, grown == len(group), f"length grew by {grown} for {len(group)} tokens")
    after = backend.forward(text[:1]).clone()
    backend.rollback(backend.length - 1 - len(text))
    for group in split(text, [1, 4, 9]):
        backend.forward(group)
    require_same(check, backend.forward(text[:1]), after, "a forward after `best`")


def bad_ids_are_refused(subject: Subject) -> None:
    """No tokens, or ids outside the vocabulary, raise ConfigError and change nothing."""
    check = "bad_ids_are_refused"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    expected = continued(subject, prompt, text)
    backend.prefill(prompt)
    for ids in ([], [-1], [backend.vocab_size], [*text[:2], backend.vocab_size + 5]):
        for call in (backend.prefill, backend.forward):
            require_error(check, ConfigError, lambda: call(ids), f"ids {ids}")  # noqa: B023 - called at once
            require(check, backend.length == len(prompt), f"length is {backend.length} after ids {ids}")
    require_same(check, backend.forward(text), expected, "refused ids")


def context_overflow_is_refused(subject: Subject) -> None:
    """More than `max_length` tokens raise ContextLengthError and change nothing; exactly as many fit."""
    check = "context_overflow_is_refused"
    backend = subject.backend()
    prompt, text = subject.ids(backend)
    expected = continued(subject, prompt, text)
    backend.prefill(prompt)
    too_many = [text[0]] * (backend.max_length - backend.length + 1)
    for call in (backend.prefill, backend.forward):
        require_error(check, ContextLengthError, lambda: call(too_many), "one token too many")  # noqa: B023 - called at once
        require(check, backend.length == len(prompt), f"length is {backend.length} after one token too many")
    require_same(check, backend.forward(text), expected, "an overflow that was refused")
    if backend.max_length <= _FILLABLE:
        backend.reset()
        ids = [(7 * index + 3) % backend.vocab_size for index in range(backend.max_length)]
        tail = min(12, len(ids) - 1)
        if tail:
            backend.prefill(ids[:-tail])
            rows = torch.cat([backend.forward(group).clone() for group in split(ids[-tail:], [1, 3])])
        else:
            rows = backend.forward(ids)
        reference = subject.reference_logits(ids)
        require_close(check, subject, rows, reference[len(ids) - len(rows) :], "filling the context")
        require_error(check, ContextLengthError, lambda: backend.forward(ids[:1]), "a token beyond a full context")


def nothing_is_left_of_a_request(subject: Subject) -> None:
    """After `reset`, a request gives bitwise what it gives on a new backend."""
    check = "nothing_is_left_of_a_request"
    fresh = subject.backend()
    prompt, text = subject.ids(fresh)
    expected = (fresh.prefill(prompt).clone(), fresh.forward(text).clone())
    fresh.reset()
    backend = subject.backend()
    other_prompt, other_text = subject.ids(backend, salt=1)
    backend.prefill(other_prompt)
    backend.forward(other_text)
    backend.rollback(len(other_prompt))
    backend.reset()
    require_same(check, backend.prefill(prompt), expected[0], "a prefill after another request")
    require_same(check, backend.forward(text), expected[1], "a forward after another request")


def exact_over_groupings(subject: Subject) -> None:
    """If `exact`: a row of logits is bitwise the same however the tokens since the prefill were grouped."""
    check = "exact_over_groupings"
    backend = subject.backend()
    if not backend.exact:
        return
    prompt, text = subject.ids(backend)
    backend.prefill(prompt)
    alone = torch.cat([backend.forward([token]).clone() for token in text])
    draw = random.Random(subject.seed)
    for sizes in ([2], [3], [8], [len(text)], *([draw.randint(1, 11) for _ in text] for _ in range(3))):
        backend.reset()
        backend.prefill(prompt)
        rows = torch.cat([backend.forward(group).clone() for group in split(text, sizes)])
        require_same(check, rows, alone, f"groups of {sizes[:8]}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        fresh_backend_is_empty,
        logits_have_the_right_form,
        logits_equal_the_reference,
        prefill_is_deterministic,
        rollback_and_forward_again,
        rollback_into_a_prompt,
        rejected_drafts_leave_no_trace,
        too_long_a_rollback_is_an_error,
        best_is_what_forward_says,
        bad_ids_are_refused,
        context_overflow_is_refused,
        nothing_is_left_of_a_request,
        exact_over_groupings,
    )
}
"""Every check by name. A check returns None, or raises ConformanceError."""


def check_backend(
    make_backend: MakeBackend,
    reference_logits: ReferenceLogits,
    *,
    tolerance: float,
    prompt_length: int = 9,
    text_length: int = 40,
    seed: int = 0,
) -> None:
    """Run every check; see the module for the arguments, and `Subject`.

    Raises:
        ConformanceError: of the first check that fails.
    """
    subject = Subject(make_backend, reference_logits, tolerance, prompt_length, text_length, seed)
    for check in CHECKS.values():
        check(subject)
