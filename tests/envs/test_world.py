"""The simulated machine: what plans do to it, and what events do to plans."""

from typing import Any

import numpy as np
import pytest

from autopipe.core.plan import Mode
from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.menu import Action, ActionCodec
from autopipe.envs.scenario import Scenario
from autopipe.envs.simulator import LatencyCurve, SimChain, SimRequest, SimStage, simulate
from autopipe.envs.workload import draw_requests
from autopipe.envs.world import SimWorld
from tests.envs.scenes import DRAFTERS, pipeline, scenario

CONFIG = EnvConfig()


def world(work: Scenario | None = None, seed: int = 3, **kwargs: Any) -> SimWorld:
    work = work or scenario()
    return SimWorld(work, CONFIG, ActionCodec(CONFIG.spaces, work.pipeline.menu()), seed, **kwargs)


def action(chain: int, *, window: int = 2, mode: int = 0, adapter: int = 0) -> Action:
    codec = ActionCodec(CONFIG.spaces, scenario().pipeline.menu())
    return codec.canonical([chain, window, window, window, 0, mode, 0, adapter])


def run(machine: SimWorld, chosen: Action, count: int = 1) -> list[Interval]:
    machine.apply(chosen)
    return [machine.run_interval() for _ in range(count)]


def goodput(intervals: list[Interval]) -> float:
    return sum(interval.plain_s for interval in intervals) / sum(interval.decode_s for interval in intervals)


def test_plain_decoding_is_as_fast_as_itself() -> None:
    assert goodput(run(world(), action(0), 20)) == pytest.approx(1.0)


def test_an_interval_has_its_tokens_and_the_work_ends() -> None:
    machine, total = world(), 0
    while not machine.done:
        interval = machine.run_interval()
        total += interval.num_tokens
        assert interval.num_tokens == CONFIG.interval_tokens or machine.done
        assert interval.done == machine.done
    assert total == machine.token == machine.scenario.total_tokens


def test_a_constant_plan_takes_as_long_as_the_simulator_says() -> None:
    work = scenario(
        pipeline=pipeline(drafters=[DRAFTERS[1]]),
        phases=[{"tokens": 3000, "kinds": {"chat": 1}, "output_tokens": {"low": 3000, "high": 3000}}],
    )
    machine = SimWorld(work, CONFIG, ActionCodec(CONFIG.spaces, work.pipeline.menu()), 0)
    measured = goodput(run(machine, action(1), 90))
    target = LatencyCurve({1: 0.010, 8: 0.012, 16: 0.016})
    chain = SimChain((SimStage(LatencyCurve({1: 0.001}), 0.6, window=4), SimStage(target)), mode=Mode.LOCKSTEP)
    result = simulate(chain, [SimRequest(20_000)], seed=1)
    assert measured == pytest.approx(0.010 * result.tokens / result.total_s, rel=0.04)


def test_two_plans_meet_the_same_text() -> None:
    one, other = world(), world()
    first = run(one, action(0b010), 20)
    second = run(other, action(0b100), 20)
    mean = [np.mean([interval.agreement["medium"] for interval in each]) for each in (first, second)]
    assert mean[0] == pytest.approx(mean[1], abs=0.02)


def test_full_information_scores_every_drafter_while_plain() -> None:
    shares = [interval.agreement for interval in run(world(), action(0), 40)]
    assert np.mean([share["small"] for share in shares]) == pytest.approx(0.6, abs=0.06)
    assert np.mean([share["medium"] for share in shares]) == pytest.approx(0.9, abs=0.05)


def test_acceptance_is_counted_for_the_slot_that_drafted() -> None:
    intervals = run(world(), action(0b110), 30)
    accepted = sum(interval.slots.accepted for interval in intervals)
    proposed = sum(interval.slots.proposed for interval in intervals)
    assert proposed[0] == 0
    assert 0.33 < accepted[1] / proposed[1] < 0.6  # 4 drafts: (a + a^2 + a^3 + a^4) / 4 = 0.33; 1 draft: a = 0.6
    assert accepted[2] / proposed[2] > 0.7


