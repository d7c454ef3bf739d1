"""The learning curve of a training run, from the tables that its logger wrote."""

from __future__ import annotations

import csv
from pathlib import Path

from autopipe.core.errors import ConfigError
from autopipe.plots.canvas import PALETTE, new_figure, save

_KEYS = ("rollout/ep_rew_mean", "eval/mean_reward", "eval/relative_goodput")


def read_progress(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(timesteps, value) of the rewards of a run, in order, by the logger's key.

    Raises:
        ConfigError: no table in the folder.
    """
    files = sorted(folder.glob("progress-*.csv"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    if not files:
        raise ConfigError("RUN", str(folder), "a folder of `autopipe policy train`")
    found: dict[str, dict[int, float]] = {key: {} for key in _KEYS}
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                steps = row.get("time/total_timesteps") or ""
                for key in _KEYS:
                    value = row.get(key) or ""
                    if steps and value:
                        found[key][int(float(steps))] = float(value)
    return {key: sorted(values.items()) for key, values in found.items()}


def plot_learning_curve(folder: Path, path: Path) -> Path:
    """Reward in training and in evaluation, by timesteps.

    Raises:
        ConfigError: no table in the folder, or the picture cannot be written.
    """
    curves = read_progress(folder)
    figure, (rewards, goodput) = new_figure(2, width=10)
    for index, key in enumerate(_KEYS):
        axes = goodput if key == "eval/relative_goodput" else rewards
        if curves[key]:
            steps, values = zip(*curves[key], strict=True)
            axes.plot(steps, values, color=PALETTE[index], label=key, marker="." if len(steps) < 50 else "")
            axes.legend(fontsize=8)
    rewards.set_xlabel("timesteps")
    rewards.set_ylabel("reward of an episode")
    goodput.set_xlabel("timesteps")
    goodput.set_ylabel("x plain decoding")
    return save(figure, path)
