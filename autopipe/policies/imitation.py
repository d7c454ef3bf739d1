"""Imitation of the teacher (DAgger): the network acts, the teacher says at every step what it would have done."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.envs.config import EnvConfig
from autopipe.envs.menu import OFF, slots_of
from autopipe.policies.features import feature_size
from autopipe.policies.rl_env import TrainingEnv

_ROUNDS = 4
_EPOCHS = 5
_BATCH = 512
_LEARNING_RATE = 1e-3
_LEAST_STD = 0.05
_LESSONS = "lessons.npz"
_ARRAYS = ("features", "masks", "actions", "weights", "mean", "std")
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Lessons:
    """Decisions with the teacher's answers.

    Attributes:
        features: float32 [n, features]; masks: bool [n, sum(nvec)]; actions: int64 [n, len(nvec)].
        weights: which numbers of the action matter, float32 [n, len(nvec)].
        agreement: share of decisions in the last round on which network and teacher named the same chain.
    """

    features: Floats
    masks: NDArray[np.bool_]
    actions: NDArray[np.int64]
    weights: Floats
    mean: Floats
    std: Floats
    agreement: float = 0.0

    def __len__(self) -> int:
        return len(self.features)

    @classmethod
    def none(cls, config: EnvConfig) -> Lessons:
        """Nothing learned: features are centred on the middle of their range."""
        size = feature_size(config)
        empty = np.zeros((0, 0))
        return cls(
            np.zeros((0, size), dtype=np.float32),
            empty.astype(np.bool_),
            empty.astype(np.int64),
            empty.astype(np.float32),
            np.full(size, 0.5, dtype=np.float32),
            np.full(size, 0.5, dtype=np.float32),
        )


def imitate(
    model: Any, envs: Sequence[TrainingEnv], num_steps: int, seed: int, say: Callable[[str], None], folder: Path
) -> Lessons:
    """Teach the network of `model` in rounds; in the first the teacher acts, later the network does.

    Args:
        num_steps: decisions in all, over all environments and rounds.
        folder: where the decisions of each round are kept, so that a run that was killed goes on with the next round.
    """
    lessons, first_round = _kept(folder), 0
    per_round = max(1, num_steps // _ROUNDS // len(envs)) * len(envs)
    rows: dict[str, list[Any]] = {"features": [], "masks": [], "actions": [], "weights": []}
    rng = np.random.default_rng([seed, 11])
    if lessons is not None:
        first_round = min(_ROUNDS - 1, len(lessons) // per_round)
        rows = {name: list(getattr(lessons, name)) for name in rows}
        mean, std = lessons.mean, lessons.std
        model.policy.features_extractor.set_statistics(mean, std)
        _fit(model, lessons, rng)
        say(f"{len(lessons)} decisions are there already")
    vectors = [env.reset(seed=seed * 1000 + 100 * first_round + index)[0] for index, env in enumerate(envs)]
    for number in range(first_round, _ROUNDS):
        share_taught = 1.0 if number == 0 else 0.25
        agreed = total = 0
        for _ in range(per_round // len(envs)):
            masks = np.array([env.action_masks() for env in envs])
            taught = np.array([env.teach() for env in envs])
            chosen = _predict(model, np.array(vectors), masks)
            agreed, total = agreed + int((chosen[:, 0] == taught[:, 0]).sum()), total + len(envs)
            rows["features"] += vectors
            rows["masks"] += list(masks)
            rows["actions"] += list(taught)
            rows["weights"] += [_weights(action) for action in taught]
            by_teacher = rng.random(len(envs)) < share_taught
            for index, env in enumerate(envs):
                action = taught[index] if by_teacher[index] else chosen[index]
                if rng.random() < 0.03:  # now and then something else, so that it is seen what comes after a mistake
                    action = env.action_space.sample()
                vectors[index], _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    vectors[index], _ = env.reset()
        features = np.array(rows["features"], dtype=np.float32)
        lessons = Lessons(
            features,
            np.array(rows["masks"]),
            np.array(rows["actions"], dtype=np.int64),
            np.array(rows["weights"], dtype=np.float32),
            features.mean(axis=0),
            np.maximum(features.std(axis=0), _LEAST_STD),
            agreed / total,
        )
        if number == 0:
            model.policy.features_extractor.set_statistics(lessons.mean, lessons.std)
            mean, std = lessons.mean, lessons.std
        lessons.mean, lessons.std = mean, std
        _keep(folder, lessons)
        loss = _fit(model, lessons, rng)
        progress = f"imitation {number + 1}/{_ROUNDS}: {len(lessons)} decisions"
        say(f"{progress}, loss {loss:.3f}, agreed {lessons.agreement:.1%}")
    if lessons is None:
        raise RuntimeError("no rounds")
    return lessons


def _keep(folder: Path, lessons: Lessons) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(lessons, name) for name in _ARRAYS}
    np.savez_compressed(folder / "lessons.new.npz", **arrays)
    os.replace(folder / "lessons.new.npz", folder / _LESSONS)


def _kept(folder: Path) -> Lessons | None:
    if not (folder / _LESSONS).exists():
        return None
    with np.load(folder / _LESSONS, allow_pickle=False) as arrays:
        return Lessons(**{name: arrays[name] for name in _ARRAYS})


def _weights(action: NDArray[np.int64]) -> Floats:
    """Settings of drafters that are not in the chain do not matter."""
    weights = np.ones(len(action), dtype=np.float32)
    slots = len(action) - 5
    used = slots_of(int(action[0]))
    weights[1 : 1 + slots] = [float(slot in used) for slot in range(slots)]
    if action[0] == OFF:
        weights[1:] = 0.0
    return weights


def _predict(model: Any, features: Floats, masks: NDArray[np.bool_]) -> NDArray[np.int64]:
    options = {"action_masks": masks} if _takes_masks(model) else {}
    chosen: NDArray[np.int64] = model.predict(features, deterministic=True, **options)[0]
    return chosen


def _takes_masks(model: Any) -> bool:
    return type(model).__name__ == "MaskablePPO"


def _fit(model: Any, lessons: Lessons, rng: np.random.Generator) -> float:
    """Minimise the cross-entropy of the teacher's actions."""
    import torch

    policy = model.policy
    policy.set_training_mode(True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=_LEARNING_RATE)
    losses: list[float] = []
    for _ in range(_EPOCHS):
        order = rng.permutation(len(lessons))
        losses.clear()
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            observed = torch.from_numpy(lessons.features[rows])
            actions, weights = torch.from_numpy(lessons.actions[rows]), torch.from_numpy(lessons.weights[rows])
            options = {"action_masks": lessons.masks[rows]} if _takes_masks(model) else {}
            parts = policy.get_distribution(observed, **options)
            parts = getattr(parts, "distributions", None) or parts.distribution
            log_probs = torch.stack([part.log_prob(actions[:, index]) for index, part in enumerate(parts)], dim=1)
            loss = -(log_probs * weights).sum(dim=1).mean()  # [batch, len(nvec)] -> scalar
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            losses.append(float(loss.detach()))
    policy.set_training_mode(False)
    return float(np.mean(losses))
