"""A target that drafts for itself with fewer bits: what it is made of, and that the output stays the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError
from autopipe.core.fewer_bits import in_fewer_bits
from autopipe.core.plan import BackendName, Dtype, Mode, Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared import SharedEngine, SharingOptions
from tests.core.shared.test_engine import wait_until
from tests.tiny import save_tiny

needs_kernels = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
PROMPTS = [list(range(start, start + 20)) for start in (30, 50, 70, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)


def test_it_is_the_same_model_on_the_same_device_with_the_same_adapter() -> None:
    target = {"model": "acme/large", "device": "cuda:1", "adapter": "law", "trust_remote_code": True, "threads": 3}
    stage = in_fewer_bits(StagePlan.parse({**target, "backend": "transformers", "window": 9}), "int4")

    assert (stage.model, stage.device, stage.adapter, stage.trust_remote_code) == ("acme/large", "cuda:1", "law", True)
    assert (stage.dtype, stage.name) == (Dtype.INT4, "large+law-int4")


def test_a_long_name_is_cut() -> None:
    stage = in_fewer_bits(StagePlan.parse({"model": "acme/" + 90 * "x"}), "int4")

    assert stage.name == 75 * "x" + "-int4"


def test_it_runs_as_fast_as_it_can_however_the_target_runs() -> None:
    stage = in_fewer_bits(StagePlan.parse({"model": "acme/large", "backend": "transformers", "cores": [1]}), "int8")

    assert (stage.backend, stage.cores) == (BackendName.AUTO, None)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ({"model": "acme/large"}, "bf16"),
        ({"model": "acme/large", "dtype": "int8"}, "int8"),
        ({"model": "acme/large", "dtype": "int4"}, "int8"),
        ({"model": "emulated", "emulated": {"ms": {1: 1.0}}}, "int4"),
        ({"model": "acme/large", "device_map": "auto"}, "int4"),
    ],
)
def test_where_there_are_no_fewer_bits_the_option_is_named(target: dict[str, Any], dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--drafter: '{dtype}'"):
        in_fewer_bits(StagePlan.parse(target), dtype)


@needs_kernels
@pytest.mark.parametrize(("backend", "dtype"), [("fused", "bf16"), ("transformers", "fp32")])
def test_the_output_is_that_of_plain_decoding_in_every_mode(folder: Path, backend: str, dtype: str) -> None:
    target = StagePlan.parse({"model": str(folder), "name": "target", "backend": backend, "dtype": dtype, "threads": 1})
    own = in_fewer_bits(target, "int4").replace(window=5, threads=1)
    ngram = StagePlan.parse({"model": "ngram"})
    outputs, accepted = [], 0
    with Engine(Plan(mode=Mode.LOCKSTEP, chain=(ngram, own, target))) as engine:
        for mode, chain in (("plain", (target,)), ("lockstep", (own, target)), ("lockstep", (ngram, own, target)),
                            ("async", (ngram, own, target))):  # fmt: skip
            engine.apply(Plan(mode=Mode(mode), chain=chain))
            handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40, temperature=0.8, seed=3))
            outputs.append([token for block in handle for token in block.token_ids])
            accepted += sum(stage.accepted for stage in handle.outcome().stats.stages if stage.name == own.name)
    assert outputs[1:] == outputs[:1] * 3
    assert accepted > 0


@needs_kernels
def test_requests_that_share_it_get_what_the_target_says_to_each(folder: Path) -> None:
    target = StagePlan.parse({"model": str(folder), "name": "target", "threads": 1})
    own = in_fewer_bits(target, "int4").replace(name="own", threads=1)
    with SharedEngine(Plan(chain=(own, target)), SharingOptions(max_active=4, max_batch=4)) as engine:
        wait_until(lambda: set(engine.worker_ids) == {"own", "target"})
        handle = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=30))  # alone it drafts as the plan says
        drafted = [token for block in handle for token in block.token_ids]
        stages = {stage.name: stage for stage in handle.outcome().stats.stages}
        handles = [engine.submit(prompt, SamplingParams(max_new_tokens=30)) for prompt in PROMPTS]
        together = [[token for block in handle for token in block.token_ids] for handle in handles]
        engine.apply(Plan(mode=Mode.PLAIN, chain=(target,)))
        handles = [engine.submit(prompt, SamplingParams(max_new_tokens=30)) for prompt in PROMPTS]
        plain = [[token for block in handle for token in block.token_ids] for handle in handles]
    assert together == plain
    assert drafted == plain[0]
    assert stages["own"].accepted > 0
