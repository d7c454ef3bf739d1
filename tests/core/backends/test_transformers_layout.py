"""Where forwards of the transformers backend are cut."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from autopipe.core.backends.transformers_layout import KEY_BLOCK, Grid, long_from

FACTORS = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("position", "count", "most", "block", "sizes"),
    [
        (0, 20, 64, 1 << 20, [20]),
        (0, 150, 64, 1 << 20, [64, 64, 22]),
        (5, 20, 8, 1 << 20, [8, 8, 4]),
        (125, 10, 8, 128, [3, 7]),
        (290, 20, 64, 1 << 20, [10, 10]),
        (299, 1, 64, 1 << 20, [1]),
        (300, 8, 8, 128, [8]),
    ],
)
def test_no_part_is_too_long_or_crosses_a_block_or_the_border(
    position: int, count: int, most: int, block: int, sizes: list[int]
) -> None:
    assert Grid(rows=8, max_length=1000, long_from=300).sizes(position, count, most, block) == sizes


def test_rows_of_one_block_are_offered_the_same_keys_and_more_than_they_see() -> None:
    grid = Grid(rows=8, max_length=1000, long_from=None)
    assert {grid.num_keys(position) for position in range(KEY_BLOCK)} == {grid.num_keys(0)}
    assert grid.num_keys(KEY_BLOCK - 1) >= KEY_BLOCK + 1
    assert grid.num_keys(KEY_BLOCK) == grid.num_keys(0) + KEY_BLOCK


@pytest.mark.parametrize(
    ("options", "position"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, None),
        ({"rope_parameters": {**FACTORS, "rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
    ],
)
def test_longrope_changes_at_the_length_the_model_was_first_trained_for(
    options: dict[str, Any], position: int | None
) -> None:
    config = LlamaConfig(head_dim=8, max_position_embeddings=512, **options)
    assert long_from(config) == position
