"""A user's logits processor, called in the user's process for rows of a worker."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import (
    AutoPipeError,
    ConfigError,
)
from autopipe.core.sampling import SamplingParams
from tests.core.engine_scenes import THREE, collect, plan, stage
from tests.core.pipeline import PROMPT, plain_output


def test_a_processor_sees_each_prefix_of_the_final_text_once_and_in_order(engine: Engine) -> None:
    engine.apply(plan(*THREE))
    seen: list[list[int]] = []

    def forbid_even(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(prefix)
        row[::2] = -np.inf
        return row

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=25), processor=forbid_even)
    text = [token for block in handle for token in block.token_ids]
    assert all(token % 2 for token in text)
    assert seen == [PROMPT + text[:count] for count in range(25)]


def test_an_error_in_a_processor_reaches_the_caller(engine: Engine) -> None:
    def broken(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        raise ZeroDivisionError("mine")

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        handle.outcome()
    assert collect(engine) == plain_output(60)


@pytest.mark.parametrize("result", [np.zeros((1, 1)), np.zeros(3)])
def test_scores_of_another_shape_are_refused(engine: Engine, result: np.ndarray[Any, Any]) -> None:
    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=lambda prefix, row: result)
    with pytest.raises(ConfigError, match="logits_processor"):
        handle.outcome()


def test_a_processor_that_exits_ends_its_own_request_only(engine: Engine) -> None:
    def leave(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sys.exit(3)

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=leave)
    with pytest.raises(SystemExit):
        handle.outcome()
    assert collect(engine) == plain_output(60)


def test_applying_from_a_processor_is_refused_instead_of_waiting_for_itself(engine: Engine) -> None:
    def change(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        engine.apply(plan(*THREE))
        return row

    handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=5), processor=change)
    with pytest.raises(AutoPipeError, match="logits processor"):
        handle.outcome()


def test_a_processor_never_sees_a_prefix_behind_the_end(engine: Engine) -> None:
    text = plain_output(60)
    eos = text[25]
    cut = text[: text.index(eos) + 1]
    seen: list[list[int]] = []

    def watch(prefix: list[int], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(prefix)
        return row

    engine.apply(plan(stage("perfect", window=8), stage("target"), mode="lockstep"))
    params = SamplingParams(max_new_tokens=60, eos_token_ids=(eos,))
    handle = engine.submit(PROMPT, params, processor=watch)
    assert [token for block in handle for token in block.token_ids] == cut
    assert seen == [PROMPT + cut[:count] for count in range(len(cut))]
    engine.apply(plan(*THREE))
