"""What bandit and planner have in common: they find the best plan, follow changes, and keep still otherwise."""

import threading
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from autopipe.policies.bandit import BanditPolicy, Exploration
from autopipe.policies.base import Policy
from autopipe.policies.oracle import OraclePolicy
from autopipe.policies.plan_search import SearchProblem, SearchResult, search_plan
from autopipe.policies.planner import PlannerPolicy
from autopipe.policies.searcher import DISTURBS_S, InlineSearcher, ProcessSearcher
from autopipe.policies.static import OffPolicy, StaticPolicy
from tests.envs.scenes import DRAFTERS, pipeline, scenario
from tests.policies.helpers import MEDIUM, NGRAM, SMALL, action, info, observation, play, situation

SHORT = {"low": 150, "high": 250}
STEADY = scenario(phases=[{"tokens": 3000, "kinds": {"chat": 1}, "output_tokens": SHORT}])
CHANGING = scenario(
    phases=[{"tokens": 1500, "kinds": {kind: 1}, "output_tokens": SHORT} for kind in ("code", "chat", "code")],
    events=[{"type": "slow_down", "stage": "small", "factor": 8, "start": 1600, "end": 3000}],
)
HOPELESS = scenario(
    pipeline=pipeline(drafters=[{**each, "agreement": {"other": 0.03}, "adapters": {}} for each in DRAFTERS]),
    phases=[{"tokens": 3000, "kinds": {"other": 1}, "output_tokens": SHORT}],
)


def planner(**options: Any) -> PlannerPolicy:
    return PlannerPolicy(InlineSearcher(search_s=0.3), **options)


LEARNERS = [lambda: BanditPolicy(), lambda: BanditPolicy(Exploration.THOMPSON), planner]
LABELS = ["ucb", "thompson", "planner"]
learners = pytest.mark.parametrize("make", LEARNERS, ids=LABELS)


@learners
def test_it_comes_near_the_best_static_plan_when_nothing_changes(make: Any) -> None:
    best = play(StaticPolicy(action(2, (2, 2, 2), adapter=1)), STEADY)[0]
    assert play(make(), STEADY)[0] > 0.94 * best


@learners
def test_it_beats_each_kinds_plan_when_kinds_alternate(make: Any) -> None:
    plans = [action(2, (2, 3, 2)), action(2, (2, 3, 2), adapter=1), action(4, (2, 2, 3)), action(3, (3, 2, 2))]
    assert play(make(), CHANGING)[0] > max(play(StaticPolicy(plan), CHANGING)[0] for plan in plans)


@learners
def test_it_is_hardly_slower_than_plain_decoding_where_nothing_helps(make: Any) -> None:
    assert play(make(), HOPELESS)[0] > 0.97


@learners
def test_its_choices_are_a_function_of_the_seed(make: Any) -> None:
    assert play(make(), CHANGING, seed=5, steps=40)[0] == play(make(), CHANGING, seed=5, steps=40)[0]


@learners
def test_it_does_not_choose_what_the_mask_forbids(make: Any) -> None:
    policy, made = make(), situation()
    policy.reset(made)
    mask = made.codec.masks(None, 0, 1.0, dead=1 << SMALL | 1 << MEDIUM)
    for _ in range(3):
        assert policy.act(observation(), info(made.codec.off(), action_mask=mask))[0] in (0, 1)
    policy.close()


@learners
def test_it_says_why_and_what_it_expects(make: Any) -> None:
    policy, made = make(), situation()
    policy.reset(made)
    chosen = policy.act(observation(), info(made.codec.off(), agreement={"ngram": 0.2, "small": 0.9, "medium": 0.9}))
    assert chosen[0] != 0
    assert policy.explain().predicted_gain is not None
    assert policy.explain().predicted_gain > 0.2
    assert "chat" in policy.explain().text
    policy.close()


def test_the_oracle_is_above_all_others() -> None:
    def made(env_policy: Policy) -> float:
        return play(env_policy, CHANGING)[0]

    from autopipe.envs import EnvConfig, PipelineSimEnv
    from autopipe.policies.episode import run_episode

    oracle = run_episode(OraclePolicy, CHANGING, 0, config=EnvConfig()).relative_goodput
    assert isinstance(PipelineSimEnv(CHANGING), PipelineSimEnv)
    assert oracle > made(BanditPolicy()) > made(OffPolicy())


