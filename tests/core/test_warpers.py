"""The warpers keep exactly the tokens that transformers' warpers keep, with the same scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from autopipe.core import warpers
from autopipe.core.sampling import SamplingParams
from autopipe.core.warpers import reference_mask, warp


def transformers_scores(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = torch.from_numpy(row.copy())[None]
    steps: list[Any] = []
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(None, scores)
    return scores[0].numpy()


def dense(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    ids, kept = warp(row, params)
    if ids is None:
        return kept
    scores = np.full_like(row, -np.inf)
    scores[ids] = kept
    return scores


SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": 500, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_kept_tokens_and_scores_are_those_of_transformers(
    options: dict[str, Any], temperature: float, spread: float
) -> None:
    params = SamplingParams(temperature=temperature, **options)
    for seed in range(3):
        row = (np.random.default_rng(seed).normal(size=4096) * spread).astype(np.float32)
        assert np.array_equal(dense(row, params), transformers_scores(row, params))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    st.none() | st.integers(0, 12),
    st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_ties_fall_as_in_transformers(halves: list[int], top_k: int | None, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=0.5, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(halves, dtype=np.float32) / 2
    assert np.array_equal(dense(row, params), transformers_scores(row, params))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    st.none() | st.integers(0, 12),
    st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_the_reference_keeps_what_transformers_keeps(
    halves: list[int], top_k: int | None, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(halves, dtype=np.float32) / 2
    assert np.array_equal(reference_mask(row, params), transformers_scores(row, params) > -np.inf)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0])
def test_large_flat_rows_fall_as_in_transformers(spread: float) -> None:
    row = (np.random.default_rng(1).normal(size=49_152) * spread).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    assert np.array_equal(dense(row, params), transformers_scores(row, params))


@pytest.mark.parametrize("offset", [-2e-5, -1e-6, -1e-7, 0.0, 1e-7, 1e-6, 2e-5])
def test_a_boundary_within_rounding_falls_as_in_transformers(offset: float) -> None:
    row = (np.random.default_rng(3).normal(size=20_000) * 2).astype(np.float32)
    probs = np.sort(np.exp(row.astype(np.float64) - row.max()))[::-1]
    top_p = float((probs.cumsum() / probs.sum())[100] + offset)  # 101 tokens hold this much
    params = SamplingParams(temperature=1.0, top_p=top_p)
    assert np.array_equal(dense(row, params), transformers_scores(row, params))


def test_clear_boundaries_need_no_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warpers, "reference_mask", None)
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    ids, _ = warp(row, SamplingParams(temperature=1.0, top_p=0.7))
    assert ids is not None
    assert ids.tolist() == [0, 1]


def test_barred_tokens_stay_barred() -> None:
    row = np.array([1.0, -np.inf, 0.5, -np.inf], dtype=np.float32)
    ids, _ = warp(row, SamplingParams(temperature=1.0, top_p=0.999, min_p=0.001))
    assert ids is not None
    assert ids.tolist() == [0, 2]


def test_the_row_given_is_unchanged() -> None:
    row = np.arange(10, dtype=np.float32)
    warp(row, SamplingParams(temperature=0.5, top_k=3, top_p=0.5))
    assert row.tolist() == list(range(10))


def test_reference_keeps_everything_without_filters() -> None:
    assert reference_mask(np.zeros(5, dtype=np.float32), SamplingParams(temperature=1.0)).all()
