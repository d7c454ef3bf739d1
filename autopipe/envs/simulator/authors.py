"""The systems that the PipeSpec authors measured: their asynchronous pair of models and the synchronous one.

They differ from our engine (see `kernel`): a verifier makes its drafter synchronise before it verifies,
waiting for the draft step under way; corrections reach the drafter at the end of its step; workers poll. How
corrections are counted was found from the published acceptance sequences of runs with different lookaheads,
which must all come from one text:

* A verification of n drafts that finds the first wrong one at k >= 1 emits k tokens; the correction is not
  one of them, but becomes the (certainly right) first draft of the next verification.
* All n accepted: n tokens, no bonus. In the asynchronous system the verifier's next pick is still compared
  with the drafter's next draft and replaces a wrong one; in the synchronous one a wrong first draft (k = 0)
  makes the next verification emit the correction alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.envs.simulator.model import LatencyCurve

POLL_S = 1e-4
VERIFY_CAP = 100


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Seconds of a draft step, and of a verification by its number of drafts."""

    draft_s: float
    verify: LatencyCurve


@dataclass(frozen=True, slots=True)
class PairResult:
    """What a pair of models did on one text: seconds, draft steps, tokens emitted per verification."""

    total_s: float
    draft_steps: int
    accepted_tokens: tuple[int, ...]


def simulate_async_pair(agrees: Sequence[bool], lookahead: int, times: PairTimes) -> PairResult:
    """PipeSpec with one drafter.

    Args:
        agrees: whether the drafter picks the target's token, by position, on the right text before it.
        lookahead: drafts the verifier waits for; 0: whatever there is.
    """
    step_s, wanted = times.draft_s, max(lookahead, 1)
    now_s, step_ends_s = 0.0, step_s
    position = pending = steps = 0
    mid_step = corrected = False  # corrected: the first pending draft is the verifier's correction
    accepted_tokens: list[int] = []
    while position < len(agrees):
        # Wait for drafts; with enough of them, only for the step under way to end, which adds one more.
        num_waits = wanted - pending if pending < wanted else int(mid_step)
        if num_waits:
            now_s = step_ends_s + (num_waits - 1) * step_s
            step_ends_s = now_s + step_s
            pending += num_waits
            steps += num_waits
        num_drafts = min(pending, VERIFY_CAP)
        now_s += times.verify.seconds(num_drafts) + POLL_S
        while step_ends_s <= now_s:
            step_ends_s += step_s
            pending += 1
            steps += 1

        accepted = _accepted(agrees, position, num_drafts, corrected)
        accepted_tokens.append(accepted)
        position += accepted
        pending -= accepted
        corrected = position < len(agrees) and not agrees[position]
        mid_step = not corrected
        if corrected:
            now_s = step_ends_s  # the step under way ends, and is lost with all drafts but the correction
            step_ends_s += step_s
            pending = 1
            steps += 1
    return PairResult(now_s, steps, tuple(accepted_tokens))


def simulate_sync_pair(agrees: Sequence[bool], lookahead: int, times: PairTimes) -> PairResult:
    """The synchronous pair: draft `lookahead` tokens, verify them, in turns.

    Args:
        agrees: as for `simulate_async_pair`.
    """
    window = min(max(lookahead, 1), VERIFY_CAP)
    round_s = times.verify.seconds(window) + 2 * POLL_S
    now_s, position, steps = 0.0, 0, 0
    corrected, fresh = False, True  # fresh: one draft comes without a step (the prefill's, or the correction)
    accepted_tokens: list[int] = []
    while position < len(agrees):
        num_steps = window - fresh
        steps += num_steps
        now_s += num_steps * times.draft_s + round_s
        accepted = _accepted(agrees, position, window, corrected)
        fresh = accepted < window
        corrected = fresh and accepted > 0
        accepted_tokens.append(max(accepted, 1))
        position += max(accepted, 1)
    return PairResult(now_s, steps, tuple(accepted_tokens))


def _accepted(agrees: Sequence[bool], position: int, num_drafts: int, corrected: bool) -> int:
    """Drafts accepted from `position` on; beyond the end of the text all are."""
    accepted = 1 if corrected else 0
    while accepted < num_drafts and (position + accepted >= len(agrees) or agrees[position + accepted]):
        accepted += 1
    return accepted