def problem(**changes: Any) -> SearchProblem:
    made = situation()
    base = {
        "pipeline": made.profile,
        "spaces": made.config.spaces,
        "kind": "code",
        "chains": (0, 1, 2, 4),
        "adapters": (0, 1),
        "current": (0, 2, 2, 2, 0, 0, 0, 0),
        "trials": 20,
        "tokens": 256,
    }
    return SearchProblem.parse({**base, **changes})


def test_a_search_finds_a_plan_that_the_simulator_likes_better() -> None:
    found = search_plan(problem())
    assert found.action[0] in (1, 2)
    assert found.gain > 0.5


def test_a_search_keeps_to_the_chains_allowed() -> None:
    assert search_plan(problem(chains=(0, 4), trials=12)).action[0] in (0, 4)


def test_a_search_is_deterministic() -> None:
    assert search_plan(problem(trials=12, seed=3)) == search_plan(problem(trials=12, seed=3))


def test_a_process_of_its_own_finds_the_same() -> None:
    searcher, asked = ProcessSearcher(), problem(trials=8)
    try:
        searcher.ask(asked)
        assert searcher.busy
        deadline, found = time.monotonic() + 60, None
        while found is None and time.monotonic() < deadline:
            time.sleep(0.05)
            found = searcher.poll(0.05)
        assert found == search_plan(asked)
        assert not searcher.busy
    finally:
        searcher.close()


def test_the_planner_adopts_only_what_promises_enough() -> None:
    class Searcher(InlineSearcher):
        def ask(self, problem: SearchProblem) -> None:
            now = 0.01
            self._result = SearchResult(
                action=(4, 2, 2, 2, 0, 0, 0, 0),
                seconds_per_token=now,
                current_seconds_per_token=now * self.gain,
                tried=1,
            )
            self._left_s = 0.0

    for gain, adopted in ((1.01, False), (1.2, True)):
        searcher = Searcher()
        searcher.gain = gain  # type: ignore[attr-defined]
        policy, made = PlannerPolicy(searcher), situation()
        policy.reset(made)
        chosen = made.codec.off()
        for _ in range(3):
            chosen = policy.act(observation(), info(chosen))
        assert (int(chosen[0]) == 4) is adopted


def test_the_planner_takes_back_a_plan_that_does_not_hold_what_it_promised() -> None:
    class Searcher(InlineSearcher):
        def ask(self, problem: SearchProblem) -> None:
            self._result = SearchResult(
                action=(4, 2, 2, 2, 0, 0, 0, 0), seconds_per_token=0.005, current_seconds_per_token=0.007, tried=1
            )
            self._left_s = 0.0

    policy, made = PlannerPolicy(Searcher()), situation()
    policy.reset(made)
    chains, chosen = [], made.codec.off()
    for _ in range(9):
        chosen = policy.act(observation(), info(chosen, goodput=0.9 if chosen[0] == 4 else 1.6))
        chains.append(int(chosen[0]))
    assert 4 in chains
    assert chains[-1] != 4
    assert np.isfinite(policy._penalty).all()


def test_where_the_formulas_see_no_difference_the_gate_gets_the_most_room() -> None:
    policy = BanditPolicy(Exploration.NONE)
    made = situation()
    policy.reset(made)
    chosen = made.codec.off()
    for _ in range(4):  # only the n-gram drafter may draft, and is right half of the time
        mask = made.codec.masks(None, 0, 1.0, dead=1 << SMALL | 1 << MEDIUM)
        agreement = {"chat": {NGRAM: (60, 120)}}
        chosen = policy.act(observation(), info(chosen, action_mask=mask, agreement=agreement))
    assert int(chosen[0]) == 1 << NGRAM
    assert made.codec.spaces.windows[chosen[1 + NGRAM]] == max(made.codec.spaces.windows)


class Disturbing(InlineSearcher):
    """A searcher that says whether it disturbs."""

    now = False

    @property
    def disturbs(self) -> bool:
        return self.now


