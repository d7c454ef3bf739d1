from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.cli.options import NGRAM_WINDOW, PlanOptions, build_plan, build_sampling, option_of
from autopipe.core.errors import ConfigError
from autopipe.core.plan import BackendName, Dtype, Mode, Plan, Verification, WarmupKind
from autopipe.plans import DEFAULT_PLAN_PATH


def test_without_options_the_shipped_plan_is_used() -> None:
    assert build_plan(PlanOptions()) == Plan.load(DEFAULT_PLAN_PATH)


def test_a_target_alone_gets_an_ngram_drafter(tiny_folder: Path) -> None:
    plan = build_plan(PlanOptions(target=str(tiny_folder)))

    assert [stage.model for stage in plan.chain] == ["ngram", str(tiny_folder)]
    assert plan.chain[0].window == NGRAM_WINDOW


def test_drafters_come_in_the_order_given(tiny_folder: Path) -> None:
    plan = build_plan(PlanOptions(drafters=("ngram", str(tiny_folder)), windows=(6, 3)))

    assert [stage.model for stage in plan.chain] == ["ngram", str(tiny_folder), "smollm2-135m"]
    assert [stage.window for stage in plan.drafters] == [6, 3]


def test_the_target_itself_drafts_with_fewer_bits(tiny_folder: Path) -> None:
    plan = build_plan(PlanOptions(target=str(tiny_folder), drafters=("ngram", "int4"), backend="transformers"))

    assert [stage.model for stage in plan.chain] == ["ngram", str(tiny_folder), str(tiny_folder)]
    assert [(stage.dtype, stage.backend) for stage in plan.chain[1:]] == [
        (Dtype.INT4, BackendName.AUTO),
        (Dtype.AUTO, BackendName.TRANSFORMERS),
    ]


def test_a_dtype_is_not_for_the_target_as_its_own_drafter() -> None:
    plan = build_plan(PlanOptions(drafters=("int8",), dtype="fp32"))

    assert [stage.dtype for stage in plan.chain] == [Dtype.INT8, Dtype.FP32]


def test_drafter_none_leaves_the_target_alone() -> None:
    assert len(build_plan(PlanOptions(drafters=("none",))).chain) == 1


def test_one_window_is_for_all_drafters(tiny_folder: Path) -> None:
    plan = build_plan(PlanOptions(drafters=("ngram", str(tiny_folder)), windows=(5,)))

    assert [stage.window for stage in plan.drafters] == [5, 5]


def test_stage_options_reach_neural_stages_only() -> None:
    plan = build_plan(PlanOptions(dtype="fp32", threads=1))

    assert (plan.target.dtype, plan.target.threads) == (Dtype.FP32, 1)
    assert (plan.chain[0].dtype, plan.chain[0].threads) == (Dtype.AUTO, None)


def test_pipeline_options_are_laid_over_the_plan() -> None:
    plan = build_plan(PlanOptions(mode="plain", verification="rejection", exact=False, warmup="progressive"))

    assert (plan.mode, plan.verification, plan.exact) == (Mode.PLAIN, Verification.REJECTION, False)
    assert plan.warmup.kind is WarmupKind.PROGRESSIVE


def test_options_override_a_plan_file_and_keep_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("mode: plain\nexact: false\nchain:\n  - {model: ngram, window: 2}\n  - {model: smollm2-135m}\n")

    plan = build_plan(PlanOptions(plan=file, mode="lockstep"))

    assert (plan.mode, plan.exact, plan.chain[0].window) == (Mode.LOCKSTEP, False, 2)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"mode": "fast"}, "--mode"),
        ({"windows": (0,)}, "--window"),
        ({"windows": (1, 2, 3)}, "--window"),
        ({"dtype": "int3"}, "--dtype"),
        ({"backend": "magic"}, "--backend"),
        ({"threads": 0}, "--threads"),
        ({"min_drafts": -1}, "--min-drafts"),
        ({"verify_cap": 0}, "--verify-cap"),
        ({"verification": "trust"}, "--verification"),
        ({"warmup": "hot"}, "--warmup"),
        ({"drafters": ("ngram", "none")}, "--drafter"),
        ({"drafters": ("a/a", "b/b", "c/c", "d/d", "e/e")}, "--drafter"),
        ({"drafters": ("",)}, "--drafter"),
        ({"drafters": ("int4",), "dtype": "int4"}, "--drafter"),
        ({"drafters": ("int8",), "dtype": "int4"}, "--drafter"),
        ({"drafters": ("int4",), "target": "missing.gguf"}, "--target"),
        ({"drafters": ("none",), "windows": (3,)}, "--window"),
        ({"drafters": ("none",), "min_drafts": 1}, "--min-drafts"),
        ({"drafters": ("none",), "verify_cap": 4}, "--verify-cap"),
        ({"mode": "async", "windows": (2,), "min_drafts": 3}, "--min-drafts"),
        ({"target": "missing.gguf"}, "--target"),
        ({"plan": Path("missing.yaml")}, "--plan"),
    ],
)
def test_a_bad_pipeline_option_is_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_plan(PlanOptions(**options))

    assert caught.value.key == key


def test_a_bad_key_of_a_plan_file_keeps_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("chain:\n  - {model: smollm2-135m, windw: 3}\n")

    with pytest.raises(ConfigError, match=r"chain\.0\.windw"):
        build_plan(PlanOptions(plan=file))


PLAN_FILE = Path("plan.yaml")


@pytest.mark.parametrize(
    ("options", "key", "option"),
    [
        ({"device": "foo"}, "chain.0.device", "--device"),
        ({"device": "foo"}, "chain.1.device", "--device"),
        ({}, "chain.1.device", None),
        ({"adapter": "a"}, "chain.1.adapter", "--adapter"),
        ({"adapter": "a"}, "chain.0.adapter", None),
        ({"windows": (2,)}, "chain.0.window", "--window"),
        ({"target": "a"}, "chain.1.model", "--target"),
        ({"drafters": ("int4",), "dtype": "bf16"}, "chain.0.dtype", "--drafter"),
        ({"drafters": ("int4",)}, "chain.0.model", "--drafter"),
        ({"drafters": ("int4",), "target": "a"}, "chain.0.model", "--target"),
        ({"drafters": ("int4",), "adapter": "a"}, "chain.0.adapter", "--adapter"),
        ({"drafters": ("a",)}, "chain.0.model", "--drafter"),
        ({"plan": PLAN_FILE}, "chain.0.model", None),
        ({"plan": PLAN_FILE, "target": "a"}, "chain.0.model", None),
        ({"plan": PLAN_FILE, "target": "a"}, "chain.1.model", "--target"),
        ({"device": "foo"}, "emulated.seed", None),
    ],
)
def test_a_plan_key_is_traced_to_the_option_that_set_it(options: dict[str, Any], key: str, option: str | None) -> None:
    assert option_of(key, PlanOptions(**options), 2) == option


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"num_logprobs": 99}, "--logprobs"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"stop": ("",)}, "--stop"),
        ({"stop": ("\udcff",)}, "--stop"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "--min-new-tokens"),
    ],
)
def test_a_bad_sampling_option_is_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_sampling(**options)

    assert caught.value.key == key


def test_sampling_options_that_were_not_given_stay_unset() -> None:
    assert build_sampling(temperature=0.5, top_k=None, stop=()).model_dump(exclude_unset=True) == {"temperature": 0.5}
