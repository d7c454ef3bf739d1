"""What the user may set about the service."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError

PolicyName = Literal["static", "rules", "bandit", "planner", "rl"]

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


class Limits(UserModel):
    """Bounds of one request; what exceeds them is refused with a message that names the bound.

    Attributes:
        max_body_bytes: largest request body.
        body_timeout_s: longest time a body may take to arrive.
        max_prompt_tokens: longest prompt; None: what the target's context holds.
        max_new_tokens: most output tokens a request may ask for; None: what the target's context holds.
        max_choices: most choices of one request, prompts times `n`.
        max_stops: most stop strings.
        max_stop_chars: longest stop string.
        max_logit_bias: most entries of `logit_bias`.
        max_queue: choices that may wait; beyond, 429.
        max_event_streams: open event streams; beyond, 429.
        max_connections: open connections; beyond, 503.
        head_timeout_s: longest time a request's first line and headers may take to arrive.
    """

    max_body_bytes: int = Field(default=4 << 20, ge=1024, le=1 << 30)
    body_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    max_choices: int = Field(default=16, ge=1, le=128)
    max_stops: int = Field(default=4, ge=0, le=256)
    max_stop_chars: int = Field(default=512, ge=1, le=65536)
    max_logit_bias: int = Field(default=1024, ge=0, le=1_000_000)
    max_queue: int = Field(default=128, ge=1, le=100_000)
    max_event_streams: int = Field(default=32, ge=1, le=10_000)
    max_connections: int = Field(default=512, ge=1, le=100_000)
    head_timeout_s: float = Field(default=15.0, gt=0, le=3600)


class ServiceConfig(UserModel):
    """How to serve.

    Attributes:
        host: address to bind; anything but this machine's own needs `api_key` or `allow_unauthenticated_remote`.
        port: 0 picks a free one.
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nobody is asked.
        served_model_name: the name clients call the target by.
        policy: who chooses the plan.
        policy_path: folder of a trained policy, for `rl`; None: the one that ships with AutoPipe.
        control_interval_s: seconds between two decisions.
        idle_unload_s: drafters are unloaded after this time without a request; None: never.
        shutdown_timeout_s: how long requests may go on after SIGTERM.
        keep_alive_s: how long a connection may stay open between two requests.
        journal_path: accepted tokens are kept in this SQLite file; None: nothing is kept.
        sharing: let requests share the target (where the plan allows it), instead of taking turns.
        max_active: requests in the pipeline at once.
        prefix_cache: keep keys and values of finished requests for others that begin alike.
        kv_bytes: memory of all keys and values, the cache's included; None: a quarter of what is available.
        log_prompts: whether logs may hold what users write and get.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    allow_unauthenticated_remote: bool = False
    served_model_name: str = Field(default="autopipe", min_length=1, max_length=200, pattern=r"^[\w.:\-]+$")
    policy: PolicyName = "static"
    policy_path: str | None = None
    control_interval_s: float = Field(default=1.0, ge=0.1, le=3600)
    idle_unload_s: float | None = Field(default=None, gt=0)
    shutdown_timeout_s: float = Field(default=30.0, ge=0, le=86400)
    keep_alive_s: int = Field(default=30, ge=1, le=3600)
    journal_path: str | None = None
    journal_retention_s: float = Field(default=86400.0, gt=0)
    sharing: bool = True
    max_active: int = Field(default=32, ge=1, le=4096)
    prefix_cache: bool = True
    kv_bytes: int | None = Field(default=None, ge=1 << 20)
    log_prompts: bool = False
    limits: Limits = Limits()

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, value: str | None) -> str | None:
        if value is not None and not (value.isascii() and value.isprintable() and " " not in value):
            raise ValueError("printable ASCII without spaces, as a header can carry it")
        return value

    @model_validator(mode="after")
    def _path_has_a_use(self) -> ServiceConfig:
        if self.policy_path is not None and self.policy != "rl":
            raise ConfigError("policy_path", self.policy_path, f"only with the policy rl (it is {self.policy})")
        return self

    @model_validator(mode="after")
    def _safe_to_bind(self) -> ServiceConfig:
        if not (self.is_local or self.api_key or self.allow_unauthenticated_remote):
            raise ConfigError(
                "host",
                self.host,
                "an address of this machine alone, such as 127.0.0.1; others can reach this one: set an API key too, "
                "or say that everybody may use the service (allow_unauthenticated_remote)",
            )
        return self

    def sharing_options(self) -> dict[str, Any]:
        """What the user set of the engine's `SharingOptions`."""
        return {"max_active": self.max_active, "prefix_cache": self.prefix_cache, "kv_bytes": self.kv_bytes}

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host.lower() in _LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def default_alias(model: str) -> str:
    """A name for a model that tells nothing of where it lies."""
    base = model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].removesuffix(".gguf")
    cleaned = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in base)
    return cleaned[:200] or "autopipe"