def test_what_is_measured_while_a_search_disturbs_is_not_held_against_a_plan() -> None:
    class Searcher(Disturbing):
        def ask(self, problem: SearchProblem) -> None:
            self._result = SearchResult(
                action=(4, 2, 2, 2, 0, 0, 0, 0), seconds_per_token=0.005, current_seconds_per_token=0.007, tried=1
            )
            self._left_s = 0.0

    searcher, made = Searcher(), situation()
    policy = PlannerPolicy(searcher)
    policy.reset(made)
    searcher.now = True
    chosen = made.codec.off()
    for _ in range(12):
        chosen = policy.act(observation(), info(chosen, goodput=0.9 if chosen[0] == 4 else 1.6))
    assert policy.disturbs
    assert int(chosen[0]) == 4
    searcher.now = False
    for _ in range(6):
        chosen = policy.act(observation(), info(chosen, goodput=0.9 if chosen[0] == 4 else 1.6))
    assert int(chosen[0]) != 4


def test_the_planner_has_its_searcher_get_ready_before_the_first_interval() -> None:
    prepared = list[SearchProblem]()

    class Searcher(InlineSearcher):
        def prepare(self, problem: SearchProblem) -> None:
            prepared.append(problem)

    searcher, made = Searcher(), situation()
    PlannerPolicy(searcher).reset(made)
    assert [problem.spaces for problem in prepared] == [made.codec.spaces]
    assert not searcher.busy


def test_a_search_is_no_excuse_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    searcher = ProcessSearcher()
    monkeypatch.setattr(searcher, "_search", lambda *work: None)  # one that never ends
    assert not searcher.disturbs
    searcher.ask(problem())
    assert searcher.busy
    assert searcher.disturbs
    searcher._asked_s -= DISTURBS_S
    assert searcher.busy
    assert not searcher.disturbs


def test_the_process_is_started_ahead_of_the_first_search_and_its_trial_is_no_result() -> None:
    searcher = ProcessSearcher()
    try:
        searcher.prepare(problem(trials=8))
        assert searcher.busy
        deadline = time.monotonic() + 60
        while searcher.busy and time.monotonic() < deadline:
            time.sleep(0.05)
        assert searcher._process is not None
        assert searcher._process.poll() is None
        assert searcher.poll(0.05) is None
    finally:
        searcher.close()


class SlowProcess:
    """Stands for the search process: answers in order, each problem's trials as its result."""

    def __init__(self) -> None:
        self.stdin = self.stdout = self
        self.unanswered: list[int] = []
        self.most_unanswered = 0

    def write(self, line: str) -> None:
        self.unanswered.append(SearchProblem.model_validate_json(line).trials)
        self.most_unanswered = max(self.most_unanswered, len(self.unanswered))

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        time.sleep(0.05)
        tried = self.unanswered.pop(0)
        found = SearchResult(action=(0,), seconds_per_token=1.0, current_seconds_per_token=1.0, tried=tried)
        return found.model_dump_json() + "\n"


def test_a_search_gets_its_own_answer_and_no_earlier_one_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    searcher, process = ProcessSearcher(), SlowProcess()
    monkeypatch.setattr(searcher, "_running", lambda number: process)
    searcher.prepare(problem(trials=3))
    searcher.ask(problem(trials=4))
    searcher.ask(problem(trials=5))
    deadline, found = time.monotonic() + 60, None
    while found is None and time.monotonic() < deadline:
        time.sleep(0.01)
        found = searcher.poll(0.01)
    assert found is not None
    assert found.tried == 5
    assert process.most_unanswered == 1
    assert searcher.poll(0.01) is None
    assert not searcher.busy


@pytest.mark.parametrize("started", [True, False])
def test_closing_in_the_middle_of_a_search_is_no_failure(caplog: pytest.LogCaptureFixture, started: bool) -> None:
    before = set(threading.enumerate())
    searcher = ProcessSearcher()
    with nullcontext() if started else searcher._exchange:  # held, it keeps the search from getting as far as a process
        searcher.prepare(problem(trials=8))
        deadline = time.monotonic() + 60
        while started and searcher._process is None and time.monotonic() < deadline:
            time.sleep(0.01)
        searcher.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert searcher._process is None
    assert not searcher.busy
    assert "failed" not in caplog.text
