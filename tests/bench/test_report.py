from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopipe.bench.report import FirstDifference, Row, Sample, first_difference, make_rows


def sample(prompt: int, ms_per_token: float, ids: tuple[int, ...] = (1, 2), length: float | None = None) -> Sample:
    return Sample(prompt, ids, ms_per_token * len(ids) / 1000, length)


def row(name: str, rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.name == name)


def test_the_figure_is_the_median_over_prompts_of_the_median_over_repeats() -> None:
    arm = [sample(0, 10), sample(0, 12), sample(0, 90), sample(1, 20), sample(2, 30)]
    (found,) = make_rows({"plain": arm})

    assert found.ms_per_token == pytest.approx(20)
    assert (found.ms_per_token_min, found.ms_per_token_max) == (pytest.approx(12), pytest.approx(30))


def test_speedups_divide_the_reference_by_the_arm() -> None:
    rows = make_rows({"plain": [sample(0, 10)], "lockstep": [sample(0, 5)], "transformers": [sample(0, 40)]})

    assert row("lockstep", rows).speedup_over_plain == pytest.approx(2)
    assert row("lockstep", rows).speedup_over_transformers == pytest.approx(8)
    assert row("transformers", rows).speedup_over_plain == pytest.approx(0.25)


def test_tokens_per_second_are_of_all_prompts_together() -> None:
    arm = [sample(0, 10, (1,) * 9), sample(0, 10, (1,) * 9), sample(0, 90, (1,) * 9), sample(1, 30, (1,))]

    assert make_rows({"plain": arm})[0].tokens_per_s == pytest.approx(10 / 0.12)


def test_the_speedup_weighs_tokens_and_the_median_prompts() -> None:
    plain = [sample(0, 10, (1,) * 98), sample(1, 10, (1,)), sample(2, 10, (1,))]
    arm = [sample(0, 2, (1,) * 98), sample(1, 10, (1,)), sample(2, 8, (1,))]
    found = row("lockstep", make_rows({"plain": plain, "lockstep": arm}))

    assert found.speedup_over_plain == pytest.approx(1000 / (196 + 18))
    assert found.median_speedup == pytest.approx(10 / 8)


def test_without_a_reference_there_is_nothing_to_compare_with() -> None:
    (found,) = make_rows({"lockstep": [sample(0, 5)]})

    assert found.speedup_over_plain is None
    assert found.median_speedup is None
    assert found.identical is None


def test_acceptance_length_is_tokens_over_forwards() -> None:
    arm = [sample(0, 5, (1,) * 10, 5.0), sample(1, 5, (1,) * 10, 1.0)]  # 2 + 10 forwards for 20 tokens

    assert make_rows({"lockstep": arm})[0].acceptance_length == pytest.approx(20 / 12)


def test_tokens_count_one_pass_over_the_prompts() -> None:
    assert make_rows({"plain": [sample(0, 5), sample(0, 5), sample(1, 5)]})[0].tokens == 4


def test_an_output_counts_as_identical_only_if_every_repeat_is() -> None:
    plain = [sample(0, 5, (1, 2)), sample(1, 5, (3, 4))]
    arm = [sample(0, 5, (1, 2)), sample(0, 5, (1, 9)), sample(1, 5, (3, 4))]
    found = row("lockstep", make_rows({"plain": plain, "lockstep": arm}))

    assert found.identical == 1
    assert found.first_difference == FirstDifference(prompt=0, position=1, gap=None)


def test_the_gap_is_asked_for_after_the_common_prefix() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def gap_at(prompt: int, prefix: Sequence[int]) -> float:
        asked.append((prompt, tuple(prefix)))
        return 0.25

    rows = make_rows({"plain": [sample(0, 5, (1, 2, 3))], "peer": [sample(0, 5, (1, 2, 7))]}, gap_at=gap_at)

    assert asked == [(0, (1, 2))]
    assert row("peer", rows).first_difference == FirstDifference(0, 2, 0.25)


def test_arms_that_draw_their_own_noise_are_not_compared() -> None:
    samples = {"plain": [sample(0, 5, (1,))], "peer": [sample(0, 5, (2,))]}

    assert row("peer", make_rows(samples, comparable=lambda name: name != "peer")).identical is None


def test_an_arm_without_samples_has_no_figures() -> None:
    assert make_rows({"llama.cpp": []}) == [Row("llama.cpp")]


@pytest.mark.parametrize(
    ("output", "position"), [((1, 2, 3), None), ((1, 9, 3), 1), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_first_difference(output: tuple[int, ...], position: int | None) -> None:
    assert first_difference(output, (1, 2, 3)) == position