def test_an_ngram_drafter_is_judged_by_the_stage_behind_it() -> None:
    intervals = run(world(scenario(phases=[{"tokens": 2000, "kinds": {"code": 1}}])), action(0b001), 20)
    accepted = sum(interval.slots.accepted for interval in intervals)
    proposed = sum(interval.slots.proposed for interval in intervals)
    assert proposed[0] > 0
    assert 0.3 < accepted[0] / proposed[0] < 0.9
    assert proposed[1:].sum() == 0


def test_step_times_are_those_of_the_models() -> None:
    step_s = run(world(), action(0b010), 10)[-1].slots.step_s
    assert step_s[1] == pytest.approx(0.001, rel=0.05)
    assert 0.010 <= step_s[3] <= 0.012


def test_a_slow_down_reaches_the_running_chain() -> None:
    event = {"type": "slow_down", "stage": "small", "factor": 8, "start": 640}
    machine = world(scenario(events=[event]))
    before, after = run(machine, action(0b010), 18), run(machine, action(0b010), 18)
    assert goodput(after) < 0.7 * goodput(before)


def test_throttling_leaves_goodput_relative_to_plain_alone() -> None:
    machine = world(scenario(events=[{"type": "throttle", "factor": 2, "start": 640}]))
    before, after = run(machine, action(0), 20), run(machine, action(0), 20)
    assert after[-1].ms_per_token == pytest.approx(2 * (before[0].ms_per_token or 0))
    assert after[-1].device.throttled == 1.0
    assert goodput(after) == pytest.approx(1.0)


def test_a_drafter_that_dies_is_bridged_over() -> None:
    machine = world(scenario(events=[{"type": "drafter_dies", "stage": "medium", "start": 320, "end": 960}]))
    run(machine, action(0b110), 12)
    assert machine.dead == 0b100
    during = run(machine, action(0b110), 10)
    assert sum(interval.slots.proposed[2] for interval in during) == 0
    assert sum(interval.slots.proposed[1] for interval in during) > 0
    after = run(machine, action(0b110), 20)
    assert sum(interval.slots.proposed[2] for interval in after) > 0


def test_drift_lowers_acceptance() -> None:
    machine = world(scenario(events=[{"type": "drift", "stage": "medium", "factor": 0.3, "start": 800}]))
    before, after = run(machine, action(0b100), 20), run(machine, action(0b100), 40)
    assert goodput(after[-20:]) < 0.8 * goodput(before)


def test_a_plan_whose_drafter_loads_comes_into_force_later() -> None:
    drafters = [DRAFTERS[0], {**DRAFTERS[1], "load_ms": 1000}, DRAFTERS[2]]
    machine = world(scenario(pipeline=pipeline(drafters=drafters)))
    first = run(machine, action(0b010), 2)
    assert machine.action[0] == 0
    assert goodput(first) == pytest.approx(1.0)
    run(machine, action(0b010), 4)
    assert machine.action[0] == 0b010


def test_going_back_from_off_needs_no_loading() -> None:
    drafters = [DRAFTERS[0], {**DRAFTERS[1], "load_ms": 1000}, DRAFTERS[2]]
    machine = world(scenario(pipeline=pipeline(drafters=drafters)))
    machine.apply(action(0b010))
    while machine.action[0] == 0:
        machine.run_interval()
    run(machine, action(0))
    run(machine, action(0b010))
    assert machine.action[0] == 0b010


def test_an_adapter_changes_agreement() -> None:
    plain, adapted = goodput(run(world(), action(0b010), 40)), goodput(run(world(), action(0b010, adapter=1), 40))
    assert adapted > 1.2 * plain


def test_contention_hurts_async_alone() -> None:
    crowded = scenario(pipeline=pipeline(contention=2.0))
    async_ratio = goodput(run(world(crowded), action(0b100, mode=1), 30)) / goodput(
        run(world(), action(0b100, mode=1), 30)
    )
    lockstep_ratio = goodput(run(world(crowded), action(0b100), 30)) / goodput(run(world(), action(0b100), 30))
    assert lockstep_ratio == pytest.approx(1.0)
    assert async_ratio < 0.8


def test_requests_queue_when_they_arrive_too_fast() -> None:
    phases = [{"tokens": 2000, "kinds": {"chat": 1}, "arrivals_per_s": 50}]
    intervals = run(world(scenario(phases=phases)), action(0), 20)
    assert intervals[-1].queue > 0
    assert max(ttft for interval in intervals for ttft in interval.ttfts_s) > 1


