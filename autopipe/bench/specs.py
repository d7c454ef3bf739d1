"""What `--compare` may say: arms by name, each with settings of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopipe.core.errors import ConfigError

PIPELINE_ARMS = ("plain", "lockstep", "async")
TRANSFORMERS_ARMS = ("transformers", "transformers-lookup", "transformers-assisted")
LIBRARY_ARMS = ("llama.cpp", "openvino")
ARMS = (*PIPELINE_ARMS, *TRANSFORMERS_ARMS, *LIBRARY_ARMS)

_SETTING = re.compile(r":(?=[a-z-]+=)")


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm: `label` as the user wrote it, `kind` one of `ARMS`, and its settings."""

    label: str
    kind: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_pipeline(self) -> bool:
        return self.kind in PIPELINE_ARMS


def parse_arms(compare: str, key: str = "--compare") -> list[ArmSpec]:
    """Split `plain,lockstep:window=3,...` into arms.

    Raises:
        ConfigError: an unknown arm or setting, a setting on a peer's arm, or an arm given twice.
    """
    specs: list[ArmSpec] = []
    for label in (part.strip() for part in compare.split(",")):
        kind, *settings = _SETTING.split(label)
        if kind not in ARMS:
            raise ConfigError(key, kind, f"{', '.join(ARMS)}; separated by commas")
        spec = ArmSpec(label, kind, dict(setting.split("=", 1) for setting in settings))
        if spec.settings and not spec.is_pipeline:
            raise ConfigError(key, label, f"settings only on {', '.join(PIPELINE_ARMS)}")
        for name in spec.settings:
            if name not in _SETTERS:
                raise ConfigError(key, label, f"the settings {', '.join(sorted(_SETTERS))}")
        if label in [earlier.label for earlier in specs]:
            raise ConfigError(key, label, "each arm once")
        specs.append(spec)
    return specs


def arm_settings(spec: ArmSpec) -> dict[str, Any]:
    """A pipeline arm's mode and settings, as fields of `autopipe.cli.options.PlanOptions`.

    Raises:
        ConfigError: a number that is not one.
    """
    fields: dict[str, Any] = {"mode": spec.kind}
    for name, value in spec.settings.items():
        try:
            fields.update(_SETTERS[name](value))
        except ValueError:
            raise ConfigError("--compare", spec.label, f"whole numbers for {name}") from None
    return fields


def _whole_numbers(value: str) -> tuple[int, ...]:
    return tuple(int(part) for part in value.split("+"))


_SETTERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "drafter": lambda value: {"drafters": tuple(value.split("+"))},
    "window": lambda value: {"windows": _whole_numbers(value)},
    "min-drafts": lambda value: {"min_drafts": int(value)},
    "dtype": lambda value: {"dtype": value},
    "backend": lambda value: {"backend": value},
    "warmup": lambda value: {"warmup": value},
    "verification": lambda value: {"verification": value},
}
