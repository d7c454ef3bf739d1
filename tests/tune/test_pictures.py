from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.plots.tuning import FrontPoint, Point, plot_front, plot_history, plot_importances
from autopipe.tune.pictures import beside


def test_traces_beside_each_other_have_lanes_of_their_own_and_begin_together() -> None:
    def trace(start: int) -> dict[str, object]:
        return {
            "traceEvents": [
                {"ph": "M", "name": "thread_name", "tid": 4, "args": {"name": "big"}},
                {"ph": "X", "name": "verify", "tid": 4, "ts": start, "dur": 3},
            ]
        }

    rows = beside({"plain": trace(100), "winner": trace(900)})["traceEvents"]

    assert [row["ts"] for row in rows if row["ph"] == "X"] == [0, 0]
    assert [row["tid"] for row in rows if row["ph"] == "X"] == [0, 1]
    assert [row["args"]["name"] for row in rows if row["ph"] == "M"] == ["plain: big", "winner: big"]


def test_pictures_are_drawn_of_any_number_of_points(tmp_path: Path) -> None:
    points = [Point(n, float(n % 3), "lockstep", feasible=n != 2) for n in range(4)]

    assert plot_history(points, tmp_path / "a.png", value_name="x", maximize=True, reference=1.0).is_file()
    assert plot_importances({"a": 0.2, "b": 0.8}, tmp_path / "b.svg").is_file()
    assert plot_front([FrontPoint(1, 2, True, "0")], tmp_path / "c.pdf", x_name="x", y_name="y").is_file()


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        plot_history([], tmp_path / "a.png", value_name="x", maximize=True)
    with pytest.raises(ConfigError):
        plot_importances({}, tmp_path / "a.png")
    with pytest.raises(ConfigError):
        plot_front([], tmp_path / "a.png", x_name="x", y_name="y")
