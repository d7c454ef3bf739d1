from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.core import kernels
from autopipe.core.backends.load import check_stage
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Plan, StagePlan
from autopipe.tune.candidates import named, own_drafters, parse_drafter, shipped_drafters, too_large, with_precisions
from autopipe.tune.limits import Limits
from autopipe.tune.options import TuneOptions

needs_kernels = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
BIG = {"model": "acme/large", "device": "cpu"}
TARGET = StagePlan.parse(BIG)


def test_a_drafter_may_have_settings() -> None:
    stage = parse_drafter("acme/small,adapter=chat,dtype=fp32", TARGET)

    assert (stage.model, stage.adapter, stage.dtype) == ("acme/small", "chat", "fp32")


@pytest.mark.parametrize("text", ["acme/small,window=4", "acme/small,dtype", "acme/small,dtype=int3", ""])
def test_other_settings_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--drafter"):
        parse_drafter(text, TARGET)


def test_the_target_itself_may_draft_with_fewer_bits() -> None:
    stage = parse_drafter("int8", TARGET)

    assert (stage.model, stage.device, stage.dtype) == ("acme/large", "cpu", "int8")


@needs_kernels
def test_the_targets_weights_in_fewer_bits_are_always_tried(tiny_folder: Path) -> None:
    base = Plan.parse({"chain": [{"model": str(tiny_folder)}]})

    found = TuneOptions.make(base).drafters
    assert [(stage.model, stage.dtype) for stage in found] == [(str(tiny_folder), "int4"), (str(tiny_folder), "int8")]
    assert TuneOptions.make(base, drafters=["none"]).drafters == ()


def test_but_not_where_they_cannot_be_had() -> None:
    emulated = {"model": "emulated", "emulated": {"ms": {1: 1.0}}}

    spread = {**BIG, "device_map": "auto"}
    for target in (spread, {**BIG, "device": "cuda:7"}, {**BIG, "adapter": "law"}, {**BIG, "dtype": "int4"}, emulated):
        assert own_drafters(StagePlan.parse(target)) == []


@needs_kernels
def test_only_what_is_fewer() -> None:
    found = own_drafters(StagePlan.parse({"model": "smollm2-135m", "dtype": "int8"}))
    assert [stage.dtype for stage in found] == ["int4"]


@pytest.mark.parametrize("settings", [{"backend": "transformers"}, {"dtype": "int8"}, {"adapter": "a/law"}])
def test_the_shipped_drafter_can_be_loaded_however_the_target_runs(settings: dict[str, str]) -> None:
    [stage] = shipped_drafters(StagePlan.parse({"model": "smollm2-135m", **settings}))

    assert check_stage(stage).backend == "fused"


@needs_kernels
def test_nor_twice(tiny_folder: Path) -> None:
    target = {"model": str(tiny_folder)}
    base = Plan.parse({"chain": [{**target, "dtype": "int4", "name": "quick"}, target]})

    assert TuneOptions.make(base).drafters[0].name == "quick"
    assert [stage.dtype for stage in TuneOptions.make(base).drafters] == ["int4", "int8"]


def test_each_drafter_is_tried_in_each_precision_with_a_name_of_its_own() -> None:
    found = named(with_precisions([parse_drafter("acme/small", TARGET)], ["bf16", "fp32"]))

    assert [(stage.name, stage.dtype.value) for stage in found] == [("small-bf16", "bf16"), ("small-fp32", "fp32")]


def test_adapters_of_one_model_are_told_apart() -> None:
    found = named([parse_drafter("small,adapter=a/chat", TARGET), parse_drafter("small,adapter=a/code", TARGET)])

    assert [stage.name for stage in found] == ["small+chat", "small+code"]


def test_the_same_drafter_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="once"):
        named([parse_drafter("acme/small", TARGET), parse_drafter("acme/small", TARGET)])


def test_names_that_parameters_use_are_avoided() -> None:
    assert [stage.name for stage in named([StagePlan.parse({"model": "acme/target"})])] == ["target-2"]


def test_a_model_larger_than_the_memory_is_told_before_it_loads(tiny_folder: Path) -> None:
    plan = Plan.parse({"chain": [{"model": str(tiny_folder), "device": "cpu"}]})

    assert too_large(plan, Limits()) is None
    assert "GiB of cpu memory" in str(too_large(plan, Limits(memory_bytes={"cpu": 1000})))


def test_weights_that_are_cut_to_fewer_bits_may_be_smaller_than_their_file(tiny_folder: Path) -> None:
    size = (tiny_folder / "model.safetensors").stat().st_size
    room = Limits(memory_bytes={"cpu": int(0.6 * size)})
    stage = {"model": str(tiny_folder), "device": "cpu"}

    assert too_large(Plan.parse({"chain": [stage]}), room) is not None
    assert too_large(Plan.parse({"chain": [{**stage, "dtype": "bf16"}]}), room) is None


@needs_kernels
def test_a_copy_of_a_target_with_an_adapter_counts_as_memory(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (tmp_path / "adapter_model.safetensors").touch()  # sizes are judged by files: nothing is read
    target = {"model": str(tiny_folder), "device": "cpu", "adapter": str(tmp_path), "dtype": "bf16"}
    copy = {**target, "dtype": "int8", "name": "copy"}
    size = (tiny_folder / "model.safetensors").stat().st_size
    room = Limits(memory_bytes={"cpu": int(0.6 * size)})

    assert too_large(Plan.parse({"chain": [target]}), room) is None
    assert too_large(Plan.parse({"chain": [copy, target]}), room) is not None
