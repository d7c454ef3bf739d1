from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autopipe.bench.arms import ArmMissingError, EnginePool, PipelineArm
from autopipe.bench.library_arms import LlamaCppArm
from autopipe.bench.transformers_arms import TransformersArm, TransformersModels
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from tests.cli.fakes import FakePipe

IDS = [5, 6, 7, 5, 6, 7, 5, 6]
SAMPLING = SamplingParams(max_new_tokens=12)
NAMES = ["transformers", "transformers-lookup", "transformers-assisted"]


def stage(folder: Path) -> StagePlan:
    return StagePlan(model=str(folder))


@pytest.fixture
def models() -> TransformersModels:
    return TransformersModels(torch.get_num_threads())


@pytest.mark.parametrize("name", NAMES)
def test_every_transformers_arm_gives_what_generate_gives(
    name: str, tiny_folder: Path, models: TransformersModels
) -> None:
    arm = TransformersArm(name, stage(tiny_folder), models, stage(tiny_folder))
    arm.prepare()
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    wanted = model.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=12)[0, len(IDS) :].tolist()

    assert list(arm.generate(IDS, SAMPLING).token_ids) == wanted


def test_plain_transformers_gives_a_token_per_forward(tiny_folder: Path, models: TransformersModels) -> None:
    arm = TransformersArm("transformers", stage(tiny_folder), models)
    arm.prepare()

    assert arm.generate(IDS, SAMPLING).acceptance_length == 1.0


def test_sampled_output_follows_the_seed(tiny_folder: Path, models: TransformersModels) -> None:
    arm = TransformersArm("transformers", stage(tiny_folder), models)
    arm.prepare()
    sampled = [arm.generate(IDS, SAMPLING.replace(temperature=2.0, seed=seed)).token_ids for seed in (1, 1, 2)]

    assert sampled[0] == sampled[1] != sampled[2]


def test_transformers_arms_share_a_model(tiny_folder: Path, models: TransformersModels) -> None:
    assert models.load(stage(tiny_folder)) is models.load(stage(tiny_folder).replace(window=3))


def test_transformers_arms_run_with_the_threads_of_the_bench(tiny_folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        arm = TransformersArm("transformers", stage(tiny_folder), TransformersModels(2))
        arm.prepare()
        torch.set_num_threads(1)  # as another arm may do in between
        arm.generate(IDS, SAMPLING)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_assisted_generation_without_a_drafter_is_missing(tiny_folder: Path, models: TransformersModels) -> None:
    with pytest.raises(ArmMissingError, match="--drafter"):
        TransformersArm("transformers-assisted", stage(tiny_folder), models).prepare()


def test_llama_cpp_wants_a_gguf_target(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", object())

    with pytest.raises(ArmMissingError, match="GGUF"):
        LlamaCppArm(stage(tiny_folder), 1).prepare()


def plan(**changes: Any) -> Plan:
    return Plan.parse({"chain": [{"model": "ngram"}, {"model": "smollm2-135m"}], **changes})


def test_a_pipeline_arm_puts_its_plan_in_force_before_it_generates() -> None:
    opened: list[FakePipe] = []

    def open_pipe(plan: Plan) -> Any:
        opened.append(FakePipe(plan))
        return opened[-1]

    pool = EnginePool(open_pipe)
    plain, lockstep = PipelineArm("plain", plan(mode="plain"), pool), PipelineArm("lockstep", plan(), pool)
    plain.generate(IDS, SAMPLING)
    lockstep.generate(IDS, SAMPLING)
    lockstep.generate(IDS, SAMPLING)

    assert len(opened) == 1
    assert opened[0].applied == [lockstep.plan]


def test_a_pipeline_arm_passes_only_the_options_that_were_given() -> None:
    opened: list[FakePipe] = []

    def open_pipe(plan: Plan) -> Any:
        opened.append(FakePipe(plan))
        return opened[-1]

    PipelineArm("plain", plan(), EnginePool(open_pipe)).generate(IDS, SAMPLING)

    assert opened[0].requests == [{"prompt": None, "input_ids": IDS, "max_new_tokens": 12}]


def test_rejection_sampling_need_not_follow_plain_decoding() -> None:
    pool = EnginePool(lambda plan: pytest.fail("nothing is opened"))

    assert PipelineArm("lockstep", plan(verification="rejection"), pool).draws_own_noise
    assert not PipelineArm("lockstep", plan(), pool).draws_own_noise


class FakeLlama:
    """What `LlamaCppArm` uses of llama-cpp-python's `Llama`; it counts upwards from the prompt's last token."""

    def __init__(self, path: str, **_: Any) -> None:
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def set_seed(self, seed: int) -> None:
        self.calls.append(f"seed {seed}")

    def token_eos(self) -> int:
        return 10

    def generate(self, tokens: list[int], **_: Any) -> Iterator[int]:
        self.calls.append("generate")
        yield from range(tokens[-1] + 1, 1000)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaCppArm:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=FakeLlama))
    arm = LlamaCppArm(StagePlan(model=str(file)), 1)
    arm.prepare()
    return arm


def test_llama_cpp_ends_with_eos(llama: LlamaCppArm) -> None:
    assert llama.generate([6], SAMPLING).token_ids == (7, 8, 9, 10)


def test_llama_cpp_ends_at_max_new_tokens(llama: LlamaCppArm) -> None:
    assert llama.generate([20], SAMPLING.replace(max_new_tokens=2)).token_ids == (21, 22)


def test_llama_cpp_forgets_the_last_prompt_before_the_next(llama: LlamaCppArm) -> None:
    llama.generate([6], SAMPLING.replace(seed=3))

    assert llama._model.calls == ["reset", "seed 3", "generate"]
