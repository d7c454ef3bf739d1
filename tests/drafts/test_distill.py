"""A training learns, survives being killed, and leaves a drafter that PEFT can load."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.models import load_config, load_state, resolve
from autopipe.core.models.shared_base import read_drafter_info, read_head_ids, truncated_base
from autopipe.drafts.distill import Distiller
from autopipe.drafts.distill_beginning import Beginning
from autopipe.drafts.distill_optimizer import schedule
from autopipe.drafts.distill_options import DistillOptions
from tests.drafts.distilling import KINDS, tiny_answers, tiny_drafter, tiny_target

OPTIONS = DistillOptions(
    layers=(0, 1, 3), rank=8, head=200, tokens=4000, batch_tokens=256, evaluate_every=500, learning_rate=0.02
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_answers(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def trained(target: str, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training")
    Distiller(target, answers, out, OPTIONS).run()
    return out


def _rows(out: Path) -> list[dict[str, str]]:
    with (out / "curve.csv").open() as file:
        return list(csv.DictReader(file))


def test_loss_falls_over_the_training(trained: Path) -> None:
    losses = [float(row["loss"]) for row in _rows(trained)[1:]]
    assert losses[-1] < losses[0] - 0.1


def test_the_curve_has_a_column_for_every_kind_of_prompt_and_a_picture(trained: Path) -> None:
    first = _rows(trained)[0]
    assert {f"agreement_{kind}" for kind in (*KINDS, "all")} <= first.keys()
    assert (trained / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_peft_loads_the_drafter_on_the_truncated_base_and_computes_the_same(
    trained: Path, target: str, answers: Path
) -> None:
    from peft import PeftModel

    folder, source = trained / "drafter", resolve(target)
    info = read_drafter_info(folder)
    base = truncated_base(load_config(source), load_state(source), info.layers, read_head_ids(folder, info))
    loaded = PeftModel.from_pretrained(base, folder)
    student = Distiller(target, answers, trained, OPTIONS).student
    with torch.no_grad():
        for _, parameter in student.named_parameters():
            parameter.copy_(parameter.to(torch.bfloat16))  # as it is stored
    ids = torch.arange(40, 60)
    weights = student.step_weights()
    expected = weights.hidden(ids, [20], torch.arange(20)) @ weights.head.t()
    logits = loaded(ids[None]).logits[0]
    assert logits.shape == (20, 200)
    assert torch.allclose(logits, expected, atol=1e-3)


def test_a_training_killed_between_steps_ends_as_one_that_was_not(
    trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    class Killed(Exception):
        pass

    steps = kills = 0

    def kill(progress: object) -> None:
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            raise Killed

    while True:
        try:
            Distiller(target, answers, tmp_path, OPTIONS).run(kill)
            break
        except Killed:
            kills += 1
    assert kills > 2
    theirs, ours = (load_file(out / "drafter" / "adapter_model.safetensors") for out in (trained, tmp_path))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    timeless = [{k: v for k, v in row.items() if "second" not in k and "_s" not in k} for row in _rows(tmp_path)]
    assert timeless == [{k: v for k, v in row.items() if "second" not in k and "_s" not in k} for row in _rows(trained)]


def test_a_half_written_checkpoint_is_never_read(trained: Path, target: str, answers: Path) -> None:
    writing = trained / "checkpoints" / ".writing"
    writing.mkdir()
    (writing / "state.json").write_text("{")
    assert Distiller(target, answers, trained, OPTIONS).progress.trained_tokens >= OPTIONS.tokens


def test_going_on_with_other_options_is_refused(trained: Path, target: str, answers: Path) -> None:
    with pytest.raises(ConfigError, match="rank"):
        Distiller(target, answers, trained, OPTIONS.replace(rank=4))


def test_tokens_and_learning_rates_may_change_when_a_training_goes_on(
    trained: Path, target: str, answers: Path
) -> None:
    longer = Distiller(target, answers, trained, OPTIONS.replace(tokens=9000, learning_rate=1e-3))
    assert 0 < longer.progress.trained_tokens < 9000


def test_a_training_may_begin_with_a_drafter_trained_before(
    trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    drafter = trained / "drafter"
    options = Beginning.read(str(drafter)).adopt(DistillOptions(begin_from=str(drafter), tokens=1000, batch_tokens=256))
    Distiller(target, answers, tmp_path, options).run()
    begun, ended = _rows(tmp_path)[0], _rows(trained)[-1]
    assert float(begun["agreement_all"]) == pytest.approx(float(ended["agreement_all"]), abs=0.02)  # stored as bf16
    assert torch.equal(
        *(read_head_ids(out / "drafter", read_drafter_info(out / "drafter")) for out in (trained, tmp_path))
    )
    notes = json.loads((tmp_path / "drafter" / "drafter.json").read_text())["training"]
    assert notes["before"]["result"]["trained_tokens"] >= OPTIONS.tokens


def test_a_training_goes_on_without_the_drafter_it_began_with(
    trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    drafter, out = tmp_path / "drafter", tmp_path / "out"
    shutil.copytree(trained / "drafter", drafter)
    options = Beginning.read(str(drafter)).adopt(DistillOptions(begin_from=str(drafter), tokens=500, batch_tokens=256))
    Distiller(target, answers, out, options).run()
    shutil.rmtree(drafter)
    Distiller(target, answers, out, options.replace(tokens=1000)).run()
    notes = json.loads((out / "drafter" / "drafter.json").read_text())["training"]
    assert notes["before"]["result"]["trained_tokens"] >= OPTIONS.tokens


def test_a_training_begun_before_an_option_was_known_goes_on(
    trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    for file in (out / "checkpoints").glob("step-*/state.json"):
        state = json.loads(file.read_text())
        del state["options"]["begin_from"], state["before"]
        file.write_text(json.dumps(state))
    assert Distiller(target, answers, out, OPTIONS).progress.trained_tokens >= OPTIONS.tokens


@pytest.mark.parametrize("option", [{"rank": 4}, {"layers": (0, 1, 2)}, {"head": 100}, {"train_head": False}])
def test_a_drafter_of_another_shape_is_no_beginning(
    option: dict[str, object], trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    drafter = str(trained / "drafter")
    options = Beginning.read(drafter).adopt(DistillOptions(begin_from=drafter)).replace(**option)
    with pytest.raises(ConfigError, match=f"--{next(iter(option)).replace('_', '-')}: "):
        Distiller(target, answers, tmp_path, options)


def test_a_shipped_drafter_is_recorded_by_its_name_and_another_by_its_folder(tmp_path: Path) -> None:
    assert Beginning.read("smollm2-135m").adopt(DistillOptions()).begin_from == "smollm2-135m"
    own = tiny_drafter(tmp_path / "own")
    assert Beginning.read(str(own)).adopt(DistillOptions()).begin_from == str(own.resolve())


def test_a_drafter_of_another_target_is_no_beginning(trained: Path, target: str, answers: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(trained / "drafter", drafter)
    info = json.loads((drafter / "drafter.json").read_text())
    (drafter / "drafter.json").write_text(json.dumps({**info, "base_fingerprint": "0" * 16}))
    options = Beginning.read(str(drafter)).adopt(DistillOptions(begin_from=str(drafter)))
    with pytest.raises(ModelLoadError, match=r"--from: .* other weights"):
        Distiller(target, answers, tmp_path / "out", options)


def test_a_drafter_that_lacks_a_tensor_is_no_beginning(
    trained: Path, target: str, answers: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(trained / "drafter", drafter)
    tensors = load_file(drafter / "adapter_model.safetensors")
    del tensors[next(name for name in tensors if "layernorm" in name)]
    save_file(tensors, drafter / "adapter_model.safetensors")
    options = Beginning.read(str(drafter)).adopt(DistillOptions(begin_from=str(drafter)))
    with pytest.raises(ModelLoadError, match="layernorm"):
        Distiller(target, answers, tmp_path / "out", options)


def test_answers_of_another_tokenizer_are_refused(target: str, answers: Path, tmp_path: Path) -> None:
    header = json.loads((answers / "answers.json").read_text())
    (tmp_path / "answers.json").write_text(json.dumps({**header, "tokenizer": "0" * 16}))
    with pytest.raises(ConfigError, match="--answers"):
        Distiller(target, tmp_path, tmp_path / "out", OPTIONS)


@pytest.mark.parametrize("layers", [(0, 4), (1, 1), (-1,)])
def test_layers_the_target_lacks_are_refused(
    layers: tuple[int, ...], target: str, answers: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        Distiller(target, answers, tmp_path, OPTIONS.replace(layers=layers))


def test_learning_rate_rises_stays_and_falls() -> None:
    factors = [schedule(tokens, 1000, 0.2, step) for step, tokens in enumerate(range(0, 1000, 10))]
    assert factors[0] < 0.1
    assert factors[20] == factors[70] == 1.0
    assert factors[90] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.1
