from __future__ import annotations

from dataclasses import replace

from autopipe.tune.finalists import RaceSize, choose, num_runs, race_size
from autopipe.tune.objective import Objective, goals
from autopipe.tune.search import Found, open_study, prepare, ranking, run_worker
from autopipe.tune.space import structure
from autopipe.tune.storage import open_storage
from tests.tune.scenes import found_plans, predictor, settings, space


def test_a_race_fits_its_time_and_grows_with_it() -> None:
    small, large = race_size(20.0, 1.0, 24), race_size(500.0, 1.0, 24)

    assert num_runs(small) <= 20
    assert num_runs(large) <= 500
    assert large.plans > small.plans
    assert large.prompts > small.prompts


def test_without_time_there_is_still_one_plan() -> None:
    assert race_size(-5.0, 1.0, 24) == RaceSize(1, 4)


def test_finalists_are_of_several_kinds_and_never_plain_decoding() -> None:
    study = open_study(open_storage(None), "s", settings())
    prepare(study, space(), 60)
    run_worker(study, space(), predictor(), settings(), endless=False)
    aims = goals(Objective.THROUGHPUT, has_energy=False)
    chosen = choose(ranking(study, aims), 6, aims)
    kinds = [structure(found.plan) for found in chosen]

    assert len(chosen) == 6
    assert "plain" not in kinds
    assert len(set(kinds)) >= 2
    assert choose([], 3, aims) == []


def test_finalists_are_close_to_the_best_in_what_is_asked_for() -> None:
    first, second, *_ = found_plans(2)
    slow_on_the_whole = Found(
        first.plan, replace(first.prediction, ms_per_token=100.0, slow_ms_per_token=1.0), first.trial
    )
    slow_at_worst = Found(
        second.plan, replace(second.prediction, ms_per_token=1.0, slow_ms_per_token=100.0), second.trial
    )
    both = [slow_on_the_whole, slow_at_worst]

    assert choose(both, 2, goals(Objective.LATENCY, has_energy=False)) == [slow_on_the_whole]
