"""Chains with a drafter of the target's own layers say what the target says alone, in real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopipe import AutoPipe, ConfigError, Plan
from autopipe.core.errors import AutoPipeError
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions
from tests.drafts.distilling import tiny_drafter, tiny_target

PROMPT = "The quick brown fox"
LENGTH = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("drafters")
    return [str(tiny_drafter(folder / name, seed=seed)) for seed, name in enumerate(("chat", "code"))]


def _plan(target: str, adapters: list[str], *, use: int = 0, mode: str = "lockstep", ngram: bool = False) -> Plan:
    drafter = {"model": target, "adapter": adapters[use], "adapters": adapters, "window": 4, "name": "drafter"}
    chain: list[dict[str, Any]] = [drafter, {"model": target, "name": "target"}]
    if ngram:
        chain.insert(0, {"model": "ngram", "window": 4, "ngram": {"gate": False}})
    return Plan.parse({"chain": chain, "mode": mode})


@pytest.fixture(scope="module")
def pipe(target: str, adapters: list[str]) -> Iterator[AutoPipe]:
    with AutoPipe.from_plan(_plan(target, adapters)) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def expected(pipe: AutoPipe, target: str, adapters: list[str]) -> dict[float, list[int]]:
    pipe.apply(_plan(target, adapters, mode="plain"))
    return {
        temperature: pipe.generate(PROMPT, max_new_tokens=LENGTH, temperature=temperature, seed=5).token_ids
        for temperature in (0.0, 0.9)
    }


@pytest.mark.parametrize("mode", ["lockstep", "async"])
@pytest.mark.parametrize("ngram", [False, True], ids=["neural-target", "ngram-neural-target"])
def test_output_is_the_targets_own(
    mode: str, ngram: bool, pipe: AutoPipe, target: str, adapters: list[str], expected: dict[float, list[int]]
) -> None:
    pipe.apply(_plan(target, adapters, mode=mode, ngram=ngram))
    for temperature, tokens in expected.items():
        result = pipe.generate(PROMPT, max_new_tokens=LENGTH, temperature=temperature, seed=5)
        assert result.token_ids == tokens
        drafter = next(stage for stage in result.stats.stages if stage.name == "drafter")
        assert drafter.forwards > 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's list of mapped files")
def test_the_layers_that_target_and_drafter_have_in_common_are_in_memory_once(
    pipe: AutoPipe, target: str, adapters: list[str], expected: dict[float, list[int]]
) -> None:
    def shared_layers(name: str) -> set[str]:
        lines = Path(f"/proc/{pipe.engine.worker_ids[name]}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/packed-layers/" in line}  # inodes

    plan = _plan(target, adapters)
    pipe.apply(plan)
    assert len(shared_layers("drafter")) == 3, "layers 0, 1 and 3, for both of its adapters"
    assert shared_layers("target") == shared_layers("drafter")

    pipe.engine.keep_loaded([plan])
    pipe.apply(Plan.parse({"chain": [plan.target.model_dump(mode="json")]}))
    os.kill(pipe.engine.worker_ids["target"], signal.SIGKILL)
    with contextlib.suppress(AutoPipeError):  # one that finds it dead
        pipe.generate(PROMPT, max_new_tokens=1)
    assert pipe.generate(PROMPT, max_new_tokens=LENGTH).token_ids == expected[0.0]
    assert shared_layers("target") == shared_layers("drafter"), "also when it has been started again without it"
    pipe.engine.keep_loaded([])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux's list of mapped files")
def test_a_shared_engine_has_the_layers_once_too(target: str, adapters: list[str]) -> None:
    with SharedEngine(_plan(target, adapters[:1]), SharingOptions(max_active=2)) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=8))
        assert len([token for block in handle for token in block.token_ids]) == 8
        (process,) = set(engine.worker_ids.values())
        lines = [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "/packed-layers/" in line]
        assert len(lines) == len({line.split()[4] for line in lines}) == 3


def test_adapters_change_between_requests_without_loading_anything(
    pipe: AutoPipe, target: str, adapters: list[str], expected: dict[float, list[int]]
) -> None:
    pipe.apply(_plan(target, adapters))
    processes = pipe.engine.worker_ids
    for use in (1, 0, 1):
        pipe.apply(_plan(target, adapters, use=use))
        assert pipe.generate(PROMPT, max_new_tokens=LENGTH).token_ids == expected[0.0]
    assert pipe.engine.worker_ids == processes


def test_an_adapter_changed_in_the_middle_of_a_request_does_not_change_its_output(
    pipe: AutoPipe, target: str, adapters: list[str], expected: dict[float, list[int]]
) -> None:
    pipe.apply(_plan(target, adapters))
    tokens: list[int] = []
    request = pipe.engine.submit(pipe.encode(PROMPT), SamplingParams(max_new_tokens=LENGTH))
    for index, block in enumerate(request):
        tokens += block.token_ids
        pipe.apply(_plan(target, adapters, use=index % 2))
    assert tokens == expected[0.0]


def test_a_drafter_cannot_be_the_target(target: str, adapters: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"chain\.0\.adapter"):
        AutoPipe.from_plan(Plan.parse({"chain": [{"model": target, "adapter": adapters[0]}]}))


def test_a_drafter_of_another_model_is_refused_before_weights_load(tiny_folder: Path, adapters: list[str]) -> None:
    with pytest.raises(AutoPipeError, match=r"chain.0.adapter.*drafter.*this target has"):
        AutoPipe.from_plan(_plan(str(tiny_folder), adapters))


def test_the_adapter_in_use_must_be_one_of_those_loaded(target: str, adapters: list[str]) -> None:
    with pytest.raises(ConfigError, match="adapter"):
        Plan.parse({"chain": [{"model": target, "adapter": "x", "adapters": adapters}, {"model": target}]})
