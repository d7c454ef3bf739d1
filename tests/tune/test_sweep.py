"""scripts/sweep_plans.py, without measuring anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from autopipe.tune.space import plan_key
from tests.tune.scenes import predictor, space


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "sweep_plans.py"
    spec = importlib.util.spec_from_file_location("sweep_plans", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_grid_has_at_least_forty_different_plans(sweep: ModuleType) -> None:
    plans = sweep.grid(space(tables=("t.safetensors",)))

    assert len(plans) >= 41  # plain decoding among them
    assert len({plan_key(plan) for plan in plans.values()}) == len(plans)


def test_each_plan_but_plain_decoding_is_measured_once_with_others_of_its_models(sweep: ModuleType) -> None:
    plans = sweep.grid(space())
    measured = [name for block in sweep.blocks(plans) for name in block]

    assert sorted(measured) == sorted(set(plans) - {"plain"})


def test_a_line_that_a_crash_cut_short_does_not_count(sweep: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text('{"plan": "a"}\n{"plan": "b", "pro')

    assert sweep.read(tmp_path / "runs") == [{"plan": "a"}]
    assert sweep.read(tmp_path / "none") == []


def test_the_table_puts_measured_beside_predicted(sweep: ModuleType) -> None:
    plans = {name: plan for name, plan in sweep.grid(space()).items() if name in ("plain", "ngram text 3")}
    rows = [
        {"plan": "ngram text 3", "kind": kind, "tokens": 10, "seconds": 1.0, "plain_s": 1.5, "identical": True}
        for kind in ("code", "chat")
    ]
    first, plain = sweep.table(plans, rows, predictor())

    assert (first["plan"], first["measured"], first["code"], first["identical"]) == ("ngram text 3", 1.5, 1.5, "2/2")
    assert first["predicted"] > 1
    assert (plain["plan"], plain["measured"], plain["predicted"]) == ("plain", 1.0, 1.0)
