"""Answers of the target to training prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.drafts.made_prompts import MadePrompt, never
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.store import read_answers, read_meta, shards
from tests.drafts.fakes import LETTERS, FakeBatch, generator, prompts
from tests.tiny import EOS_ID, tiny_tokenizer


def text_of(answer) -> str:
    return tiny_tokenizer().decode(answer.token_ids[answer.prompt_length :], skip_special_tokens=True)


def greedy(folder: Path) -> list:
    return [answer for answer in read_answers(folder) if answer.meta["sampling"] == "greedy"]


def test_greedy_answers_are_what_the_target_says(tmp_path: Path) -> None:
    generator(tmp_path, prompts(6)).run(10_000)

    assert {text_of(answer) for answer in greedy(tmp_path)} == {"bcdefghijabc"}
    assert len(greedy(tmp_path)) == 6


def test_an_answer_ends_with_the_end_token(tmp_path: Path) -> None:
    generator(tmp_path, prompts(3, ending="x.")).run(10_000)

    for answer in greedy(tmp_path):
        assert answer.token_ids[-1] == EOS_ID
        assert answer.num_answer_tokens == 1
        assert answer.meta["finish_reason"] == "stop"


def test_the_first_of_the_stored_tokens_is_the_greedy_one_with_its_log_probability(tmp_path: Path) -> None:
    generator(tmp_path, prompts(3)).run(10_000)

    row = FakeBatch()._row(LETTERS[0]).log_softmax(0)
    for answer in greedy(tmp_path):
        assert answer.top_ids[:, 0].tolist() == answer.token_ids[answer.prompt_length :].tolist()
        assert float(answer.top_logprobs[0, 0]) == pytest.approx(float(row.max()), abs=0.01)
        assert np.all(np.diff(answer.top_logprobs.astype(np.float32), axis=1) <= 0)


def test_some_prompts_are_also_answered_by_sampling(tmp_path: Path) -> None:
    generator(tmp_path, prompts(40)).run(100_000)

    kinds = [meta["sampling"] for meta in read_meta(tmp_path)]
    assert kinds.count("greedy") == 40
    assert 2 <= kinds.count("sampled") <= 25


def test_sampled_answers_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("one", "other"):
        generator(tmp_path / name, prompts(30), batch=FakeBatch(4 if name == "one" else 7)).run(100_000)

    one, other = (
        {answer.meta["key"]: answer.token_ids.tolist() for answer in read_answers(tmp_path / name)}
        for name in ("one", "other")
    )
    assert one == other


def test_a_prompt_is_answered_once_however_it_is_laid_out(tmp_path: Path) -> None:
    source = iter([*prompts(2), *(TrainingPrompt("x/1", "code", "test", "g", text="Prompt  number 0, A"),)])
    made = generator(tmp_path, source)
    made.run(10_000)

    assert made.progress.duplicates == 1
    assert len(greedy(tmp_path)) == 2


def test_prompts_that_share_words_with_a_protected_text_are_dropped(tmp_path: Path) -> None:
    made = generator(tmp_path, prompts(3), protected=["prompt number 1 a"])
    made.run(10_000)

    assert made.progress.overlaps == 1
    assert len(greedy(tmp_path)) == 2


def test_answers_that_share_words_with_a_protected_text_are_dropped(tmp_path: Path) -> None:
    made = generator(tmp_path, prompts(3), protected=["a bcdefghijabc"])
    made.run(10_000)

    assert made.progress.num_answers == 0
    assert made.progress.overlaps >= 3


def test_prompts_that_are_too_long_are_dropped(tmp_path: Path) -> None:
    long = TrainingPrompt("x/0", "code", "test", "g", text="ab" * 300)
    made = generator(tmp_path, iter([long, *prompts(1)]))
    made.run(10_000)

    assert made.progress.too_long == 1
    assert len(greedy(tmp_path)) == 1


def test_a_made_prompt_is_sampled_in_steps_and_then_answered(tmp_path: Path) -> None:
    def first(text: str, ended: bool) -> MadePrompt:
        return MadePrompt("code/self/0", "code", "say a" + text, 3, never, second)

    def second(text: str, ended: bool) -> TrainingPrompt:
        return TrainingPrompt("code/self/0", "code", "self", "g", text="then " + text)

    made = generator(tmp_path, iter([MadePrompt("code/self/0", "code", "say a", 3, never, first)]))
    made.run(10_000)

    assert made.progress.made == 1
    assert [answer.meta["source"] for answer in greedy(tmp_path)] == ["self"]


def test_a_made_prompt_of_no_use_is_counted(tmp_path: Path) -> None:
    made = generator(tmp_path, iter([MadePrompt("code/self/0", "code", "a", 3, never, lambda text, ended: None)]))
    made.run(10_000)

    assert (made.progress.useless, made.progress.num_answers) == (1, 0)


def test_a_prompt_made_from_a_text_under_way_is_not_read_twice(tmp_path: Path) -> None:
    def finish(text: str, ended: bool) -> TrainingPrompt:
        return TrainingPrompt("code/self/0", "code", "self", "g", text="a long beginning a" + text)

    batch = FakeBatch(1)
    start = MadePrompt("code/self/0", "code", "a long beginning a", 3, never, finish)
    generator(tmp_path, iter([start]), batch=batch).run(10_000)

    assert max(batch.calls[1:]) == 1


def test_the_run_stops_at_the_number_of_tokens(tmp_path: Path) -> None:
    made = generator(tmp_path, prompts(1000))
    made.run(100)

    assert 100 <= made.progress.num_tokens < 100 + 4 * 12
    assert sum(meta["num_tokens"] for meta in read_meta(tmp_path)) == made.progress.num_tokens


def test_a_crash_loses_only_the_shard_that_was_being_filled(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def report(progress) -> None:
        if progress.num_tokens > 130:
            raise Killed

    made = generator(tmp_path, prompts(1000))
    made._store.flush = lambda: None  # what a SIGKILL leaves out
    original = type(made._store).flush
    made._store.flush = lambda: original(made._store) if made._store._pending_tokens >= 50 else None
    with pytest.raises(Killed):
        made.run(10_000, report)

    assert len(shards(tmp_path)) == 2
    assert sum(meta["num_tokens"] for meta in read_meta(tmp_path)) >= 100
