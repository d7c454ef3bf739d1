from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from autopipe.profile import measure
from tests.profile.samples import ScriptedBackend


class TimedBackend(ScriptedBackend):
    """A backend on a clock of its own: a forward of n tokens behind c takes 100 n + c seconds, a prefill n."""

    def __init__(self, max_length: int = 1000) -> None:
        super().__init__([], max_length=max_length)
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def prefill(self, ids: Sequence[int]) -> torch.Tensor:
        self.now += len(ids) * 1e-3
        return super().prefill(ids)

    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        self.now += (100 * len(ids) + self.length) * 1e-3
        return super().forward(ids)


def test_verify_points_cover_contexts_and_tokens() -> None:
    backend = TimedBackend()
    found = measure.verify_points(backend, [10, 30], [1, 4], 2, backend.clock)["verify"]

    assert [(p["context"], p["tokens"], round(p["seconds"], 6)) for p in found] == [
        (10, 1, 0.11),
        (10, 4, 0.41),
        (30, 1, 0.13),
        (30, 4, 0.43),
    ]


def test_growing_from_one_context_to_the_next_is_a_catch_up_point() -> None:
    backend = TimedBackend()
    (point,) = measure.verify_points(backend, [10, 30], [1], 2, backend.clock)["catch_up"]

    assert (point["context"], point["tokens"], round(point["seconds"], 6)) == (10, 20, 0.02)


def test_the_first_round_does_not_count() -> None:
    slow_until = 3

    class Slow(TimedBackend):
        def forward(self, ids: Sequence[int]) -> torch.Tensor:
            if len(self.forwards) < slow_until:
                self.now += 5
            return super().forward(ids)

    slow = Slow()
    (point,) = measure.verify_points(slow, [10], [1], 1, slow.clock)["verify"]

    assert round(point["seconds"], 6) == 0.11


def test_points_that_do_not_fit_the_context_are_left_out() -> None:
    backend = TimedBackend(max_length=12)
    found = measure.verify_points(backend, [10], [1, 2, 3], 1, backend.clock)["verify"]

    assert [point["tokens"] for point in found] == [1, 2]


def test_a_slow_backend_is_measured_once_and_no_more() -> None:
    backend = TimedBackend()
    backend.max_length = 10**6
    measure.verify_points(backend, [900_000], [1], 50, backend.clock)

    assert len(backend.forwards) == 2 * 3  # the round that warms up, and one; two forwards before each to settle


def test_prefill_points_start_from_their_context() -> None:
    backend = TimedBackend()
    found = measure.prefill_points(backend, 5, [16, 64], 2, backend.clock)

    assert [(p["context"], p["tokens"], round(p["seconds"], 6)) for p in found] == [(5, 16, 0.016), (5, 64, 0.064)]


def test_a_measured_backend_is_left_empty() -> None:
    backend = TimedBackend()
    measure.verify_points(backend, [10], [1], 1, backend.clock)
    measure.prefill_points(backend, 5, [16], 1, backend.clock)
    measure.spin(backend, 5, 2, 0.0)

    assert backend.length == 0


def test_spin_reports_every_forward_in_order() -> None:
    began_s = time.monotonic()
    times = measure.spin(ScriptedBackend([]), 4, 1, 0.01)

    assert all(start <= end for start, end in times)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    assert began_s <= times[0][0]
    assert times[-1][1] >= began_s + 0.01