def test_waiting_for_a_request_does_not_count_as_serving() -> None:
    phases = [{"tokens": 2000, "kinds": {"chat": 1}, "arrivals_per_s": 0.01}]
    assert goodput(run(world(scenario(phases=phases)), action(0), 30)) == pytest.approx(1.0)


def test_energy_counts_idle_power_and_the_stages_that_compute() -> None:
    interval = run(world(), action(0))[0]
    assert interval.energy_j == pytest.approx((5 + 30) * interval.decode_s)
    assert interval.plain_energy_j == pytest.approx(interval.energy_j)


def test_energy_is_unknown_without_power_figures() -> None:
    drafters = [{**drafter, "power_w": 0} for drafter in DRAFTERS]
    silent = pipeline(drafters=drafters, idle_power_w=0, target={"ms": {1: 10}})
    assert run(world(scenario(pipeline=silent)), action(0))[0].energy_j is None


def test_memory_share_counts_what_is_loaded() -> None:
    machine = world()
    assert run(machine, action(0))[0].device.memory == pytest.approx(4 / 20)
    assert run(machine, action(0b110))[0].device.memory == pytest.approx(8 / 20)


def test_a_copy_goes_its_own_way() -> None:
    machine = world()
    run(machine, action(0b110), 3)
    twin = machine.copy()
    expected = run(world_after(3), action(0b110), 5)
    run(twin, action(0b001), 5)
    assert [i.decode_s for i in run(machine, action(0b110), 5)] == [i.decode_s for i in expected]


def world_after(count: int) -> SimWorld:
    machine = world()
    run(machine, action(0b110), count)
    return machine


def test_a_copy_under_the_same_plan_does_the_same() -> None:
    machine = world(scenario(events=[{"type": "drift", "stage": "small", "factor": 0.2, "start": 100, "end": 900}]))
    run(machine, action(0b011), 3)
    twin = machine.copy()
    assert [i.decode_s for i in run(twin, action(0b111), 30)] == [i.decode_s for i in run(machine, action(0b111), 30)]


def test_events_name_slots_and_lie_within_the_interval() -> None:
    machine = world(max_events=10_000)
    run(machine, action(0b110), 2)
    before_s = machine.now_s
    run(machine, action(0b110))
    events = np.concatenate(machine.events)
    assert set(events[:, 0]) == {1, 2, 3}
    assert (events[:, 2] >= before_s).all()
    assert (events[:, 2] <= machine.now_s).all()


def test_any_plans_in_any_order_get_the_work_done() -> None:
    work = scenario(
        events=[
            {"type": "drafter_dies", "stage": "small", "start": 300, "end": 700},
            {"type": "contention", "factor": 2, "start": 500, "end": 900},
        ]
    )
    machine, rng = world(work), np.random.default_rng(0)
    codec = ActionCodec(CONFIG.spaces, work.pipeline.menu())
    while not machine.done:
        machine.apply(codec.canonical(rng.integers(0, codec.sizes)))
        interval = machine.run_interval()
        assert np.isfinite(interval.decode_s)
    assert machine.token == work.total_tokens


def test_an_ngram_reads_the_text_of_its_own_request_from_its_beginning() -> None:
    flat = {"ms": {1: 10.0, 16: 10.0}}  # a verification costs a step, so that the gate lets every draft pass
    work = scenario(
        pipeline=pipeline(target=flat, drafters=[DRAFTERS[0]]),
        phases=[{"tokens": 600, "kinds": {"code": 1}, "output_tokens": {"low": 50, "high": 80}}],
    )
    machine = SimWorld(work, CONFIG, ActionCodec(CONFIG.spaces, work.pipeline.menu()), 5, max_events=10_000)
    machine.apply(action(1))
    emitted: list[int] = []
    while not machine.done:
        machine.run_interval()
        emitted += [int(event[5]) for events in machine.events for event in events]
    window = CONFIG.spaces.windows[2]
    expected: list[int] = []
    for request in draw_requests(work, 5):
        position, right = 1, (request.uniform < 0.7).tolist()
        expected.append(1)  # with the prompt
        while position < request.output_tokens:
            drafts = min(window, request.output_tokens - position - 1)
            accepted = next((n for n in range(drafts) if not right[position + n]), drafts)
            expected.append(accepted + 1)
            position += accepted + 1
    assert emitted == expected
