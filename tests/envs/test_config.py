"""Settings of the environments refuse what makes no sense."""

import pytest

from autopipe.core.errors import ConfigError
from autopipe.envs.config import EnvConfig


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"interval_tokens": 0}, "interval_tokens"),
        ({"spaces": {"windows": [4, 2]}}, "windows"),
        ({"spaces": {"windows": [4]}}, "windows"),
        ({"spaces": {"modes": ["plain"]}}, "modes"),
        ({"spaces": {"drafter_slots": 5}}, "drafter_slots"),
        ({"reward": {"energy": -1}}, "reward.energy"),
        ({"reward": {"speed": 1}}, "speed"),
        ({"memory_share": 1.5}, "memory_share"),
    ],
)
def test_bad_settings_name_the_key(data: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        EnvConfig.parse(data)
