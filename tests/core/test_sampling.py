"""The user's sampling options."""

from __future__ import annotations

from typing import Any

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.sampling import SamplingParams


def test_default_is_greedy() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams.parse({"stop": "END"}).stop == ("END",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 3.0),
        ("max_new_tokens", 0),
        ("stop", ("a", "")),
        ("seed", -1),
        ("seed", 2**63),
        ("num_logprobs", 21),
        ("no_such_option", 1),
    ],
)
def test_a_value_out_of_range_names_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams.parse({key: value})
    assert error.value.key == key
    assert str(value) in str(error.value) or repr(value) in str(error.value)


def test_fewer_tokens_at_most_than_at_least_are_refused() -> None:
    assert SamplingParams.parse({"min_new_tokens": 4, "max_new_tokens": 4}).min_new_tokens == 4
    with pytest.raises(ConfigError, match="0 to max_new_tokens") as error:
        SamplingParams.parse({"min_new_tokens": 5, "max_new_tokens": 4})
    assert error.value.key == "min_new_tokens"
