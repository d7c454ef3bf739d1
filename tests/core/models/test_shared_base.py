"""Which layers a target is to share with its drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopipe.core.models.shared_base import is_layer_matrix, layers_of_drafters
from autopipe.core.plan import StagePlan
from tests.drafts.distilling import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": str(tiny_target(folder / "target")),
        "chat": str(tiny_drafter(folder / "chat", layers=(0, 1, 3))),
        "code": str(tiny_drafter(folder / "code", layers=(0, 1, 2))),
    }


def stage(model: str, **settings: Any) -> StagePlan:
    return StagePlan.parse({"model": model, **settings})


def test_all_layers_of_all_adapters(folders: dict[str, str]) -> None:
    target, chat, code = stage(folders["target"]), folders["chat"], folders["code"]
    assert layers_of_drafters([stage(target.model, adapter=chat)], target) == (0, 1, 3)
    both = [stage(target.model, adapter=chat, adapters=[chat, code])]
    assert layers_of_drafters(both, target) == (0, 1, 2, 3)
    assert layers_of_drafters([stage(target.model, adapter=chat), stage(target.model, adapter=code)], target) == (
        0,
        1,
        2,
        3,
    )


def test_a_model_by_another_spelling_is_the_same(folders: dict[str, str]) -> None:
    spelled = str(Path(folders["target"]) / ".." / "target")
    assert layers_of_drafters([stage(spelled, adapter=folders["chat"])], stage(folders["target"])) == (0, 1, 3)


def test_none_of_other_models_in_other_numbers_or_without_a_drafter(folders: dict[str, str]) -> None:
    target, chat = folders["target"], folders["chat"]
    for other in (
        stage("ngram"),
        stage(target),
        stage("somewhere/else", adapter=chat),
        stage(target, adapter="nowhere"),
        stage(target, adapter=chat, dtype="fp32"),
    ):
        assert layers_of_drafters([other], stage(target, dtype="bf16")) == ()


def test_a_target_with_an_adapter_of_its_own_has_other_weights(folders: dict[str, str]) -> None:
    drafter = stage(folders["target"], adapter=folders["chat"])
    assert layers_of_drafters([drafter], stage(folders["target"], adapter="some/lora")) == ()


def test_a_drafter_that_cannot_be_read_is_for_its_own_stage_to_report(folders: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "drafter.json").write_text("{")
    assert layers_of_drafters([stage(folders["target"], adapter=str(broken))], stage(folders["target"])) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj", True),
        ("layers.0.self_attn.q_proj", True),
        ("lm_head", False),
        ("model.layers.3.input_layernorm", False),
        ("model.layers.3.mlp.q_proj", False),
        ("model.embed_tokens", False),
    ],
)
def test_matrices_of_layers_by_name(name: str, expected: bool) -> None:
    assert is_layer_matrix(name) == expected
