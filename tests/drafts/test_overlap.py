"""Benchmark prompts are never trained on."""

from __future__ import annotations

import pytest

from autopipe.bench.prompts import OWN_SETS, humaneval_problems, load_prompts
from autopipe.drafts.overlap import OverlapFilter
from autopipe.drafts.stdlib_prompts import code_prompts, summary_prompts

NINE = "one two three four five six seven eight nine"


def test_a_run_of_ten_words_overlaps() -> None:
    found = OverlapFilter([f"before {NINE} ten after"])

    assert found.overlaps(f"x {NINE} ten y")
    assert not found.overlaps(f"x {NINE} y")


def test_case_punctuation_and_layout_do_not_hide_a_copy() -> None:
    found = OverlapFilter([f"{NINE} ten"])

    assert found.overlaps("ONE_two, Three\n four-five 'six' (seven) eight; nine\tten")


def test_a_short_text_counts_as_a_whole() -> None:
    found = OverlapFilter(["sort the list"])

    assert found.overlaps("Please sort the list!")
    assert not found.overlaps("Please sort a list!")


def test_an_empty_text_protects_nothing() -> None:
    assert not OverlapFilter(["", "..."]).overlaps("anything at all")


@pytest.fixture(scope="module")
def benchmarks() -> OverlapFilter:
    return OverlapFilter.of_benchmarks()


def test_every_humaneval_problem_is_protected(benchmarks: OverlapFilter) -> None:
    assert all(benchmarks.overlaps("\n# " + problem["prompt"]) for problem in humaneval_problems())
    assert all(benchmarks.overlaps(p["prompt"] + p["canonical_solution"]) for p in humaneval_problems())


@pytest.mark.parametrize("name", OWN_SETS)
def test_every_prompt_of_the_own_bench_sets_is_protected(benchmarks: OverlapFilter, name: str) -> None:
    for prompt in load_prompts(name):
        assert benchmarks.overlaps(" ".join(message["content"] for message in prompt.messages or ()))


def test_no_prompt_of_the_standard_library_is_lost_to_common_phrases(benchmarks: OverlapFilter) -> None:
    prompts = [*code_prompts(), *summary_prompts()]

    assert len(prompts) > 3000
    assert sum(benchmarks.overlaps(prompt.content) for prompt in prompts) < 20
