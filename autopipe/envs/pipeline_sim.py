"""`AutoPipe/PipelineSim-v0`: the simulated pipeline as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.core.errors import ConfigError
from autopipe.envs.base import PipelineEnv, action_space
from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.menu import Action, ActionCodec
from autopipe.envs.observation import Observer
from autopipe.envs.randomise import Randomisation, randomise
from autopipe.envs.scenario import GIGABYTE, Scenario, load_scenario
from autopipe.envs.world import SimWorld

DEFAULT_SCENARIO = "alternating"
_MAX_EVENTS = 20_000


class PipelineSimEnv(PipelineEnv):
    """A simulated speculative pipeline that a policy reconfigures while it generates.

    ## Description
    A target model generates text with drafters ahead of it. Which drafters, how far ahead and in which mode pays best
    depends on the text, the machine and what else it does, and changes while it runs. Each step the agent chooses a
    plan, and the pipeline runs under it for a control interval (32 output tokens by default). The pipeline is the
    discrete-event simulator of the engine; the work, and what goes wrong, come from a scenario. The environment is
    deterministic: observations, rewards and infos are a function of scenario, configuration, seed and actions.

    ## Action Space
    `MultiDiscrete`; with the default configuration `[8, 5, 5, 5, 3, 2, 3, 2]`.

    | Num | Action | Values |
    |---|---|---|
    | 0 | chain: bit i puts the drafter of slot i into the chain; 0 is `off`, plain decoding | 0 to 2^slots - 1 |
    | 1 .. slots | window of the drafter in that slot | index into `spaces.windows` (1, 2, 4, 8, 16) |
    | slots + 1 | fewest drafts that a verifier waits for (async) | index into `spaces.min_drafts` (1, 2, 4) |
    | slots + 2 | mode | index into `spaces.modes` (lockstep, async) |
    | slots + 3 | warm-up | index into `spaces.warmups` (none, conservative, progressive) |
    | slots + 4 | adapter of the drafters that have it | 0 none, i the menu's adapter i |

    `action_masks()` gives the mask (bool `[sum(nvec)]`). An action that it forbids changes nothing, and is charged.
    Numbers that cannot matter (the window of a drafter that is not in the chain) are ignored.

    ## Observation Space
    `Dict` of `Box(0, 1, (n,), float32)`. "Fast" and "slow" are running averages (half-lives `fast_intervals` and
    `slow_intervals` control steps); what has never been measured reads 0 and has its missing flag set.

    | Key | Length | Meaning |
    |---|---|---|
    | `acceptance_fast`, `acceptance_slow` | slots | accepted / proposed drafts, as the consumer judged them |
    | `acceptance_missing` | slots | 1: never proposed anything |
    | `step_time` | slots | time of a drafter's step relative to the target's, at most 1 |
    | `step_time_missing` | slots | 1: not known |
    | `target_step` | 2 | time of the target's step, log scale (0.01 ms to 10 s); cost of 8 tokens over 1, log scale |
    | `window_fill` | slots | drafts found by the consumer relative to the window |
    | `rollback_rate` | slots | roll-backs per output token |
    | `goodput` | 2 | goodput relative to plain decoding, fast and slow, divided by 4 |
    | `position` | 1 | output tokens of the request under way relative to its most |
    | `context_length` | 1 | prompt and output of the request under way, log scale to 131072 |
    | `queue` | 1 | waiting requests, log scale to 63 |
    | `plan` | sum(nvec) | the plan in force, one-hot per number of the action |
    | `telemetry` | 5 | utilisation, memory, power / limit, temperature / 100 C, throttled |
    | `telemetry_missing` | 5 | 1: the device does not say |
    | `prompt_kind` | 5 | one-hot: code, chat, summary, math, other |

    ## Rewards
    `goodput * (plain decoding's time / measured time) - energy * (joules / plain decoding's joules)
    - latency * (share of latency targets missed) - switch * [chain or adapter changed] - retune * [settings changed]
    - rejected * [action was masked]`; the weights are `config.reward` (see `RewardWeights`), the targets
    `config.targets`. Times are those of tokens after the first of each request: no plan could change the others.
    Plain decoding under the same slow-downs gives 1 minus the price of its energy.

    ## Starting State
    Plain decoding, nothing generated, nothing measured; the times of a single step are known, as after loading.

    ## Episode End
    *Terminated*: the scenario's work is done. *Truncated*: `config.max_steps` control steps are over. Never both.

    ## Arguments
    - `scenario`: a shipped scenario's name, a YAML file, a `Scenario`, or several of these, of which every episode
      draws one. `reset(options={"scenario": ...})` chooses for one episode. Episodes of different scenarios have the
      same spaces.
    - `config`: an `EnvConfig`.
    - `randomisation`: how far every episode departs from its scenario (domain randomisation); default: not at all.
    - `render_mode`: `"ansi"` or `"rgb_array"`.

    ```python
    gymnasium.make("AutoPipe/PipelineSim-v0", scenario="drafter-dies", config=EnvConfig(interval_tokens=16))
    ```

    ## Version History
    - v0: initial version
    """

    def __init__(
        self,
        scenario: str | Path | Scenario | Sequence[str | Path | Scenario] = DEFAULT_SCENARIO,
        config: EnvConfig | None = None,
        randomisation: Randomisation | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(config or EnvConfig(), render_mode)
        several = [scenario] if isinstance(scenario, str | Path | Scenario) else list(scenario)
        if not several:
            raise ConfigError("scenario", [], "one or more scenarios")
        self._scenarios = [_resolve(entry) for entry in several]
        self._codecs = [ActionCodec(self.config.spaces, each.pipeline.menu()) for each in self._scenarios]
        self._randomisation = randomisation or Randomisation()
        self._codec = self._codecs[0]
        self.action_space = action_space(self._codec)
        self._world: SimWorld | None = None

    @property
    def world(self) -> SimWorld:
        """The simulated machine of the episode under way.

        Raises:
            ConfigError: before the first `reset`.
        """
        if self._world is None:
            raise ConfigError("env", "not reset", "reset() first")
        return self._world

    def forecast(self, action: Sequence[int] | NDArray[np.int64], num_intervals: int = 1) -> float:
        """Goodput relative to plain decoding, had the next intervals run under `action`; nothing changes here.

        This is full information: it sees the text to come. It is for oracles, not for policies.
        """
        twin = self.world.copy()
        twin.apply(self._codec.canonical(action))
        plain_s = decode_s = 0.0
        for _ in range(num_intervals):
            if twin.done:
                break
            interval = twin.run_interval()
            plain_s, decode_s = plain_s + interval.plain_s, decode_s + interval.decode_s
        return plain_s / decode_s if decode_s > 0 else 1.0

    def _begin(self, seed: int, options: dict[str, Any]) -> Interval:
        unknown = sorted(set(options) - {"scenario"})
        if unknown:
            raise ConfigError(f"options.{unknown[0]}", options[unknown[0]], "only the key `scenario`")
        draw = np.random.default_rng([seed, 1])
        index = int(draw.integers(len(self._scenarios)))
        scenario, self._codec = self._scenarios[index], self._codecs[index]
        if "scenario" in options:
            scenario = _resolve(options["scenario"])
            self._codec = ActionCodec(self.config.spaces, scenario.pipeline.menu())
        scenario = randomise(scenario, self._randomisation, draw)
        max_events = _MAX_EVENTS if self.render_mode == "rgb_array" else 0
        self._world = world = SimWorld(scenario, self.config, self._codec, seed, max_events)
        slots = self._codec.num_slots
        known = [world.factory.step_s(slot) for slot in range(len(scenario.pipeline.drafters))]
        known_s = [*known, *[None] * (slots - len(known)), world.factory.step_s(slots)]
        self._observer = Observer(self.config, self._codec, known_s, world.factory.verify_ratio())
        return world.outlook()

    def _put_in_force(self, action: Action) -> bool:
        self.world.apply(action)
        return True

    def _next_interval(self) -> Interval:
        return self.world.run_interval()

    def _action_in_force(self) -> Action:
        return self.world.action

    def _memory(self) -> tuple[int | None, int]:
        total_gb = self.world.scenario.pipeline.device_memory_gb
        return None if total_gb is None else int(total_gb * GIGABYTE), self.world.memory_taken_bytes

    def _dead(self) -> int:
        return self.world.dead

    def _lanes(self) -> list[NDArray[np.float64]]:
        return self.world.events


def _resolve(scenario: str | Path | Scenario) -> Scenario:
    return scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
