"""What callers hand over, before it reaches an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.core.errors import ConfigError
from autopipe.inputs import require_no_padding, require_text, require_writable, sampling_params, single_row

ROWS: list[Any] = [
    [3, 5],
    (3, 5),
    [[3, 5]],
    [np.int64(3), np.int32(5)],
    np.array([3, 5]),
    np.array([[3, 5]], dtype=np.uint16),
    torch.tensor([3, 5]),
    torch.tensor([[3, 5]]),
    [torch.tensor(3), torch.tensor(5)],
    [torch.tensor([3, 5])],
    [np.array([3, 5])],
    range(3, 6, 2),
]


@pytest.mark.parametrize("value", ROWS, ids=repr)
def test_one_row_of_ids_in_any_dress_becomes_a_list_of_ints(value: Any) -> None:
    ids = single_row(value)

    assert ids == [3, 5]
    assert [type(token) for token in ids] == [int, int]


@pytest.mark.parametrize(
    "value",
    [
        [3.7],
        [3.0],
        np.array([3.7, 5.0]),
        torch.tensor([[3.5]]),
        ["3"],
        [None],
        "35",
        b"35",
        {"input_ids": [3]},
        35,
        torch.tensor(3),
        [[3], [5]],
        torch.tensor([[3], [5]]),
        [3, [5]],
    ],
    ids=repr,
)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        single_row(value)
    assert caught.value.key == "input_ids"


@pytest.mark.parametrize("mask", [[1, 1], [True, True], torch.ones(1, 2), np.ones(2, dtype=np.int64)], ids=repr)
def test_a_mask_of_ones_is_taken(mask: Any) -> None:
    require_no_padding(mask, 2)


@pytest.mark.parametrize(
    "mask", [[0, 1], torch.tensor([[1, 0]]), [1], torch.ones(2, 2), np.ones((2, 2)), [[1], [1]], "11", 1], ids=repr
)
def test_any_other_mask_is_refused_by_name(mask: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        require_no_padding(mask, 2)
    assert caught.value.key == "attention_mask"


def test_a_mask_that_hides_tokens_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="cut the padding off input_ids"):
        require_no_padding([0, 1], 2)


def test_lone_surrogates_are_no_text() -> None:
    assert require_text("héllo ☃", "prompt") == "héllo ☃"
    with pytest.raises(ConfigError, match="character 3 ") as caught:
        require_text("caf\udce9", "prompt")
    assert caught.value.key == "prompt"


def test_only_strings_are_text() -> None:
    with pytest.raises(ConfigError):
        require_text(5, "prompt")


def test_a_new_and_an_old_file_can_be_written_and_neither_is_touched(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    require_writable(tmp_path / "old", "out")
    require_writable(tmp_path / "new", "out")
    assert (tmp_path / "old").read_text() == "kept"
    assert not (tmp_path / "new").exists()


def test_a_folder_and_a_file_in_no_folder_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "new"):
        with pytest.raises(ConfigError) as caught:
            require_writable(path, "out")
        assert caught.value.key == "out"


def test_a_file_without_permission_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="permission"):
        require_writable(tmp_path / "new", "out")


def test_transformers_spellings_become_ours() -> None:
    params = sampling_params({"do_sample": True, "eos_token_id": 7, "stop_strings": "END", "pad_token_id": 0})

    assert (params.temperature, params.eos_token_ids, params.stop) == (1.0, (7,), ("END",))


def test_do_sample_false_is_greedy() -> None:
    assert sampling_params({"do_sample": False, "temperature": 0.7}).greedy
