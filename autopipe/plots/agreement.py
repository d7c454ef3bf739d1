"""Agreement of drafters with the target's output, by kind of prompt and by position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopipe.plots.canvas import PALETTE, new_figure, save
from autopipe.profile.model import Profile

_BIN = 16
NGRAM = "ngram"


def agreement_bits(profile: Profile) -> dict[str, list[NDArray[np.bool_]]]:
    """By drafter, for each prompt, whether its pick (an n-gram's first draft) is right, bool [positions]."""
    bits = {
        each.drafter: [np.array([bit == "1" for bit in text], dtype=np.bool_) for text in each.agrees]
        for each in profile.agreement
    }
    bits[NGRAM] = [np.array(offer.right, dtype=np.int64) > 0 for offer in profile.ngram.prompts]
    return bits


def plot_agreement(profile: Profile, path: str | Path) -> Path:
    """Left: agreement by drafter and kind of prompt. Right: by position in the output, in bins of 16 tokens.

    Raises:
        ConfigError: the file cannot be written in the format of its ending.
    """
    figure, (by_kind, by_position) = new_figure(2, width=10)
    bits = agreement_bits(profile)
    kinds = profile.kinds
    width = 0.8 / len(bits)
    for place, (drafter, texts) in enumerate(bits.items()):
        color = PALETTE[place % len(PALETTE)]
        rates = [
            float(
                np.concatenate(
                    [text for text, prompt in zip(texts, profile.prompts, strict=True) if prompt.kind == kind]
                ).mean()
            )
            for kind in kinds
        ]
        at = np.arange(len(kinds)) + (place - (len(bits) - 1) / 2) * width
        bars = by_kind.bar(at, rates, width, label=drafter, color=color)
        by_kind.bar_label(bars, fmt="%.2f", fontsize=7)
        starts, shares = _binned(texts)
        by_position.plot(starts, shares, marker=".", color=color, label=drafter)
    by_kind.set_xticks(range(len(kinds)), kinds)
    by_position.set_xlabel("position in the output, tokens")
    for axes in (by_kind, by_position):
        axes.set_ylim(0, 1.05)
        axes.set_ylabel("agreement with the target")
        axes.grid(axis="y", alpha=0.3)
    by_kind.legend(fontsize=8)
    figure.suptitle("Where drafters pick the target's token")
    return save(figure, path)


def _binned(texts: list[NDArray[np.bool_]]) -> tuple[list[int], list[float]]:
    """Start of each bin of positions, and the share of agreement in it over all prompts."""
    starts, shares = [], []
    for start in range(0, max(len(text) for text in texts), _BIN):
        values = np.concatenate([text[start : start + _BIN] for text in texts])
        starts.append(start)
        shares.append(float(values.mean()))
    return starts, shares
