"""The picture of an evaluation: goodput by policy and scenario, and regret as the episode goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopipe.plots.canvas import PALETTE, new_figure, save
from autopipe.policies.summary import Row

_YARDSTICKS = {"oracle": "#222222", "static": "#8a8a8a", "off": "#c9c9c9"}


def plot_evaluation(rows: Sequence[Row], path: Path) -> Path:
    """Left: goodput relative to the oracle with 95% intervals; right: mean regret over scenarios.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    policies = [name for name in dict.fromkeys(row.policy for row in rows) if name != "oracle"]
    figure, (bars, curves) = new_figure(2, width=13, height=4.6)
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        mine = {row.scenario: row for row in rows if row.policy == policy}
        known = [name for name in scenarios if name in mine]
        at = np.array([scenarios.index(name) for name in known]) + (index - (len(policies) - 1) / 2) * width
        means = np.array([mine[name].of_oracle.mean for name in known])
        low = means - np.array([mine[name].of_oracle.low for name in known])
        high = np.array([mine[name].of_oracle.high for name in known]) - means
        colour = _YARDSTICKS.get(policy, PALETTE[index % len(PALETTE)])
        bars.bar(at, means, width, yerr=[low, high], color=colour, label=policy, error_kw={"lw": 0.8})
        curve = np.mean([mine[name].regret_curve for name in known], axis=0)
        curves.plot(np.linspace(0, 100, len(curve)), curve, color=colour, label=policy)
    bars.axhline(1, color="#222222", lw=0.8, ls=":")
    bars.set_xticks(range(len(scenarios)), scenarios, rotation=25, ha="right", fontsize=8)
    bars.set_ylabel("goodput relative to the oracle")
    bars.legend(fontsize=7, ncols=2)
    curves.set_xlabel("% of the episode's tokens")
    curves.set_ylabel("regret, tokens of plain decoding")
    return save(figure, path)
