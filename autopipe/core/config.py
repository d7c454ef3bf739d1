"""Base class of everything a user configures: strict pydantic models whose errors name the user's key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from autopipe.core.errors import ConfigError

Model = TypeVar("Model", bound="UserModel")


class UserModel(BaseModel):
    """Immutable, refuses unknown keys. Build it with `parse` to get a `ConfigError` for bad input."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls: type[Model], data: Mapping[str, Any], prefix: str = "") -> Model:
        """Validate `data`; the first problem becomes a `ConfigError` with key `prefix` + its path."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise _config_error(error, cls, prefix) from None

    def replace(self: Model, **changes: Any) -> Model:
        """A validated copy with some fields changed."""
        return type(self).parse({**self.model_dump(), **changes})


def _config_error(error: ValidationError, cls: type[BaseModel], prefix: str) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    key = prefix + ".".join(str(part) for part in first["loc"]) or "plan"
    if first["type"] == "extra_forbidden":
        return ConfigError(
            key, first["input"], f"no such key; the keys are {', '.join(sorted(_fields(cls, first['loc'])))}"
        )
    allowed = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    value = None if first["type"] == "missing" else first["input"]
    return ConfigError(key, value, allowed)


def _fields(cls: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """Names of the keys allowed where `location` points (its last part is the unknown key)."""
    current: Any = cls
    for part in location[:-1]:
        if isinstance(part, str) and part in getattr(current, "model_fields", {}):
            current = current.model_fields[part].annotation
        for argument in getattr(current, "__args__", ()):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                current = argument
                break
    return set(getattr(current, "model_fields", {}))


def load_yaml(path: str | Path, key: str) -> dict[str, Any]:
    """Read a YAML mapping with the safe loader.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping; `key` names the option that gave the path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, str(path), f"a readable YAML file ({error})") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(key, str(path), f"valid YAML ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(key, str(path), "a YAML mapping of keys to values")
    return data
