"""Goodput of every candidate plan, from stage times and agreement: closed formulas, all plans at once, in microseconds.

Lockstep: a stage that waits for n drafts and verifies them takes n times its producer's time per token and one forward
of n + 1 tokens, and emits 1 + sum_k P(first k drafts agree) tokens (Leviathan et al., arXiv 2211.17192, eq. 1). A chain
is that rule applied stage after stage: what feeds the next stage has the time per token that comes out.

Async: two states, after a roll-back (the producer starts anew, and the verifier waits for `min_drafts`) and streaming
(drafts were made while the last were verified); their shares are those of the two-state Markov chain.
The simulator is more exact, and thousands of times slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.menu import ActionCodec
from autopipe.envs.scenario import PipelineModel, StageModel
from autopipe.envs.simulator import LatencyCurve
from autopipe.policies.candidates import Candidates

Floats = NDArray[np.float64]
_MAX_ROWS = 40


@dataclass(slots=True)
class Machine:
    """Times of the stages, undisturbed.

    Attributes:
        step_s: seconds of a step by number of tokens in the forward, [slots + 1, rows]; the target's last; overhead
            included. Slots that the menu does not fill are infinite.
        is_ngram: bool [slots].
        contention: factor by which a stage is slower for every other one that computes.
        load_s: seconds until a drafter that is not loaded is in force, [slots].
        switch_s: seconds that taking in a loaded drafter costs (catching up), [slots].
    """

    step_s: Floats
    is_ngram: NDArray[np.bool_]
    contention: float
    wrong_equal: float
    persistence: float
    load_s: Floats
    switch_s: Floats

    @classmethod
    def of(cls, profile: PipelineModel, codec: ActionCodec) -> Machine:
        """From what was measured beforehand."""
        slots, drafters = codec.num_slots, profile.drafters
        step_s = np.full((slots + 1, _MAX_ROWS), np.inf)
        for slot, drafter in enumerate(drafters):
            step_s[slot] = _table(drafter)
        step_s[slots] = _table(profile.target)
        load_s, switch_s = np.zeros(slots), np.zeros(slots)
        load_s[: len(drafters)] = [drafter.load_ms / 1e3 for drafter in drafters]
        prompt = 256
        switch_s[: len(drafters)] = [
            0.0 if drafter.ngram else (drafter.switch_ms + prompt * drafter.prefill_ms_per_token) / 1e3
            for drafter in drafters
        ]
        is_ngram = np.zeros(slots, dtype=np.bool_)
        is_ngram[: len(drafters)] = [drafter.ngram for drafter in drafters]
        return cls(step_s, is_ngram, profile.contention, profile.wrong_equal, profile.persistence, load_s, switch_s)

    def rows_s(self, slot: int, rows: float) -> float:
        """Seconds of a step with a fractional number of rows."""
        rows = min(rows, _MAX_ROWS - 1.001)
        below, above = self.step_s[slot, int(rows) : int(rows) + 2].tolist()
        return float(below + (rows - int(rows)) * (above - below))


@dataclass(frozen=True, slots=True)
class _Gated:
    """Candidates whose stage is fed by the n-gram drafter: `places` among all, int64 [m].

    Many are the same to the formula. `cases` are places of one of each kind, int64 [c]; `case_of`, [m], finds it.
    """

    places: NDArray[np.int64]
    cases: NDArray[np.int64]
    case_of: NDArray[np.int64]

    @classmethod
    def of(cls, mask: NDArray[np.bool_], *same: NDArray[np.int64]) -> _Gated:
        """Those in `mask`; `same`: what two candidates must have in common, [n] each."""
        places = np.flatnonzero(mask)
        _, first, case_of = np.unique(np.stack(same)[:, places], axis=1, return_index=True, return_inverse=True)
        return cls(places, places[first], case_of.reshape(-1))


class Predictor:
    """Judges the candidates of one menu on one machine."""

    def __init__(self, machine: Machine, plans: Candidates) -> None:
        self.machine = machine
        self.plans = plans
        self._slots = len(machine.is_ngram)
        self._fewest = plans.min_drafts.astype(np.float64)
        self._members: list[NDArray[np.int64]] = []
        # By neural stage, the target's last:
        self._gated: list[_Gated] = []
        self._alone, self._locked, self._streamed = (list[NDArray[np.int64]]() for _ in range(3))  # places
        self._group()

    def _group(self) -> None:
        """Sort every stage of every candidate by what feeds it."""
        plans, count = self.plans, len(self.plans)
        fed, by_ngram = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        window = np.zeros(count, dtype=np.int64)  # of what feeds it
        for slot in range(self._slots + 1):
            member = np.ones(count, dtype=np.bool_) if slot == self._slots else plans.member[slot]
            self._members.append(np.flatnonzero(member))
            if slot < self._slots and self.machine.is_ngram[slot]:
                by_ngram |= member
            else:
                plain_feed = fed & ~by_ngram
                for groups, mask in (
                    (self._alone, ~fed),
                    (self._locked, plain_feed & ~plans.is_async),
                    (self._streamed, plain_feed & plans.is_async),
                ):
                    groups.append(np.flatnonzero(member & mask))
                # A menu has one n-gram drafter at most: candidates differ in its window and in the adapter only.
                self._gated.append(_Gated.of(member & fed & by_ngram, plans.adapter, window))
                by_ngram &= ~member
            fed |= member
            if slot < self._slots:
                window[member] = plans.window[slot][member]

    def seconds_per_token(self, agreement: Floats, slow_down: Floats, contention: float = 1.0) -> Floats:
        """Seconds per token under each candidate, [n].

        Args:
            agreement: chance that a slot picks what the target picks, [adapters + 1, slots], by adapter, none first.
            slow_down: factor on the times of each slot, the target's last, [slots + 1].
            contention: factor on the machine's contention.
        """
        plans, count, machine = self.plans, len(self.plans), self.machine
        token_s, agrees, window = np.zeros(count), np.ones(count), np.ones(count)
        clash = machine.contention * contention
        stage = 0
        for slot in range(self._slots + 1):
            target = slot == self._slots
            if target or not machine.is_ngram[slot]:
                table = machine.step_s[slot] * slow_down[slot]
                mine = np.ones(count) if target else agreement[plans.adapter, slot]
                both = np.minimum(agrees, mine) + (1 - np.maximum(agrees, mine)) * machine.wrong_equal
                self._stage(stage, table, token_s, both, window, clash)
                stage += 1
            if not target:
                at = self._members[slot]
                agrees[at] = agreement[plans.adapter[at], slot]
                window[at] = plans.window[slot][at]
        return token_s

    def _stage(self, stage: int, table: Floats, token_s: Floats, agrees: Floats, window: Floats, clash: float) -> None:
        """Replace the seconds per token that go into a stage by those that come out of it.

        Args:
            table: seconds of its step by rows, [rows].
            agrees: chance that it agrees with what feeds it, [n].
            clash: slow-down while another stage computes.
        """
        token_s[self._alone[stage]] = table[1]
        gated = self._gated[stage]
        if len(gated.places):
            seconds = _gated_s(table, agrees[gated.cases], window[gated.cases], self.machine.persistence)
            token_s[gated.places] = seconds[gated.case_of]
        at = self._locked[stage]
        if len(at):
            drafts = window[at]
            run = _Run.of(agrees[at], drafts, self.machine.persistence)
            token_s[at] = (drafts * token_s[at] + _at(table, drafts + 1)) / (1 + run.expected(run.later(drafts)))
        at = self._streamed[stage]
        if len(at):
            run = _Run.of(agrees[at], window[at], self.machine.persistence)
            token_s[at] = _streamed_s(table, token_s[at], run, window[at], self._fewest[at], clash)


def _gated_s(table: Floats, agrees: Floats, window: Floats, persistence: float) -> Floats:
    """Fed by an n-gram drafter, which takes no time and offers as many drafts as pay, up to the window."""
    share, most = agrees[None, :], window[None, :]
    counts = np.arange(1, int(most.max()) + 1)[:, None]  # [drafts, 1]
    drafts = counts.astype(np.float64)
    run = _Run.of(share, drafts, persistence)
    seconds = table[counts + 1] / (1 + run.expected(run.later(drafts)))
    seconds = np.where(counts <= most, seconds, np.inf)
    best: Floats = np.minimum(seconds.min(axis=0), table[1])
    return best


def _streamed_s(table: Floats, feed_s: Floats, run: _Run, window: Floats, fewest: Floats, clash: float) -> Floats:
    """Seconds per token of a stage that verifies while its producer goes on (async)."""
    fewest = np.minimum(np.maximum(fewest, 1), window).astype(np.float64)
    feed_s = np.maximum(feed_s, 1e-9)

    def beside(drafts: Floats) -> tuple[Floats, Floats]:
        """Drafts made while so many are verified, and the seconds of that: the two hinder each other."""
        alone_s = _at(table, drafts + 1)
        made = np.minimum(window - drafts, alone_s / feed_s)
        overlap = np.minimum(made * feed_s / alone_s, 1.0)
        return made, alone_s * (1 + (clash - 1) * overlap)

    made, verify_s = beside(fewest)
    fresh_s = (fewest + 0.5) * feed_s + verify_s
    stream = np.maximum(made - 1, fewest)
    for _ in range(2):
        made, verify_s = beside(stream)
        ready = np.maximum(made - 1, 0)  # one of them is the bonus token's place
        stream = np.maximum(0.5 * (stream + ready), fewest)
    made, verify_s = beside(stream)
    stream_s = np.maximum(fewest - np.maximum(made - 1, 0), 0) * feed_s + verify_s
    later_fresh, later_stream = run.later(fewest), run.later(stream)
    stays_fresh = run.first * later_fresh  # all accepted, and the bonus token as drafted: the stream goes on
    stays = run.first * later_stream
    streaming = stays_fresh / np.maximum(1 - stays + stays_fresh, 1e-9)
    tokens = 1 + (1 - streaming) * run.expected(later_fresh) + streaming * run.expected(later_stream)
    seconds: Floats = ((1 - streaming) * fresh_s + streaming * stream_s) / tokens
    return seconds


def _table(stage: StageModel) -> Floats:
    curve = LatencyCurve({rows: ms / 1e3 for rows, ms in stage.ms.items()})
    return curve.table(_MAX_ROWS - 1) + stage.overhead_ms / 1e3


def _at(table: Floats, rows: Floats) -> Floats:
    """A table [rows] at fractional places."""
    rows = np.minimum(rows, len(table) - 1.001)
    below = rows.astype(np.int64)
    part = rows - below
    value: Floats = table[below] * (1 - part) + table[below + 1] * part
    return value


@dataclass(slots=True)
class _Run:
    """Drafts in a row.

    With persistence, the position after a wrong one is wrong more often than others, and the one after a right one
    right more often.

    Attributes:
        first: chance that the first draft is right.
        log_more: logarithm of the chance that any later one is, given that those before it are: its powers are wanted
            several times, and a power takes ten times as long as an exponential.
        gap: 1 less that chance.
    """

    first: Floats
    log_more: Floats
    gap: Floats

    @classmethod
    def of(cls, agrees: Floats, drafts: Floats, persistence: float) -> _Run:
        """Of so many drafts, each of which is right in the share `agrees` of positions."""
        more = persistence + (1 - persistence) * agrees
        run = cls(agrees, np.log(np.maximum(more, 1e-12)), np.maximum(1 - more, 1e-6))
        if persistence == 0:
            return run
        after_wrong = (1 - persistence) * agrees
        after_right = persistence * more + after_wrong
        rest = run.later(drafts - 1)  # all after the first are right
        run.first = after_wrong
        for _ in range(2):
            full = run.first * rest
            run.first = (1 - full) * after_wrong + full * after_right
        return run

    def later(self, drafts: Floats) -> Floats:
        """Chance that so many drafts in a row are right, given that the one before them is."""
        chance: Floats = np.exp(self.log_more * drafts)
        return chance

    def expected(self, later: Floats) -> Floats:
        """Expected number of right drafts before the first wrong one, first (1 - more^n) / (1 - more), from more^n."""
        value: Floats = self.first * (1 - later) / self.gap
        return value
