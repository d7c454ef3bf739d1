"""The discrete-event kernel: what the engine's stages do, and when.

Semantics
---------
Stages 0 .. K-1 form the chain, K-1 is the target. Positions count output tokens from 0. Each stage holds a
*sequence*, its belief about the text. At a position a stage always picks the same token, written as a small
code: 0 is the target's token, anything else a wrong one. What follows a wrong token is cut off by a later
correction whatever it is, so codes need not depend on the prefix.

* **Forward.** A stage forwards the tokens of its sequence that its cache lacks (one, unless it has fallen
  behind), and behind them n *drafts*: what its upstream stage holds beyond the stage's own sequence. With r
  rows in all that takes `latency[stage, r]`. When it ends the stage keeps the drafts equal to its own picks
  up to the first that is not (`accepted`), and adds one pick of its own (recovered or bonus). Stage 0 has no
  drafts: it adds one token. A forward is never interrupted.
* **Limits.** A stage starts nothing when it is `window` tokens or more beyond its consumer's sequence, or at
  the end of the text. At most `verify_cap` drafts go into a forward.
* **Prefill.** The first forward of a request takes `prefill_s` and has no drafts; neither has one that must
  catch up on more than `MAX_CATCH_UP_ROWS` tokens.
* **Reconciling.** A stage takes over its consumer's sequence: from the first position where the two differ
  (a *rollback*), or where its own ends (it has *fallen behind*, and its next forward takes all that is
  missing). If nothing differs, whatever it holds beyond stays valid. It does so when its consumer's sequence
  has changed, as soon as its own forward is over; then its own upstream stage reconciles with it, and so on
  up the chain. Until a stage has reconciled, its consumer sees no drafts of it.
* **async.** A stage starts when `min_drafts` drafts wait for it, or as many as could come or could be used.
  With `step_alone` it does not wait: with too few drafts it forwards without any.
* **lockstep.** One stage computes at a time, the most downstream one that is ready. A stage is ready when its
  upstream stage's window is full, or it holds all the drafts it could use.
* **Contention.** A stage's forward slows down by the product of `contention[stage, other]` over the others
  that compute at that moment.
* **n-gram drafts.** Stage 0 may have a drafter in its own process: before every step it offers what was
  recorded for the position (`local_*`). With `GATE` the stage takes as many as pay, by
  `core.gating.best_length`. Behind a wrong token of its own, where nothing was recorded, it takes none.
* **Costs.** Each forward takes `overhead_s` more, and the one after a rollback `rollback_s` more.

Plain decoding is a chain of one stage. Ties are broken towards the target, so a run is a function of its
arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.simulator._jit import jit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Codes = NDArray[np.int8]

LOCKSTEP, ASYNC = 0, 1
MAX_CATCH_UP_ROWS = 8

# Columns of `length_of`: lengths of a stage's sequence, of its cache (-1: no prompt in it yet), and of what
# it shares with its consumer; and drafts in the forward that is under way (-1: the stage is idle).
HELD, CACHED, AGREED, DRAFTS = 0, 1, 2, 3
# Columns of `clock`: seconds left of the forward under way, seconds a rollback adds to the next forward,
# start of the forward under way.
LEFT_S, PENALTY_S, STARTED_S = 0, 1, 2
# Columns of `count`.
FORWARDS, ROWS, PROPOSED, ACCEPTED, EMITTED, ROLLBACKS, DISCARDED, CAUGHT_UP = 0, 1, 2, 3, 4, 5, 6, 7
NUM_COUNTS = 8
# Entries of `local`: window of the n-gram drafter in front of stage 0 (0: there is none), whether it is gated.
LOCAL_WINDOW, GATE = 0, 1


@jit
def forward_s(latency: Floats, stage: int, rows: int) -> Any:
    """Seconds of a forward of `rows` tokens; beyond the table, along its last slope."""
    last = latency.shape[1] - 1
    if rows <= last:
        return latency[stage, rows]
    slope = latency[stage, last] - latency[stage, last - 1]
    return latency[stage, last] + slope * (rows - last)


@jit
def window_now(full: Any, warmup: Ints, generated: Any) -> Any:
    """The window after `generated` tokens.

    `warmup` is [start_window, end of the conservative stretch (0: none), double_every (0: never)].
    """
    if generated < warmup[1]:
        return min(full, warmup[0])
    if warmup[2] > 0:
        return min(full, warmup[0] << min(generated // warmup[2], 16))
    return full


@jit
def reconcile(stage: int, sequence: Codes, length_of: Ints, clock: Floats, count: Ints, rollback_s: Floats) -> None:
    """Let `stage`, and through it the stages upstream of it, take over what its consumer holds."""
    while stage >= 0:
        consumer = stage + 1
        held, theirs = length_of[stage, HELD], length_of[consumer, HELD]
        at = length_of[stage, AGREED]
        while at < held and at < theirs and sequence[stage, at] == sequence[consumer, at]:
            at += 1
        length_of[stage, AGREED] = at
        if length_of[stage, DRAFTS] >= 0 or at == theirs:
            return  # busy: it reconciles when its forward ends; or all agreed: nothing changes upstream
        if at < held:
            length_of[stage, CACHED] = min(length_of[stage, CACHED], at)
            clock[stage, PENALTY_S] = rollback_s[stage]
            count[stage, ROLLBACKS] += 1
            count[stage, DISCARDED] += held - at
            if stage > 0:
                length_of[stage - 1, AGREED] = min(length_of[stage - 1, AGREED], at)
        for position in range(at, theirs):
            sequence[stage, position] = sequence[consumer, position]
        length_of[stage, HELD] = theirs
        length_of[stage, AGREED] = theirs
        stage -= 1


@jit
def drafts_to_take(
    stage: int,
    mode: int,
    text_end: int,
    windows: Ints,
    min_drafts: Ints,
    verify_caps: Ints,
    step_alone: Ints,
    warmup: Ints,
    length_of: Ints,
) -> Any:
    """Drafts that `stage`, now idle, takes into a forward; -1 if it has to wait."""
    held = length_of[stage, HELD]
    limit = text_end
    if stage < windows.size - 1:
        theirs = length_of[stage + 1, HELD]
        limit = min(limit, theirs + window_now(windows[stage], warmup, theirs))
    if held >= limit:
        return -1
    missing = held - length_of[stage, CACHED]
    if stage == 0 or length_of[stage, CACHED] < 0 or missing > MAX_CATCH_UP_ROWS:
        return 0
    waiting = 0
    if length_of[stage - 1, AGREED] >= held:
        waiting = length_of[stage - 1, HELD] - held
    usable = min(verify_caps[stage], limit - held - 1)
    most = min(usable, window_now(windows[stage - 1], warmup, held))
    wanted = most if mode == LOCKSTEP else min(most, min_drafts[stage])
    if waiting < wanted:
        return 0 if step_alone[stage] and mode == ASYNC else -1
    return min(waiting, usable)


@jit
def gated_length(most: Any, position: Any, local_confidence: Floats, latency: Floats) -> Any:
    """As `core.gating.best_length`: the drafts, 0 to `most`, worth verifying."""
    chain, expected = 1.0, 1.0
    best, best_value = 0, -np.inf
    for drafts in range(most + 1):
        if drafts > 0:
            chain *= local_confidence[position, drafts - 1]
            expected += chain
        value = expected / max(forward_s(latency, 0, drafts + 1), 1e-9)
        if value > best_value:
            best, best_value = drafts, value
    return best


@jit
def local_drafts(
    text_end: int,
    verify_cap: Any,
    warmup: Ints,
    sequence: Codes,
    length_of: Ints,
    local: Ints,
    local_length: Ints,
    local_confidence: Floats,
    latency: Floats,
) -> Any:
    """Drafts that stage 0, about to start, takes from the n-gram drafter in its process."""
    held = length_of[0, HELD]
    missing = held - length_of[0, CACHED]
    if local[LOCAL_WINDOW] == 0 or length_of[0, CACHED] < 0 or missing > MAX_CATCH_UP_ROWS:
        return 0
    for position in range(length_of[length_of.shape[0] - 1, HELD], held):
        if sequence[0, position] != 0:
            return 0
    most = min(local_length[held], verify_cap, text_end - held - 1)
    most = min(most, window_now(local[LOCAL_WINDOW], warmup, held))
    if local[GATE] == 0:
        return most
    return gated_length(most, held, local_confidence, latency)


@jit
def slow_downs(length_of: Ints, contention: Floats, factors: Floats) -> None:
    """Write the factor by which each stage is slower now into `factors`."""
    for stage in range(factors.size):
        factors[stage] = 1.0
        for other in range(factors.size):
            if other != stage and length_of[other, DRAFTS] >= 0:
                factors[stage] *= contention[stage, other]


@jit
def advance(
    mode: int,
    goal: int,
    text_end: int,
    now_s: float,
    windows: Ints,  # [K]
    min_drafts: Ints,  # [K]
    verify_caps: Ints,  # [K]
    step_alone: Ints,  # [K]
    warmup: Ints,  # [3]
    prefill_s: Floats,  # [K]
    latency: Floats,  # [K, rows + 1] seconds; column 0 unused
    overhead_s: Floats,  # [K]
    rollback_s: Floats,  # [K]
    contention: Floats,  # [K, K]
    local: Ints,  # [2], see LOCAL_WINDOW and GATE
    local_length: Ints,  # [text_end] drafts offered at each position
    local_right: Ints,  # [text_end] of these, from the first, the target's
    local_confidence: Floats,  # [text_end, most] chance of each, given those before it
    picks: Codes,  # [K, text_end]
    sequence: Codes,  # [K, text_end]            state, written
    length_of: Ints,  # [K, 4]                   state, written
    clock: Floats,  # [K, 3]                     state, written
    count: Ints,  # [K, NUM_COUNTS]              state, written
    busy_s: Floats,  # [K]                       state, written
    emitted_s: Floats,  # [text_end]             written: when the target emitted each token
    histogram: Ints,  # [K, bins]                written: verifications by tokens emitted
    timeline: Floats,  # [events, 6]             written: stage, start_s, end_s, rows, drafts, emitted
    num_events: Ints,  # [1]                     written
) -> float:
    """Run until the target holds `goal` tokens; return the time. Call again with a larger `goal` to go on."""
    num_stages = windows.size
    target = num_stages - 1
    factors = np.ones(num_stages)
    contended = mode == ASYNC and (contention != 1).any()
    while length_of[target, HELD] < goal:
        # Start what can start, the target first.
        num_busy = 0
        for stage in range(num_stages):
            num_busy += length_of[stage, DRAFTS] >= 0
        for stage in range(target, -1, -1):
            if length_of[stage, DRAFTS] >= 0:
                continue
            if mode == LOCKSTEP and num_busy > 0:
                break
            drafts = drafts_to_take(
                stage, mode, text_end, windows, min_drafts, verify_caps, step_alone, warmup, length_of
            )
            if drafts < 0:
                continue
            if stage == 0:
                drafts = local_drafts(
                    text_end,
                    verify_caps[0],
                    warmup,
                    sequence,
                    length_of,
                    local,
                    local_length,
                    local_confidence,
                    latency,
                )
            rows = length_of[stage, HELD] - length_of[stage, CACHED] + drafts
            length_of[stage, DRAFTS] = drafts
            seconds = prefill_s[stage] if length_of[stage, CACHED] < 0 else forward_s(latency, stage, rows)
            clock[stage, LEFT_S] = seconds + overhead_s[stage] + clock[stage, PENALTY_S]
            clock[stage, PENALTY_S] = 0.0
            clock[stage, STARTED_S] = now_s
            count[stage, FORWARDS] += 1
            count[stage, ROWS] += rows
            count[stage, CAUGHT_UP] += rows - drafts - 1
            num_busy += 1

        # Find the forward that ends next, and let the others come as far by then.
        if contended:
            slow_downs(length_of, contention, factors)
        ending, wait_s = -1, np.inf
        for stage in range(target, -1, -1):
            if length_of[stage, DRAFTS] >= 0 and clock[stage, LEFT_S] * factors[stage] < wait_s:
                ending, wait_s = stage, clock[stage, LEFT_S] * factors[stage]
        if ending < 0:
            return np.nan  # nobody can go on; the tests show that it cannot happen
        for stage in range(num_stages):
            if length_of[stage, DRAFTS] >= 0:
                clock[stage, LEFT_S] = max(0.0, clock[stage, LEFT_S] - wait_s / factors[stage])
        now_s += wait_s

        # End that forward: keep the drafts that agree, add a pick of one's own.
        held, drafts = length_of[ending, HELD], length_of[ending, DRAFTS]
        accepted = 0
        if ending == 0:
            while accepted < drafts and accepted < local_right[held] and picks[0, held + accepted] == 0:
                sequence[0, held + accepted] = 0
                accepted += 1
        else:
            while accepted < drafts and sequence[ending - 1, held + accepted] == picks[ending, held + accepted]:
                sequence[ending, held + accepted] = picks[ending, held + accepted]
                accepted += 1
        sequence[ending, held + accepted] = picks[ending, held + accepted]
        rows = held - length_of[ending, CACHED] + drafts
        length_of[ending, HELD] = held + accepted + 1
        length_of[ending, CACHED] = held + accepted
        length_of[ending, DRAFTS] = -1
        count[ending, PROPOSED] += drafts
        count[ending, ACCEPTED] += accepted
        count[ending, EMITTED] += accepted + 1
        busy_s[ending] += now_s - clock[ending, STARTED_S]
        histogram[ending, min(accepted + 1, histogram.shape[1] - 1)] += 1
        if ending == target:
            for position in range(held, held + accepted + 1):
                emitted_s[position] = now_s
        if num_events[0] < timeline.shape[0]:
            event = timeline[num_events[0]]
            event[0], event[1], event[2] = ending, clock[ending, STARTED_S], now_s
            event[3], event[4], event[5] = rows, drafts, accepted + 1
            num_events[0] += 1

        # Corrections travel upstream, first the one that waited for this forward to end.
        if ending < target:
            reconcile(ending, sequence, length_of, clock, count, rollback_s)
        if ending > 0:
            reconcile(ending - 1, sequence, length_of, clock, count, rollback_s)
    return now_s
