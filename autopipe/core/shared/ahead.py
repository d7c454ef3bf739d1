"""A neural drafter that works ahead: in a thread of its own, while the stage after it computes (mode `async`).

As between stages that are processes, the consumer is always right: it tells its text and takes the drafts that go on
from it, while the drafter drafts on, up to its window, first for whoever has fewest drafts left, many in one forward.
Drafts for a text that did not come to be are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext

from autopipe.core.plan import Warmup
from autopipe.core.shared.ahead_lane import Lane
from autopipe.core.shared.drafting import NeuralDrafting
from autopipe.core.shared.neural import SharedDrafter, Source, Want
from autopipe.core.shared.sequence import SharedRequest
from autopipe.core.stats import StageStats


class Watch:
    """Lets drafters say that they begin to compute while the pipeline waits for them, as the pipeline itself would: a
    worker that computes longer than it should is taken for hung."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._waited_for = False

    def begins(self, tell: Callable[[int], None], num_rows: int) -> None:
        """A drafter begins to compute so many rows."""
        with self._gate:
            if self._waited_for:
                tell(num_rows)

    @contextmanager
    def waiting(self, tell: Callable[[int], None]) -> Generator[None]:
        """The pipeline waits; for a drafter, perhaps, that has begun before."""
        with self._gate:
            self._waited_for = True
            tell(1)
        try:
            yield
        finally:
            with self._gate:
                self._waited_for = False


