import numpy as np
import pytest

from autopipe.envs import EnvConfig
from autopipe.envs.menu import ActionCodec
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.envs.world import SimWorld
from autopipe.policies.candidates import as_candidates, candidates
from autopipe.policies.predict import Machine, Predictor
from tests.envs.scenes import pipeline, scenario
from tests.policies.helpers import action

PLAYED = scenario(phases=[{"tokens": 6000, "kinds": {"chat": 1}, "output_tokens": {"low": 400, "high": 400}}])
CODEC = ActionCodec(EnvConfig().spaces, PLAYED.pipeline.menu())


def predicted(
    *, slow_down: list[float] | None = None, kind: PromptKind = PromptKind.CHAT
) -> dict[tuple[int, ...], float]:
    """Seconds per token by action."""
    plans = candidates(CODEC)
    agreement = np.array(
        [[drafter.agreement_on(kind, name) for drafter in PLAYED.pipeline.drafters] for name in ("", "chat")]
    )
    seconds = Predictor(Machine.of(PLAYED.pipeline, CODEC), plans).seconds_per_token(
        agreement, np.array(slow_down or [1.0] * 4)
    )
    return {tuple(int(n) for n in plan): float(value) for plan, value in zip(plans.actions, seconds, strict=True)}


def simulated(chosen: np.ndarray) -> float:
    world = SimWorld(PLAYED, EnvConfig(), CODEC, seed=3)
    world.apply(CODEC.canonical(chosen))
    intervals = []
    while not world.done:
        intervals.append(world.run_interval())
    return sum(each.decode_s for each in intervals) / sum(each.decode_tokens for each in intervals)


def of(chosen: np.ndarray) -> tuple[int, ...]:
    return tuple(int(n) for n in CODEC.canonical(chosen))


@pytest.mark.parametrize(
    ("chosen", "tolerance"),
    [
        (action(0), 0.001),
        (action(1, (3, 2, 2)), 0.05),
        (action(2, (2, 1, 2)), 0.05),
        (action(2, (2, 3, 2)), 0.05),
        (action(2, (2, 3, 2), adapter=1), 0.05),
        (action(4, (2, 2, 3)), 0.06),
        (action(3, (3, 2, 2)), 0.06),
        (action(4, (2, 2, 3), mode=1), 0.2),
        (action(6, (2, 2, 2)), 0.3),
    ],
)
def test_formulas_come_near_the_simulator(chosen: np.ndarray, tolerance: float) -> None:
    assert predicted()[of(chosen)] == pytest.approx(simulated(chosen), rel=tolerance)


def test_the_plan_predicted_best_is_among_the_best_simulated() -> None:
    guesses = predicted()
    ranked = sorted(guesses, key=lambda plan: guesses[plan])
    best = min(simulated(np.array(plan)) for plan in ranked[::6][:30])
    assert simulated(np.array(ranked[0])) < 1.03 * best


def test_a_slow_target_makes_everything_slower() -> None:
    normal, slow = predicted(), predicted(slow_down=[1, 1, 1, 2])
    assert slow[of(action(0))] == pytest.approx(2 * normal[of(action(0))])
    assert normal[of(action(2))] < slow[of(action(2))] < 2 * normal[of(action(2))]


def test_a_slow_drafter_slows_only_its_own_chains() -> None:
    normal, slow = predicted(), predicted(slow_down=[1, 5, 1, 1])
    assert slow[of(action(2))] > normal[of(action(2))]
    assert slow[of(action(4))] == normal[of(action(4))]


def test_the_n_gram_drafter_is_never_worse_than_plain_decoding() -> None:
    assert predicted()[of(action(1, (3, 2, 2)))] <= predicted()[of(action(0))]


def test_a_plan_is_judged_the_same_alone_and_among_all() -> None:
    """What is computed once for many plans must be the same for all of them."""
    machine, plans = Machine.of(PLAYED.pipeline, CODEC), candidates(CODEC)
    agreement = np.array([[0.55, 0.65, 0.8], [0.6, 0.5, 0.9]])
    slow_down = np.array([1.0, 1.0, 1.3, 1.1])
    together = Predictor(machine, plans).seconds_per_token(agreement, slow_down)
    for place, plan in enumerate(plans.actions):
        alone = Predictor(machine, as_candidates(CODEC, plan[None])).seconds_per_token(agreement, slow_down)
        assert alone[0] == pytest.approx(together[place], rel=1e-12)


def test_candidates_begin_with_off_and_are_canonical_and_distinct() -> None:
    plans = candidates(CODEC)
    assert plans.actions[0].tolist() == CODEC.off().tolist()
    assert len({tuple(plan) for plan in plans.actions.tolist()}) == len(plans)
    assert all((CODEC.canonical(plan) == plan).all() for plan in plans.actions)


def test_candidates_keep_to_the_menu() -> None:
    menu = PLAYED.pipeline.menu().replace(chains=(0, 2))
    assert set(candidates(ActionCodec(EnvConfig().spaces, menu)).actions[:, 0].tolist()) == {0, 2}


def test_contention_counts_only_where_stages_compute_side_by_side() -> None:
    crowded = scenario(pipeline=pipeline(contention=2.0)).pipeline
    plans = candidates(CODEC)
    agreement, slow_down = np.full((2, 3), 0.7), np.ones(4)
    alone, together = (
        Predictor(Machine.of(each, CODEC), plans).seconds_per_token(agreement, slow_down)
        for each in (PLAYED.pipeline, crowded)
    )
    assert (alone[~plans.is_async] == together[~plans.is_async]).all()
    assert (together[plans.is_async] >= alone[plans.is_async] - 1e-12).all()
