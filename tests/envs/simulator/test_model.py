"""Latency curves."""

import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.simulator import LatencyCurve


def test_curve_is_linear_between_points_and_on_beyond_the_last() -> None:
    curve = LatencyCurve({1: 1.0, 3: 2.0, 5: 4.0})
    assert [curve.seconds(n) for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_curve_of_steps_takes_the_largest_point_reached() -> None:
    curve = LatencyCurve({1: 1.0, 4: 2.0}, interpolate=False)
    assert [curve.seconds(n) for n in (1, 3, 4, 100)] == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: -1.0}, {1: float("nan")}])
def test_impossible_points_are_refused(points: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="latency"):
        LatencyCurve(points)
