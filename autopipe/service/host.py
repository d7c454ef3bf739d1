"""The engine as the service sees it: one small interface over the shared engine and the one that takes turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autopipe.core.errors import QueueFullError, UnsupportedModelError
from autopipe.core.live_engine import LiveEngine
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import StageReport
from autopipe.service.carrying import CarriedRequest
from autopipe.service.config import ServiceConfig

if TYPE_CHECKING:
    from autopipe.api import AutoPipe
    from autopipe.core.shared import SharedEngine

_log = logging.getLogger("autopipe.service")


@dataclass(frozen=True, slots=True)
class Load:
    """What is under way: requests in the pipeline, requests that wait, and by request what stages have done so far."""

    running: int = 0
    waiting: int = 0
    progress: Mapping[int, list[StageReport]] = field(default_factory=dict)


class EngineHost(Protocol):
    """What the service needs of an engine. Every method may be called from any thread and is quick, but `apply`."""

    tokenizer: Any
    sharing: str
    """How requests share the pipeline, in words."""

    @property
    def plan(self) -> Plan: ...

    @property
    def engine(self) -> LiveEngine:
        """What a `RuntimeController` works on."""

    @property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its output may have together."""

    def encode(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, input_ids: Any = None
    ) -> list[int]: ...

    @property
    def continues(self) -> bool:
        """Whether `submit` takes `output`, tokens that a request was given before."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]: ...

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        """Queue a request.

        Raises:
            QueueFullError: as many wait as may.
            ConfigError, ContextLengthError, EngineClosedError: as `Engine.submit`.
        """

    def apply(self, plan: Plan) -> None:
        """Put a plan with the same target in force; returns when it is. Raises what `Engine.apply` raises."""

    def load(self) -> Load: ...

    def worker_ids(self) -> Mapping[str, int]:
        """Process id by name of each stage that lives."""

    def fallbacks(self) -> list[str]:
        """What has not gone as planned so far, in words."""

    def cache_stats(self) -> Mapping[str, int]:
        """Of the cache of common prefixes; {} where there is none."""

    def plain_step_s(self, num_requests: int) -> float | None:
        """Seconds of the target's step with one token for each of `num_requests`; None: not known."""

    def close(self) -> None: ...


class _Host:
    """What both kinds of engines do alike."""

    sharing = ""

    def __init__(self, pipe: AutoPipe) -> None:
        self._pipe = pipe
        self.engine: Any = pipe.engine
        self.tokenizer = pipe.tokenizer
        self.encode = pipe.encode
        self.eos_token_ids = pipe.eos_token_ids
        facts = self.engine.facts(self.plan.names()[-1])  # once: a target that has died says nothing
        self.context_tokens = int(facts.get("max_length", 1 << 20))

    @property
    def plan(self) -> Plan:
        return self._pipe.plan

    @property
    def continues(self) -> bool:
        return bool(getattr(self.engine, "continues", False))

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        checked: list[int] = self.engine.check_request(prompt, params)
        return checked

    def _submit(self, prompt: Sequence[int], params: SamplingParams, options: Mapping[str, Any]) -> RequestHandle:
        handle: RequestHandle = self.engine.submit(prompt, params, **{"eos_token_ids": self.eos_token_ids, **options})
        return handle

    def apply(self, plan: Plan) -> None:
        self._pipe.apply(plan)

    def worker_ids(self) -> Mapping[str, int]:
        return dict(self.engine.worker_ids)

    def fallbacks(self) -> list[str]:
        return list(self.engine.fallbacks)

    def cache_stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        self._pipe.close()


class TurnsHost(_Host):
    """An engine that runs one request after another, with any chain. Those that wait outlive a target that dies.

    Args:
        max_queue: requests that may wait.
    """

    sharing = "one after another"

    def __init__(self, pipe: AutoPipe, max_queue: int) -> None:
        super().__init__(pipe)
        self._max_queue = max_queue
        self._gate = threading.Lock()
        self._open: list[RequestHandle] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        with self._gate:
            self._forget_ended()
            if len(self._open) > self._max_queue:
                raise QueueFullError(len(self._open) - 1, 1.0)
            handle = CarriedRequest(lambda: self._submit(prompt, params, options)).handle
            self._open.append(handle)
            return handle

    def load(self) -> Load:
        with self._gate:
            self._forget_ended()
            num_open = len(self._open)
        under_way = self.engine.progress()
        running = int(under_way is not None)
        return Load(running, max(0, num_open - running), {} if under_way is None else {under_way[0]: under_way[1]})

    def plain_step_s(self, num_requests: int) -> float | None:
        measured = self.engine.facts(self.plan.names()[-1]).get("step_ms", {})
        one = measured.get("1", measured.get(1))
        return None if one is None else num_requests * float(one) / 1e3

    def _forget_ended(self) -> None:
        self._open = [handle for handle in self._open if not handle.ended]


class SharedHost(_Host):
    """An engine in which many requests share one target."""

    def __init__(self, pipe: AutoPipe) -> None:
        super().__init__(pipe)
        self._shared: SharedEngine = self.engine
        one_by_one = self.engine.facts(self.plan.names()[-1]).get("one_by_one", False)
        self.sharing = "by turns, step by step" if one_by_one else "batched"

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> RequestHandle:
        return self._submit(prompt, params, options)

    def load(self) -> Load:
        load = self._shared.load()
        return Load(load.running, load.waiting, load.progress)

    def cache_stats(self) -> Mapping[str, int]:
        return self._shared.cache_stats()

    def plain_step_s(self, num_requests: int) -> float | None:
        return self._shared.step_s(num_requests)


Opener = Callable[[Plan], EngineHost]
"""Loads a plan's models; may take minutes. Raises what `AutoPipe` raises."""


def open_host(plan: Plan, config: ServiceConfig, **options: Any) -> EngineHost:
    """Load a plan's models; requests share the target where the plan allows it.

    Args:
        options: `check` and `progress` of `AutoPipe`.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError, TokenizerMismatchError: as `AutoPipe`.
    """
    from autopipe.api import AutoPipe
    from autopipe.core.shared import SharedEngine, SharingOptions, reason_unshareable

    limits = config.limits
    reason = "it was asked for (sharing: off)" if not config.sharing else reason_unshareable(plan)
    if reason is None:
        sharing = SharingOptions(max_waiting=limits.max_queue, **config.sharing_options())

        def shared(wanted: Plan, **more: Any) -> SharedEngine:
            return SharedEngine(wanted, sharing, **more)

        try:
            return SharedHost(AutoPipe(plan, engine=shared, telemetry=False, **options))
        except UnsupportedModelError as error:  # the plan looked as if it could be shared, the model cannot
            reason = str(error)
    _log.warning("requests run one after another: %s", reason)
    return TurnsHost(AutoPipe(plan, telemetry=False, **options), limits.max_queue)
