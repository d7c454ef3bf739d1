from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.policies import evaluation
from autopipe.policies.evaluation import evaluate
from autopipe.policies.evaluation_cells import CURVE_POINTS, Cell, Task
from autopipe.policies.evaluation_scenarios import changes, find_scenarios, heldout_names
from autopipe.policies.summary import Estimate, make_rows
from tests.envs.scenes import pipeline, scenario

TINY = scenario(
    pipeline=pipeline(drafters=[{"name": "small", "ms": {1: 1.0}, "agreement": {"code": 0.9, "other": 0.3}}]),
    phases=[{"tokens": 200, "kinds": {kind: 1}, "output_tokens": {"low": 60, "high": 60}} for kind in ("code", "chat")],
)


def test_every_policy_gets_a_row_beside_the_yardsticks(tmp_path: Path) -> None:
    cells_file = tmp_path / "cells.jsonl"
    rows = {row.policy: row for row in make_rows(evaluate([TINY], ["bandit"], 2, cells_file=cells_file))}
    assert list(rows) == ["oracle", "static", "off", "bandit"]
    assert rows["off"].of_plain.mean == pytest.approx(1)
    assert rows["oracle"].of_oracle.mean == 1
    assert rows["static"].of_static.mean == 1
    assert rows["static"].plan.startswith("small(")
    assert rows["bandit"].seeds == 2
    assert rows["bandit"].regret >= -5
    assert len(rows["bandit"].regret_curve) == CURVE_POINTS
    assert rows["bandit"].energy_of_plain is not None

    def refuse(task: Task) -> Cell:
        raise AssertionError("played again")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluation, "run_task", refuse)
        again = make_rows(evaluate([TINY], ["bandit"], 2, cells_file=cells_file))
    assert [row.to_dict() for row in again] == [row.to_dict() for row in rows.values()]


def test_a_file_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    cells_file = tmp_path / "cells.jsonl"
    evaluate([TINY], [], 1, cells_file=cells_file)
    text = cells_file.read_text()
    cells_file.write_text(text[:-40])
    assert len(evaluate([TINY], [], 1, cells_file=cells_file)) == 3


def test_unknown_policies_and_scenarios_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="--policies"):
        evaluate([TINY], ["clever"], 1)
    with pytest.raises(ConfigError, match="--policies"):
        evaluate([TINY], ["bandit:greedy"], 1)
    with pytest.raises(ConfigError, match="--scenarios"):
        find_scenarios("nowhere")
    with pytest.raises(ConfigError, match="--seeds"):
        evaluate([TINY], [], 0)


def test_heldout_scenarios_load_and_some_do_not_change() -> None:
    found = find_scenarios("heldout")
    assert [each.name for each in found] == heldout_names()
    assert {changes(each) for each in found} == {True, False}


def test_an_interval_holds_the_mean_and_narrows_with_more_seeds() -> None:
    few, many = Estimate.of([1.0, 2.0] * 3), Estimate.of([1.0, 2.0] * 50)
    assert few.low < few.mean < few.high
    assert many.high - many.low < few.high - few.low