class Ahead:
    """Lets a drafter work ahead of one consumer, of which it is the source.

    Drafts are asked for in the consumer's thread, which is that of another `Ahead` but for the last of a chain; a
    chain is set up in the pipeline's, while everybody rests (`resting`).

    Args:
        drafter: used by nobody else until `stop`.
        max_lanes: requests in one of its forwards.
        watch: of its chain.
    """

    def __init__(self, drafter: SharedDrafter, max_lanes: int, watch: Watch) -> None:
        self.drafter = drafter
        self._max_lanes, self._watch = max_lanes, watch
        self._is_last, self._warmup = True, Warmup()
        self._window = self._min_drafts = 1
        self._lanes: dict[int, Lane] = {}
        self._left: list[tuple[Lane, bool]] = []  # to be told to the drafter, and whether to keep what it has read
        self._changed = threading.Condition()
        self._computing = self._closing = False
        self._pauses = 0
        self._error: Exception | None = None
        self._short = False
        self._own = drafter.about_to_compute, drafter.fell_short
        drafter.about_to_compute = lambda num_rows: watch.begins(self._own[0], num_rows)
        drafter.fell_short = self._fall_short
        drafter.clear()
        self._thread = threading.Thread(target=self._run, name=f"autopipe-{drafter.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.drafter.name

    def set_up(self, source: Source | None, drafting: NeuralDrafting, warmup: Warmup, *, is_last: bool) -> None:
        """Take a place in a chain, while it rests. The consumer of the last one is the pipeline."""
        if source is not self.drafter.source:
            for lane in self._lanes.values():
                lane.mirror.ngram, lane.mirror.ngram_unchanged = None, 0
        self.drafter.source, self.drafter.fed_window = source, drafting.fed_window
        self._window, self._min_drafts = drafting.window, drafting.min_drafts
        self._is_last, self._warmup, self._error = is_last, warmup, None

    @contextmanager
    def resting(self) -> Generator[None]:
        """The drafter computes nothing meanwhile. With several, the last of the chain is to rest first: it may be
        waiting for those before it."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._computing)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, and forget all texts; the drafter may be used otherwise then."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.drafter.about_to_compute, self.drafter.fell_short = self._own
        self.drafter.clear()

    # -- the consumer's side --------------------------------------------------------------------------------

    def draft(self, wants: Sequence[Want]) -> list[list[int]]:
        """At most `limit` drafts for each, of those that are there; waits for the least number of them."""
        with self._changed:
            lanes = [self._lane(want.request) for want in wants]
            for lane, want in zip(lanes, wants, strict=True):
                lane.tell(want.request.tokens, want.extra)
            self._changed.notify_all()
            if not self._have_enough(lanes, wants):
                with self._watch.waiting(self._own[0]) if self._is_last else nullcontext():
                    self._changed.wait_for(lambda: self._error is not None or self._have_enough(lanes, wants))
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return [lane.drafts[: max(0, want.limit)] for lane, want in zip(lanes, wants, strict=True)]

    def settle(self, request: SharedRequest, length: int) -> None:
        """The pipeline has decided: the drafter may go on from what stands now. Another consumer tells when it asks."""
        if not self._is_last:
            return
        with self._changed:
            lane = self._lanes.get(request.id)
            if lane is not None:
                lane.tell(request.tokens, [])
                self._changed.notify_all()

    def leave(self, request: SharedRequest, *, keep: bool) -> None:
        """See `SharedDrafter.leave`."""
        with self._changed:
            lane = self._lanes.pop(request.id, None)
            if lane is not None:
                self._left.append((lane, keep))
                self._changed.notify_all()

    def take_stats(self, request: SharedRequest) -> StageStats | None:
        """See `SharedDrafter.take_stats`."""
        with self._changed:
            lane = self._lanes.get(request.id)
            if lane is None:
                return None
            stats, lane.stats = lane.stats, None
            return stats

    def report(self) -> None:
        """Say what is to be said in the pipeline's thread: that KV memory has been short."""
        with self._changed:
            short, self._short = self._short, False
        if short:
            self._own[1]()

    def _lane(self, request: SharedRequest) -> Lane:
        lane = self._lanes.get(request.id)
        if lane is None:
            lane = self._lanes[request.id] = Lane.of(request)
        return lane

    def _have_enough(self, lanes: Sequence[Lane], wants: Sequence[Want]) -> bool:
        return all(
            lane.num_drafts >= min(self._min_drafts, want.limit)
            or lane.barren
            or lane.reading
            or not self._can_add(lane)
            for lane, want in zip(lanes, wants, strict=True)
        )

    # -- the drafter's side ---------------------------------------------------------------------------------

    def _can_add(self, lane: Lane) -> bool:
        return not lane.barren and self._room(lane) > 0

    def _room(self, lane: Lane) -> int:
        mirror = lane.mirror
        generated, budget = lane.text - mirror.prompt_length, mirror.end - mirror.prompt_length
        window = self._warmup.window(self._window, generated, budget)
        return lane.room(window, self.drafter.runner.max_length)

    def _may_go_on(self) -> bool:
        if self._pauses or self._error is not None:
            return False
        return bool(self._left) or any(map(self._can_add, self._lanes.values()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._may_go_on())
                if self._closing:
                    return
                self._computing = True
                left, self._left = self._left, []
                able = filter(self._can_add, self._lanes.values())
                lanes = sorted(able, key=lambda lane: lane.num_drafts)[: self._max_lanes]
                wants = [lane.begin(self._room(lane)) for lane in lanes]
            drafts, num_read, error = [list[int]() for _ in wants], [0] * len(wants), None
            try:
                self._tidy(left, lanes)
                before = self._num_read(lanes)
                drafts = self.drafter.draft(wants, once=True) if wants else []
                num_read = [now - then for now, then in zip(self._num_read(lanes), before, strict=True)]
            except Exception as raised:  # the consumer is told; what a model may raise is a DrafterFailedError
                error = raised
            with self._changed:
                for lane, ids, count in zip(lanes, drafts, num_read, strict=True):
                    lane.take(ids, has_read=count > 0)
                    self._count(lane)
                self._computing, self._error = False, error
                self._changed.notify_all()

    def _num_read(self, lanes: Sequence[Lane]) -> list[int]:
        return [self.drafter.num_read(lane.mirror) for lane in lanes]

    def _tidy(self, left: Sequence[tuple[Lane, bool]], lanes: Sequence[Lane]) -> None:
        """Forget who has left, and what was read of texts that did not come to be."""
        for lane, keep in left:
            self.drafter.leave(lane.mirror, keep=keep)
            if isinstance(self.drafter.source, Ahead):
                self.drafter.source.leave(lane.mirror, keep=keep)
        for lane in lanes:
            cut, lane.cut = lane.cut, None
            if cut is not None:
                self.drafter.settle(lane.mirror, cut)

    def _count(self, lane: Lane) -> None:
        done = self.drafter.take_stats(lane.mirror)
        if done is not None and lane.stats is not None:
            lane.stats.add(done)
        elif done is not None:
            lane.stats = done

    def _fall_short(self) -> None:
        with self._changed:
            self._short = True
