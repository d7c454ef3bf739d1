"""A policy at work on the service's engine: `RuntimeController`, behind the safety layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autopipe.core.errors import ConfigError
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
    try:
        return attach_policy(host.engine, policy, tokenizer=host.tokenizer, sampler=sampler, on_event=on_event)
    except ImportError as error:
        raise ConfigError("policy", config.policy, f"a policy whose packages are installed ({error})") from error
