"""The folder of answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autopipe.core.errors import ConfigError
from autopipe.drafts.store import AnswerStore, read_answers, read_header, read_meta, shards
from tests.drafts.fakes import HEADER


def meta(key: str, split: str = "train", kind: str = "code") -> dict[str, str]:
    return {"key": key, "split": split, "kind": kind, "sampling": "greedy", "finish_reason": "stop"}


def add(store: AnswerStore, key: str, ids: list[int], prompt_length: int, **fields: str) -> None:
    rows = len(ids) - prompt_length
    top_ids = np.arange(rows * 64).reshape(rows, 64)
    store.add(meta(key, **fields), ids, prompt_length, top_ids, np.linspace(-1, -9, rows * 64).reshape(rows, 64))


def test_answers_come_back_as_they_were_added(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, HEADER)
    add(store, "a", [1, 2, 3, 4], 1)
    add(store, "b", [5, 6], 1)
    store.flush()

    first, second = read_answers(tmp_path)
    assert (first.meta["key"], first.token_ids.tolist(), first.prompt_length) == ("a", [1, 2, 3, 4], 1)
    assert (second.meta["key"], second.token_ids.tolist(), second.num_answer_tokens) == ("b", [5, 6], 1)
    assert first.top_ids.shape == first.top_logprobs.shape == (3, 64)
    assert first.top_ids[1, 0] == 64
    assert second.top_ids[0, 5] == 5
    assert (first.top_ids.dtype, first.top_logprobs.dtype) == (np.uint16, np.float16)


def test_a_large_vocabulary_keeps_32_bit_ids(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, {**HEADER, "vocab_size": 128_256})
    store.add(meta("a"), [1, 2], 1, np.full((1, 64), 128_255), np.zeros((1, 64)))
    store.flush()

    assert next(read_answers(tmp_path)).top_ids[0, 0] == 128_255


def test_a_shard_is_written_when_enough_tokens_are_there(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, HEADER, shard_tokens=5)
    for key in "abc":
        add(store, key, [1, 2, 3], 1)
        assert len(shards(tmp_path)) == (1 if key == "c" else 0)


def test_a_later_run_adds_shards(tmp_path: Path) -> None:
    for key in "ab":
        store = AnswerStore(tmp_path, HEADER)
        add(store, key, [1, 2], 1)
        store.flush()

    assert [record["key"] for record in read_meta(tmp_path)] == ["a", "b"]


def test_half_a_shard_is_not_read(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, HEADER)
    add(store, "a", [1, 2], 1)
    store.flush()
    (tmp_path / "shard-00001.jsonl").write_text(json.dumps(meta("b")))
    (tmp_path / "shard-00001.safetensors.tmp").write_bytes(b"half")

    assert [answer.meta["key"] for answer in read_answers(tmp_path)] == ["a"]
    store = AnswerStore(tmp_path, HEADER)
    add(store, "c", [1, 2], 1)
    store.flush()
    assert [answer.meta["key"] for answer in read_answers(tmp_path)] == ["a", "c"]


def test_splits_and_kinds_are_told_apart(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, HEADER)
    add(store, "a", [1, 2], 1)
    add(store, "b", [1, 2], 1, split="heldout")
    add(store, "c", [1, 2], 1, kind="chat")
    store.flush()

    assert [answer.meta["key"] for answer in read_answers(tmp_path, split="train")] == ["a", "c"]
    assert [answer.meta["key"] for answer in read_answers(tmp_path, split="heldout")] == ["b"]
    assert [answer.meta["key"] for answer in read_answers(tmp_path, kinds=("chat",))] == ["c"]


def test_a_folder_of_another_target_is_refused(tmp_path: Path) -> None:
    AnswerStore(tmp_path, HEADER)

    with pytest.raises(ConfigError, match="target"):
        AnswerStore(tmp_path, {**HEADER, "target": "other"})


def test_a_folder_without_answers_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_header(tmp_path, "--answers")
    assert caught.value.key == "--answers"


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, HEADER)
    add(store, "a", [1, 2], 1)
    store.flush()
    shards(tmp_path)[0].write_bytes(b"nonsense")

    with pytest.raises(ConfigError, match="shard-00000"):
        list(read_answers(tmp_path))


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    AnswerStore(tmp_path, HEADER)
    with pytest.raises(ConfigError, match="split"):
        list(read_answers(tmp_path, split="test"))
