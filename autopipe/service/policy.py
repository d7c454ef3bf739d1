"""A policy at work on the service's engine: `RuntimeController`, and what it needs to see of a shared engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle
from autopipe.core.stats import StageReport
from autopipe.service.config import ServiceConfig
from autopipe.service.host import EngineHost

if TYPE_CHECKING:
    from autopipe.core.telemetry import Sampler
    from autopipe.policies.controller import RuntimeController
    from autopipe.policies.events import PolicyEvent


def start_policy(
    config: ServiceConfig, host: EngineHost, sampler: Sampler, on_event: Callable[[PolicyEvent], None]
) -> RuntimeController | None:
    """The controller of `config.policy`, running behind the safety layer; None for `static`.

    Raises:
        ConfigError: no such policy, or its file does not fit.
    """
    if config.policy == "static":
        return None
    from autopipe.policies.attach import attach_policy

    policy = config.policy if config.policy_path is None else config.policy_path
    view: Any = host.engine if host.find_handle is None else SharedView(host)
    try:
        return attach_policy(view, policy, tokenizer=host.tokenizer, sampler=sampler, on_event=on_event)
    except ImportError as error:
        raise ConfigError("policy", config.policy, f"a policy whose packages are installed ({error})") from error


class SharedView:
    """A shared engine as a controller looks at one that takes turns: the oldest request stands for all of them.

    `load_factor` tells it that a step shared by several requests takes longer than a step of one.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._engine = host.engine

    @property
    def plan(self) -> Plan:
        return self._host.plan

    @property
    def running(self) -> RequestHandle | None:
        found = self._engine.progress()
        return None if found is None or self._host.find_handle is None else self._host.find_handle(found[0])

    @property
    def num_waiting(self) -> int:
        return int(self._engine.num_waiting)

    @property
    def worker_ids(self) -> Mapping[str, int]:
        return self._host.worker_ids()

    def load_factor(self) -> float:
        """Seconds of plain decoding's step with the requests that run now, relative to a step with one."""
        running = max(1, self._engine.num_running)
        one, now = self._engine.step_s(1), self._engine.step_s(running)
        return now / one if one and now else 1.0

    def apply(self, plan: Plan) -> None:
        self._engine.apply(plan)

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        self._engine.keep_loaded(plans)

    def facts(self, stage: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._engine.facts(stage)
        return found

    def progress(self) -> tuple[int, list[StageReport]] | None:
        found: tuple[int, list[StageReport]] | None = self._engine.progress()
        return found
