"""Which token each stage picks at each position, as codes: 0 is the target's token."""

from __future__ import annotations

import numpy as np

from autopipe.envs.simulator.kernel import Codes
from autopipe.envs.simulator.model import SimChain


def draw_picks(chain: SimChain, num_positions: int, rng: np.random.Generator, first: int = 0) -> Codes:
    """Picks of every stage at positions `first` .. `first + num_positions - 1` of the agreement tables, int8
    [K, n].

    A stage without a table agrees where the position's uniform number is below its `agreement`. Two
    neighbours that both pick wrongly pick the same with chance `wrong_equal`. As many random numbers are
    drawn whatever the stages are, so two chains under one seed meet the same text.
    """
    uniform, coin = rng.random(num_positions), rng.random(num_positions)
    picks: Codes = np.zeros((len(chain.stages), num_positions), dtype=np.int8)
    for index in range(len(chain.stages) - 2, -1, -1):
        stage = chain.stages[index]
        if stage.table is None:
            wrong = uniform >= stage.agreement
        else:
            wrong = ~stage.table[np.arange(first, first + num_positions) % len(stage.table)].astype(bool)
        after = picks[index + 1]
        same = (after > 0) & (coin < chain.wrong_equal)
        picks[index] = np.where(wrong, np.where(same, after, index + 1), 0)
    return picks
