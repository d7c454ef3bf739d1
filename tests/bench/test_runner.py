from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopipe.bench.arms import Arm, ArmMissingError, ArmOutput
from autopipe.bench.runner import WARM_UP_TOKENS, prepare_arms, run_bench
from autopipe.core.sampling import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=50)


class RecordingArm(Arm):
    def __init__(self, name: str, log: list[tuple[str, int, int]], missing: str = "", noisy: bool = False) -> None:
        self.name = name
        self.draws_own_noise = noisy
        self._log = log
        self._missing = missing

    def prepare(self) -> None:
        if self._missing:
            raise ArmMissingError(self._missing)

    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        self._log.append((self.name, ids[0], sampling.max_new_tokens))
        return ArmOutput((7, 8), 2.0)


def test_arms_that_cannot_run_are_reported_with_their_reason() -> None:
    ready, missing = prepare_arms([RecordingArm("plain", []), RecordingArm("openvino", [], "not installed")])

    assert [arm.name for arm in ready] == ["plain"]
    assert missing == {"openvino": "not installed"}


def test_every_arm_is_warmed_up_before_the_first_measurement() -> None:
    log: list[tuple[str, int, int]] = []
    run_bench([RecordingArm("plain", log), RecordingArm("lockstep", log)], [[1]], SAMPLING)

    assert log[:2] == [("plain", 1, WARM_UP_TOKENS), ("lockstep", 1, WARM_UP_TOKENS)]


def test_arms_take_turns_prompt_by_prompt_and_another_begins_each_time() -> None:
    log: list[tuple[str, int, int]] = []
    run_bench([RecordingArm("a", log), RecordingArm("b", log)], [[1], [2]], SAMPLING, repeat=2)

    assert [(name, prompt) for name, prompt, _ in log[2:]] == [
        *[("a", 1), ("b", 1), ("b", 1), ("a", 1)],
        *[("a", 2), ("b", 2), ("b", 2), ("a", 2)],
    ]


def test_the_clock_runs_over_generate_alone() -> None:
    ticks = itertools.count()
    (row,) = run_bench([RecordingArm("plain", [])], [[1], [2]], SAMPLING, clock=lambda: float(next(ticks)))

    assert row.ms_per_token == 500.0


def test_progress_is_told_which_arm_is_next() -> None:
    told: list[str] = []
    run_bench([RecordingArm("a", []), RecordingArm("b", [])], [[1]], SAMPLING, advance=told.append)

    assert told == ["a", "b"]


def test_sampled_peers_are_not_compared_with_plain() -> None:
    arms = [RecordingArm("plain", []), RecordingArm("transformers", [], noisy=True)]
    sampled = run_bench(arms, [[1]], SAMPLING.replace(temperature=0.8))
    greedy = run_bench(arms, [[1]], SAMPLING)

    assert (sampled[1].identical, greedy[1].identical) == (None, 1)
