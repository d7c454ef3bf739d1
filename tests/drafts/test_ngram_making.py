"""A table from recorded answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core.errors import ConfigError
from autopipe.core.gating import StepCosts
from autopipe.core.ngram import CALIBRATION_KEY, NgramDrafter, prior_of
from autopipe.core.ngram_features import PRIOR
from autopipe.core.ngram_shipped import TOKENIZER_KEY
from autopipe.core.ngram_table import NgramTable
from autopipe.core.plan import NgramOptions
from autopipe.drafts.expected_speed import expected_speed
from autopipe.drafts.ngram_making import make_table, speeds
from autopipe.drafts.store import AnswerStore, read_answers
from autopipe.profile.model import NgramOffer, PromptRecord
from tests.drafts.fakes import HEADER, LETTERS, generator, prompts


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    generator(folder, prompts(120), max_new_tokens=30, shard_tokens=2000).run(100_000)
    return folder


def test_the_table_knows_the_targets_habits(answers: Path, tmp_path: Path) -> None:
    make_table(answers, tmp_path / "t.safetensors", max_order=3, min_count=1)
    table = NgramTable.load(tmp_path / "t.safetensors")

    for letter, following in zip(LETTERS, [*LETTERS[1:], LETTERS[0]], strict=True):
        assert table.match([letter]).token_id == following


def test_it_carries_its_tokenizer_and_its_calibration(answers: Path, tmp_path: Path) -> None:
    make_table(answers, tmp_path / "t.safetensors", max_order=3, min_count=1)
    table = NgramTable.load(tmp_path / "t.safetensors")

    assert table.metadata[TOKENIZER_KEY] == HEADER["tokenizer"]
    assert len(json.loads(table.metadata[CALIBRATION_KEY])) == len(PRIOR)
    assert list(prior_of(table)) != list(PRIOR)


def test_held_out_answers_teach_nothing(answers: Path, tmp_path: Path) -> None:
    trials = make_table(answers, tmp_path / "t.safetensors", max_order=2, min_count=1)
    train = [answer for answer in read_answers(answers, split="train")]
    wanted = sum(min(3, answer.prompt_length) + answer.num_answer_tokens for answer in train)
    context = 3 * len(train)

    assert int(NgramTable.load(tmp_path / "t.safetensors").metadata["answer_tokens"]) == wanted - context
    assert trials[0].speed["all"].num_tokens > 0


def test_the_trial_that_was_fastest_is_written(answers: Path, tmp_path: Path) -> None:
    written, *trials = make_table(answers, tmp_path / "t.safetensors")

    assert len(trials) == 8
    assert (written.max_order, written.min_count) == (trials[0].max_order, trials[0].min_count)
    assert trials[0].speed["all"].speedup == max(trial.speed["all"].speedup for trial in trials)
    assert json.dumps(written.to_dict())


def test_a_table_makes_known_text_faster(answers: Path, tmp_path: Path) -> None:
    make_table(answers, tmp_path / "t.safetensors", max_order=3, min_count=1)
    record = PromptRecord(
        name="x", kind="code", prompt_ids=(1, 2), output_ids=tuple(LETTERS), finish_reason="length", decode_s=0.0
    )
    with_table, without = (
        speeds(table, [record], StepCosts())["all"] for table in (NgramTable.load(tmp_path / "t.safetensors"), None)
    )

    assert with_table.speedup > 1.5 * without.speedup


def test_a_table_of_the_budget_is_no_larger(answers: Path, tmp_path: Path) -> None:
    make_table(answers, tmp_path / "t.safetensors", max_order=4, min_count=1, max_bytes=280)

    assert len(NgramTable.load(tmp_path / "t.safetensors")) == 280 // 8


@pytest.mark.parametrize(("key", "options"), [("--max-order", {"max_order": 9}), ("--min-count", {"min_count": 0})])
def test_options_out_of_range_are_named(answers: Path, tmp_path: Path, key: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_table(answers, tmp_path / "t.safetensors", **options)
    assert caught.value.key == key


def test_answers_without_a_held_out_part_are_refused(tmp_path: Path) -> None:
    AnswerStore(tmp_path, HEADER)
    with pytest.raises(ConfigError, match="held-out"):
        make_table(tmp_path, tmp_path / "t.safetensors")


@pytest.mark.parametrize("damage", ["[1, 2]", "nonsense", json.dumps([None] * len(PRIOR))])
def test_a_damaged_calibration_is_an_error(damage: str) -> None:
    table = NgramTable.build([[1, 2]] * 3, metadata={CALIBRATION_KEY: damage})

    with pytest.raises(Exception, match="calibration"):
        NgramDrafter(NgramOptions(), table)


# -- expected speed -----------------------------------------------------------------------------------------

FLAT = StepCosts({n: 0.01 for n in range(1, 33)})


def offer(length: int, right: int, positions: int = 12) -> NgramOffer:
    return NgramOffer(
        length=(0, *[length] * (positions - 1)),
        right=(0, *[right] * (positions - 1)),
        confidence=((), *[(0.9,) * length] * (positions - 1)),
    )


def test_right_drafts_shorten_the_text() -> None:
    found = expected_speed([offer(4, 4, positions=11)], FLAT)

    assert (found.num_tokens, found.num_steps) == (10, 2)
    assert found.speedup == pytest.approx(5.0)


def test_wrong_drafts_cost_their_rows() -> None:
    growing = StepCosts({1: 0.01, 2: 0.015, 5: 0.03})
    found = expected_speed([offer(1, 0)], growing)

    assert found.acceptance_length == 1.0
    assert found.speedup < 0.8


def test_no_text_is_no_faster() -> None:
    assert expected_speed([], FLAT).speedup == 1.0
