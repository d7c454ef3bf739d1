"""Samplers by name, with seeds that no two workers and no two calls share."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

_POPULATION = 24
_STARTUP_TRIALS = 24


class SamplerName(StrEnum):
    TPE = "tpe"
    GP = "gp"
    NSGA2 = "nsga2"
    RANDOM = "random"


def derive_seed(seed: int, first_trial: int) -> int:
    """Seed of a worker's sampler.

    Args:
        seed: the user's.
        first_trial: number of the first trial that the worker has claimed. The storage gives each number once, so
            this tells workers apart, and a call from the call that it resumes.
    """
    digest = hashlib.sha256(f"{seed}:{first_trial}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def make_sampler(name: SamplerName, seed: int) -> BaseSampler:
    """A sampler that heeds the constraints of trials (`random` does not: it learns nothing)."""
    from optuna import samplers

    if name is SamplerName.TPE:
        return samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS)
    if name is SamplerName.GP:
        return samplers.GPSampler(seed=seed, deterministic_objective=True, n_startup_trials=_STARTUP_TRIALS)
    if name is SamplerName.NSGA2:
        return samplers.NSGAIISampler(seed=seed, population_size=_POPULATION)
    return samplers.RandomSampler(seed=seed)
