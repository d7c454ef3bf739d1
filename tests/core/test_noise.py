"""Counter-based noise: a pure function, the same bits from numpy and C++, and distributed as it should be."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.core import noise
from autopipe.core.kernels import library
from autopipe.core.noise import Purpose, gumbel, gumbel_argmax, gumbel_reference, row_key, uniform

IDS = np.arange(49_152)
needs_kernels = pytest.mark.skipif(library() is None, reason="the native library is not built")


def cdf(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-values.astype(np.float64)))


def uniformity(values: np.ndarray, cells: int = 64) -> float:
    """Chi-square of values in [0, 1] over equal cells, in standard deviations."""
    counts = np.histogram(values, bins=cells, range=(0, 1))[0]
    statistic = ((counts - len(values) / cells) ** 2).sum() / (len(values) / cells)
    return (statistic - (cells - 1)) / np.sqrt(2 * (cells - 1))


@needs_kernels
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (2**63 - 1, 10**6)])
def test_kernel_and_numpy_give_the_same_bits(seed: int, position: int) -> None:
    some = np.random.default_rng(0).permutation(IDS)[:10_001]
    for ids in (IDS, some, IDS[::-1]):
        assert np.array_equal(gumbel(seed, position, ids), gumbel_reference(seed, position, ids))


@needs_kernels
def test_the_kernels_are_in_use_where_they_are_built() -> None:
    assert noise._kernels() is not None


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1023, 1024, 1025, 49_152])
def test_argmax_is_that_of_scores_plus_noise(size: int) -> None:
    scores = np.random.default_rng(size).normal(size=size).astype(np.float32) * 3
    for position in range(20):
        expected = int(np.argmax(scores + gumbel(5, position, IDS[:size])))
        assert gumbel_argmax(scores, 5, position) == expected


def test_argmax_ignores_barred_tokens() -> None:
    scores = np.full(5000, -np.inf, dtype=np.float32)
    scores[[17, 4000]] = 0
    assert {gumbel_argmax(scores, 1, position) for position in range(40)} == {17, 4000}


def test_argmax_serves_from_numpy_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).normal(size=2000).astype(np.float32)
    with_kernel = [gumbel_argmax(scores, 3, position) for position in range(20)]
    monkeypatch.setattr(noise, "_kernels", lambda: None)
    assert [gumbel_argmax(scores, 3, position) for position in range(20)] == with_kernel


def test_noise_of_some_ids_is_that_of_all_ids() -> None:
    some = np.array([3, 40_000, 17, 17])
    assert np.array_equal(gumbel(9, 4, some), gumbel(9, 4, IDS)[some])


def test_noise_is_within_rounding_of_the_exact_double_logarithm() -> None:
    key = np.uint64(row_key(8, 8))
    bits = noise._mix_array(IDS.astype(np.uint64) * np.uint64(noise._GAMMA) + key)
    v = (bits >> np.uint64(17)).astype(np.float64) * 2.0**-47 + 2.0**-48
    exact = -np.log(-np.log1p(-v))
    upper = v < 0.99  # beyond, float32 cannot hold v better than to 6e-8, and the noise is below -1.5
    assert np.allclose(gumbel(8, 8, IDS)[upper], exact[upper], rtol=0, atol=3e-6)
    assert np.allclose(gumbel(8, 8, IDS), exact, rtol=0, atol=2e-3)


def test_extreme_bits_give_finite_noise() -> None:
    values = noise._gumbel_from_bits(np.array([0, 2**64 - 1, 1 << 40, 1 << 17], dtype=np.uint64))
    assert np.isfinite(values).all()
    assert values[0] == pytest.approx(48 * np.log(2), abs=1e-4)


def test_noise_is_gumbel_distributed() -> None:
    values = np.concatenate([gumbel(1, position, IDS) for position in range(20)])
    assert abs(uniformity(cdf(values))) < 4
    assert values.mean() == pytest.approx(0.57722, abs=0.004)


def test_the_tail_beyond_one_in_a_million_is_right() -> None:
    values = np.concatenate([gumbel(2, position, IDS) for position in range(100)])
    limit = 12.0  # P(Gumbel > 12) = 6.1e-6
    expected = len(values) * -np.expm1(-np.exp(-limit))
    assert abs(np.count_nonzero(values > limit) - expected) < 5 * np.sqrt(expected)
    assert len(np.unique(values[values > limit])) == np.count_nonzero(values > limit)  # not quantised


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (gumbel(1, 5, IDS), gumbel(1, 6, IDS)),
        (gumbel(1, 5, IDS), gumbel(2, 5, IDS)),
        (gumbel(1, 5, IDS[:-1]), gumbel(1, 5, IDS[1:])),
        (gumbel(1, 5, IDS[:-1]), gumbel(1, 6, IDS[1:])),
        (gumbel(0, 1, IDS), gumbel(1, 0, IDS)),
    ],
    ids=["position", "seed", "token", "diagonal", "seed-position-swapped"],
)
def test_noise_of_neighbours_is_independent(left: np.ndarray, right: np.ndarray) -> None:
    a, b = cdf(left) - 0.5, cdf(right) - 0.5
    assert abs((a * b).mean() * 12 * np.sqrt(len(a))) < 4
    joint = np.histogram2d(a, b, bins=16, range=[[-0.5, 0.5]] * 2)[0]
    statistic = ((joint - len(a) / 256) ** 2).sum() / (len(a) / 256)
    assert abs(statistic - 255) < 5 * np.sqrt(2 * 255)


def test_one_token_over_positions_and_over_seeds_is_uniform() -> None:
    one = np.array([123])
    assert abs(uniformity(cdf(np.concatenate([gumbel(1, p, one) for p in range(4000)])))) < 4
    assert abs(uniformity(cdf(np.concatenate([gumbel(s, 1, one) for s in range(4000)])))) < 4


@pytest.mark.parametrize("varied", ["seed", "stage", "position", "purpose"])
def test_uniforms_differ_by_every_key(varied: str) -> None:
    keys = {"seed": 1, "stage": 1, "position": 1, "purpose": Purpose.RECOVER}
    assert uniform(**keys) != uniform(**{**keys, varied: Purpose.DRAW if varied == "purpose" else 2})


def test_uniforms_are_uniform_and_independent_between_purposes() -> None:
    values = np.array([[uniform(1, 0, position, purpose) for purpose in Purpose] for position in range(10_000)])
    assert values.min() >= 0
    assert values.max() < 1
    for purpose in Purpose:
        assert abs(uniformity(values[:, purpose])) < 4
    assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.04
