"""`AutoPipe/Pipeline-v0`: the live engine as a Gymnasium environment."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan
from autopipe.core.preflight import check_plan
from autopipe.core.sampling import SamplingParams
from autopipe.core.telemetry import Sampler
from autopipe.core.telemetry.announce import Announcer
from autopipe.envs.base import PipelineEnv, action_space
from autopipe.envs.config import EnvConfig
from autopipe.envs.interval import Interval
from autopipe.envs.live_meter import LiveMeter
from autopipe.envs.live_prompts import DEFAULT_PROMPTS, LivePrompt, encode_prompts
from autopipe.envs.menu import OFF, Action, ActionCodec, PlanMenu, slots_of
from autopipe.envs.observation import Observer
from autopipe.envs.stream import GenerationStream, LiveRequest

_log = logging.getLogger(__name__)

_INTERVALS_AHEAD = 8


class PipelineLiveEnv(PipelineEnv):
    """The real engine, reconfigured while it generates.

    ## Description
    One stream of requests runs in the background, one after another, and never waits for the agent. A step puts the
    agent's plan in force (`engine.apply`; the output does not change by it) and waits until a control interval's worth
    of tokens has come since the last step, or since the new plan is in force. While drafters of a new plan load, the
    old one goes on; what it generates meanwhile belongs to the interval, too. A slow agent makes intervals longer; it
    delays no token. The environment is not deterministic: it measures wall-clock time.

    ## Action Space
    As in `PipelineSimEnv`: equal `config.spaces` give equal spaces, and a policy trained there runs here unchanged.

    ## Observation Space
    As in `PipelineSimEnv`. What the machine does not say is missing: telemetry without a sensor, and figures of stages
    that the engine has not reported. Acceptance, window fill, roll-backs and step times are reported by the engine;
    where it does so only at the end of a request, they stay as they are in between.

    ## Rewards
    As in `PipelineSimEnv`. Plain decoding's time per token is measured at the first `reset`, and again in every
    interval that runs plain; its energy too, where there is an energy counter.

    ## Starting State
    Plain decoding, in the first request of the stream. All drafters of the plan given are loaded.

    ## Episode End
    *Terminated*: all `num_requests` requests are done. *Truncated*: `config.max_steps` control steps are over, or the
    stream broke off (`info["error"]`); the next `reset` starts it anew. Never both.

    ## Arguments
    - `plan`: a `Plan`, its YAML file, or None for the plan that ships with AutoPipe; its drafters are the menu, slot by
      slot. Or `menu`, a `PlanMenu`, instead.
    - `prompts`: `LivePrompt`s or texts, gone through in order, over and over; default: a few built-in ones.
    - `params`: `SamplingParams` of all requests; with temperature above 0 every request gets a seed of its own.
    - `num_requests`: requests of an episode; None: without end.
    - `engine`: an engine that runs already; it is then not closed with the environment.
    - `telemetry`: a `Sampler` that runs already, True for the one that the process shares, False for none; unless it is
      False, `autopipe top` shows the environment's own engine.
    - `device`: label of the target's device in telemetry (`cpu`, `cuda:0`); None: guessed.
    - `timeout_s`: how long to wait for a token before giving up.
    - `config`, `render_mode`: as in `PipelineSimEnv`; the timeline picture shows goodput alone, since a running engine
      does not report single forwards.

    ## Version History
    - v0: initial version
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        menu: PlanMenu | None = None,
        prompts: Sequence[LivePrompt | str] | None = None,
        params: SamplingParams | None = None,
        num_requests: int | None = None,
        engine: Engine | None = None,
        telemetry: Sampler | bool = True,
        device: str | None = None,
        timeout_s: float = 60.0,
        config: EnvConfig | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(config or EnvConfig(), render_mode)
        if plan is not None and menu is not None:
            raise ConfigError("plan", "given", "either plan or menu")
        if num_requests is not None and num_requests < 1:
            raise ConfigError("num_requests", num_requests, "at least 1, or None")
        if prompts is not None and not prompts:
            raise ConfigError("prompts", [], "one or more prompts")
        self._menu = menu or PlanMenu.from_plan(_load(plan))
        self._codec = ActionCodec(self.config.spaces, self._menu)
        self.action_space = action_space(self._codec)
        self._params = params or SamplingParams(max_new_tokens=8 * self.config.interval_tokens)
        self._num_requests = num_requests
        self._timeout_s = timeout_s
        self._all_drafters = (1 << len(self._menu.drafters)) - 1
        start = self._codec.plan(self._codec.off(), self._start_chain())
        eos_token_ids = check_plan(start)
        self._eos_token_ids = eos_token_ids
        self._prompts = encode_prompts(prompts or DEFAULT_PROMPTS, start)
        self._owns_engine = engine is None
        self._engine = engine or Engine(start)
        self._meter = LiveMeter(self._engine, self._codec, telemetry, device)
        self._announcer: Announcer | None = None
        if self._owns_engine and telemetry is not False:
            self._announcer = Announcer(self._engine, self._meter.sampler)
        self._stream: GenerationStream | None = None
        self._action = self._codec.off()
        self._resident = self._start_chain()
        self._failed = 0
        self._changed = False

    @property
    def engine(self) -> Engine:
        """The engine under this environment."""
        return self._engine

    def close(self) -> None:
        """End the stream, the sampler and, if it is this environment's own, the engine. May be called twice."""
        if self._stream is not None:
            self._stream.stop()
            self._stream = None
        if self._announcer is not None:
            self._announcer.close()
        self._meter.close()
        if self._owns_engine:
            self._engine.close()
        super().close()

    # -- the base class' part -------------------------------------------------------------------------------

    def _begin(self, seed: int, options: dict[str, Any]) -> Interval:
        if options:
            raise ConfigError("options", sorted(options), "none: the live environment has no options")
        if self._stream is not None:
            self._stream.stop()
        self._failed, self._changed = 0, False
        self._action = self._codec.off()
        self._engine.apply(self._codec.plan(self._action, self._resident))
        self._meter.begin()
        if not self._meter.calibrated:
            self._calibrate(seed)
        self._stream = self._new_stream(self._request_stream(seed, self._num_requests))
        slots = self._codec.num_slots
        self._observer = Observer(self.config, self._codec, self._meter.known_step_s(slots), self._meter.verify_ratio())
        first = self._prompts[0]
        device = self._meter.device_figures()
        return Interval(
            max_new_tokens=self._params.max_new_tokens,
            context_tokens=len(first[0]),
            kind=first[1],
            device=device,
        )

    def _put_in_force(self, action: Action) -> bool:
        try:
            self._engine.apply(self._codec.plan(action, self._resident))
        except AutoPipeError as error:
            _log.warning("the plan %r is not possible: %s", self._codec.describe(action), error)
            self._failed |= int(action[0]) & ~self._resident
            return False
        self._action, self._changed = action, True
        if action[0] != OFF:
            self._resident = int(action[0])
        return True

    def _next_interval(self) -> Interval:
        stream = self._stream
        if stream is None:
            raise AutoPipeError("the environment is closed; make a new one")
        changed, self._changed = self._changed, False
        try:
            items = stream.take(self.config.interval_tokens, self._timeout_s, from_now=changed)
        except AutoPipeError as error:
            return Interval(error=str(error), slots=self._meter.no_figures())
        interval = self._meter.measure(items, self._action, plain=not changed and bool(self._action[0] == OFF))
        interval.done = stream.finished
        if stream.error is not None:
            interval.error = str(stream.error)
        return interval

    def _action_in_force(self) -> Action:
        return self._action

    def _memory(self) -> tuple[int | None, int]:
        return self._menu.device_memory_bytes or self._meter.memory_total_bytes(), 0

    def _dead(self) -> int:
        """Drafters of the loaded chain whose process is gone, and those that could not be loaded."""
        alive = set(self._engine.worker_ids)
        names = self._codec.slot_names()
        gone = 0
        for slot in slots_of(self._resident):
            if not self._menu.drafters[slot].stage.is_ngram and names[slot] not in alive:
                gone |= 1 << slot
        return gone | self._failed

    def _lanes(self) -> list[NDArray[np.float64]]:
        return []

    # -- requests -------------------------------------------------------------------------------------------

    def _start_chain(self) -> int:
        """The largest chain on the menu that fits: its drafters are loaded from the start."""
        total_bytes = self._menu.device_memory_bytes
        chains = [
            chain
            for chain in range(self._all_drafters + 1)
            if self._codec.allowed(chain, total_bytes, 0, self.config.memory_share)
        ]
        return max(chains, key=lambda chain: (chain.bit_count(), chain))

    def _new_stream(self, requests: Iterator[LiveRequest]) -> GenerationStream:
        most_ahead = _INTERVALS_AHEAD * self.config.interval_tokens
        return GenerationStream(self._engine, requests, self._eos_token_ids, most_ahead)

    def _request_stream(self, seed: int, count: int | None) -> Iterator[LiveRequest]:
        """Requests in order; endless for None."""
        for number in itertools.count() if count is None else range(count):
            token_ids, kind = self._prompts[number % len(self._prompts)]
            yield LiveRequest(token_ids, kind, self._params.replace(seed=(seed + number) % 2**62))

    def _calibrate(self, seed: int) -> None:
        """Measure plain decoding on the first prompt."""
        stream = self._new_stream(self._request_stream(seed, 1))
        try:
            items = stream.take(2 * self.config.interval_tokens, self._timeout_s)
            self._meter.measure(items, self._codec.off(), plain=True)
        finally:
            stream.stop()
        if stream.error is not None:
            raise stream.error
        self._meter.begin()


def _load(plan: Plan | str | Path | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan is None:
        from autopipe.plans import DEFAULT_PLAN_PATH

        return Plan.load(DEFAULT_PLAN_PATH)
    return Plan.load(plan)
