"""What a plan's check finds before weights load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autopipe.core.errors import ConfigError, TokenizerMismatchError
from autopipe.core.ngram_table import NgramTable
from autopipe.core.plan import Plan
from autopipe.core.preflight import check_plan, inspect_plan
from tests.tiny import EOS_ID, VOCAB_SIZE

EMULATED: dict[str, Any] = {"model": "emulated", "emulated": {"ms": {1: 1}, "vocab_size": 256, "max_length": 1000}}


def with_table(path: Path, target: dict[str, Any], largest_id: int = 300) -> Plan:
    NgramTable.build([[1, 2, largest_id] * 3], max_order=2).save(path)
    return Plan.parse({"chain": [{"model": "ngram", "ngram": {"table": str(path)}}, target]})


def test_the_target_is_known_before_it_loads(tiny_folder: Path) -> None:
    info = inspect_plan(Plan.parse({"chain": [{"model": str(tiny_folder)}]}))

    assert (info.eos_token_ids, info.vocab_size, info.max_length) == ((EOS_ID,), VOCAB_SIZE, 512)


def test_the_target_of_an_emulated_chain_is_known_too() -> None:
    info = inspect_plan(Plan.parse({"chain": [EMULATED]}))

    assert (info.eos_token_ids, info.vocab_size, info.max_length) == ((), 256, 1000)


@pytest.mark.parametrize("index", [0, 1])
def test_a_core_that_is_not_ours_is_named(index: int) -> None:
    usable = os.sched_getaffinity(0)
    foreign = max(usable) + 1
    stages: list[dict[str, Any]] = [{**EMULATED, "name": name, "cores": [min(usable)]} for name in "ab"]
    check_plan(Plan.parse({"chain": stages}))
    stages[index]["cores"] = [min(usable), foreign]

    with pytest.raises(ConfigError) as caught:
        check_plan(Plan.parse({"chain": stages}))
    assert caught.value.key == f"chain.{index}.cores"
    assert caught.value.value == [min(usable), foreign]


def test_a_table_that_is_not_there_is_named_by_its_key() -> None:
    plan = Plan.parse({"chain": [{"model": "ngram", "ngram": {"table": "/no/table"}}, EMULATED]})

    with pytest.raises(ConfigError) as caught:
        check_plan(plan)
    assert caught.value.key == "chain.0.ngram.table"


def test_a_table_of_another_vocabulary_is_refused_for_an_emulated_target(tmp_path: Path) -> None:
    check_plan(with_table(tmp_path / "good", EMULATED, largest_id=255))
    with pytest.raises(TokenizerMismatchError, match="tokens up to 300"):
        check_plan(with_table(tmp_path / "bad", EMULATED))


def test_a_table_of_another_vocabulary_is_refused_for_a_real_target(tmp_path: Path, tiny_folder: Path) -> None:
    target = {"model": str(tiny_folder)}
    check_plan(with_table(tmp_path / "good", target))
    with pytest.raises(TokenizerMismatchError, match="tokens up to 320"):
        check_plan(with_table(tmp_path / "bad", target, largest_id=320))


def test_whoever_wants_to_know_is_told_of_slow_work(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    def weight_files(source: Any, progress: Any = None) -> list[Path]:
        progress(f"converting {source.name}")
        return []

    monkeypatch.setattr("autopipe.core.backends.load.weight_files", weight_files)
    lines: list[str] = []
    check_plan(Plan.parse({"chain": [{"model": str(tiny_folder)}]}), progress=lines.append)

    assert lines == [f"converting {tiny_folder.name}"]
