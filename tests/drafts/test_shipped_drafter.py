"""The drafter that comes with AutoPipe fits its target, is small, and says what it is."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from autopipe import AutoPipe
from autopipe.core.backends.load import is_drafter
from autopipe.core.models import load_config, load_state, resolve
from autopipe.core.models.shared_base import SHIPPED, adapter_folder, check_drafter
from autopipe.core.plan import Mode, Plan, StagePlan

TARGET = "smollm2-135m"
FOLDER = Path(adapter_folder(TARGET))


def test_a_plan_names_it_by_its_targets_name() -> None:
    assert TARGET in SHIPPED
    assert is_drafter(StagePlan.parse({"model": TARGET, "adapter": TARGET}))


@pytest.mark.real_model
def test_it_fits_its_target() -> None:
    source = resolve(TARGET)
    check_drafter(str(FOLDER), load_config(source), load_state(source))


@pytest.mark.real_model
def test_a_chain_with_it_says_what_the_target_says_alone() -> None:
    drafter = {"model": TARGET, "adapter": TARGET, "window": 3}
    chain = [{"model": "ngram", "window": 4}, drafter, {"model": TARGET, "name": "target"}]
    message = [{"role": "user", "content": "Name three things to check when a bicycle squeaks."}]
    with AutoPipe.from_plan(Plan.parse({"chain": chain, "mode": "lockstep"})) as pipe:
        results = []
        for mode in (Mode.LOCKSTEP, Mode.ASYNC, Mode.PLAIN):
            pipe.apply(Plan.parse({"chain": chain, "mode": mode}))
            results.append(pipe.generate(messages=message, max_new_tokens=40))
    drafted = next(stage for stage in results[0].stats.stages if stage.name == f"{TARGET}+drafter")
    assert drafted.accepted > 0
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 14 << 20


def test_its_training_and_its_license_are_on_record() -> None:
    with (FOLDER / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["agreement_all"]) > float(rows[0]["agreement_all"])
    assert json.loads((FOLDER / "drafter.json").read_text())["training"]["options"]["layers"]
    assert "Apache License 2.0" in (FOLDER / "NOTICE").read_text()
