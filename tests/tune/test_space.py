from __future__ import annotations

import optuna
import pytest

from autopipe.core.plan import Mode, Plan, StagePlan
from autopipe.plans import DEFAULT_PLAN_PATH
from autopipe.tune.space import Space, TooDeepError, plan_key, structure
from tests.tune.scenes import TARGET, space


def test_the_search_begins_with_plain_decoding() -> None:
    plan = space().plan(space().first_params()[0])

    assert plan.mode is Mode.PLAIN
    assert plan.chain == (TARGET,)


def test_the_shipped_drafter_is_among_the_first_plans() -> None:
    shipped = Plan.load(DEFAULT_PLAN_PATH).chain[0]
    table = str(shipped.ngram_options().table)
    with_table = space(tables=(table,))
    firsts = [with_table.plan(params).chain[0] for params in with_table.first_params()]
    windows = {stage.window for stage in firsts if stage.is_ngram and stage.ngram_options().table == table}

    assert shipped.window in windows


def test_every_first_plan_has_all_parameters_of_a_trial() -> None:
    trial = optuna.create_study().ask()
    wanted = set(space().suggest(trial))

    assert all(set(params) == wanted for params in space().first_params())


def test_all_trials_have_the_same_parameters_whatever_they_choose() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    chosen = [frozenset(space().suggest(study.ask())) for _ in range(10)]

    assert len(set(chosen)) == 1


def test_parameters_of_a_drafter_that_is_left_out_make_no_other_plan() -> None:
    plain = space().defaults()

    assert plan_key(space().plan({**plain, "window.small": 9, "mode": "async"})) == plan_key(space().plan(plain))


def test_a_chain_with_one_neural_stage_has_no_async_mode() -> None:
    params = {**space().defaults(), "use.ngram": True, "mode": "async"}

    assert space().plan(params).mode is Mode.LOCKSTEP


def test_min_drafts_keeps_to_the_window_before_it() -> None:
    params = {**space().defaults(), "use.small": True, "mode": "async", "window.small": 3, "min_drafts": 12}

    assert space().plan(params).target.min_drafts == 3


def test_split_cores_are_disjoint_and_cover_all() -> None:
    params = {**space().defaults(), "use.small": True, "mode": "async", "cores": "split"}
    plan = space().plan(params)

    assert [stage.cores for stage in plan.chain] == [(0,), (1,)]
    assert [stage.threads for stage in plan.chain] == [None, None]  # one each, as by default


def five_cores(**threads: int) -> Plan:
    """An async chain whose stages have cores of their own, of five; `threads` by stage."""
    wide = space(threads=(1, 2, 4), cores=(0, 1, 2, 3, 4))
    chosen = {f"threads.{name}": count for name, count in threads.items()}
    return wide.plan({**wide.defaults(), "use.small": True, "mode": "async", "cores": "split", **chosen})


def test_cores_that_are_left_over_go_to_the_target() -> None:
    assert [stage.cores for stage in five_cores().chain] == [(0, 1), (2, 3, 4)]


def test_own_cores_may_be_shared_out_unequally_as_many_as_threads() -> None:
    plan = five_cores(small=1, target=4)

    assert [stage.cores for stage in plan.chain] == [(0,), (1, 2, 3, 4)]
    assert [stage.threads for stage in plan.chain] == [1, 4]


@pytest.mark.parametrize("threads", [{"small": 4, "target": 2}, {"target": 4}])
def test_threads_that_do_not_say_how_to_share_cores_out_leave_equal_parts(threads: dict[str, int]) -> None:
    assert [stage.cores for stage in five_cores(**threads).chain] == [(0, 1), (2, 3, 4)]


def test_more_drafters_than_a_chain_holds_are_refused() -> None:
    drafters = tuple(StagePlan.parse({"model": f"acme/d{n}", "name": f"d{n}"}) for n in range(5))
    wide = Space(target=TARGET, drafters=drafters)
    params = {**wide.defaults(), **{f"use.d{n}": True for n in range(5)}}

    with pytest.raises(TooDeepError):
        wide.plan(params)


def test_a_structure_names_chain_table_and_mode() -> None:
    params = {
        **space().defaults(),
        "use.ngram": True,
        "use.small": True,
        "mode": "async",
        "ngram.table": "t.safetensors",
    }

    assert structure(space(tables=("t.safetensors",)).plan(params)) == "ngram+table > small > big, async"
