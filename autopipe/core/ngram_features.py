"""Feature classes of n-gram proposals, and the weights their calibration starts from.

Classes are numbered through all features of the sources, so that one `Calibration` serves all:

| source | feature | classes |
|---|---|---|
| own text | order of the match | 1, 2, 3, 4, 5, 6 and more |
| own text | the last successors, at most 4 | 1 to 4 agree and are all; 1 to 3 agree, the one before differs |
| own text | recent success | 6 equal steps |
| own text | the table's proposal | the same, another (no class where it has none) |
| table | order of the match | 1, 2, 3, 4, 5 and more |
| table | occurrences | 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 and more |
| table | share of the successor | 6 equal steps |
| table | the own text's proposal | the same, another |
| learned online | the four of the table | as for the table |
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.ngram_table import TableMatch

START_RECENT = 0.3
_RECENT_KEEP = 0.85

_ORDERS = 6
_AGREEING = 4
_STEPS = 6
_TABLE_ORDERS = 5
_TABLE_COUNTS = 6

_AGREEMENT = _ORDERS
_RECENT = _AGREEMENT + 2 * _AGREEING - 1
_SAME = _RECENT + _STEPS
TABLE = _SAME + 2
"""First class of the table's features."""
_COUNT = _TABLE_ORDERS
_SHARE = _COUNT + _TABLE_COUNTS
_TABLE_SAME = _SHARE + _STEPS
ONLINE = TABLE + _TABLE_SAME + 2
"""First class of the features of what was learned online."""

_OWN_PRIOR = (
    *(-0.75, 0.2, 0.45, 0.7, 0.75, 1.3),
    *(-0.1, 0.65, 1.5, 2.3, -1.75, -0.45, 0.45),
    *(-0.1, 0.0, 0.45, 0.5, 0.65, 1.1),
    *(1.0, -0.3),
)
_TABLE_PRIOR = (
    *(-0.9, -0.6, -0.4, 0.1, 0.2),
    *(-1.2, -1.2, -0.6, -0.25, 0.1, 0.4),
    *(-1.5, -1.05, -0.5, -0.05, 0.3, 1.4),
    *(3.2, -1.4),
)
PRIOR = (*_OWN_PRIOR, *_TABLE_PRIOR, *_TABLE_PRIOR)
"""Fitted (ridge) to greedy answers of the demo model to chat, summarising and standard-library prompts, with no table
and with tables from other answers and from source code; smoothed by hand. Benchmark prompts were not used. Tables made
by `autopipe drafts ngram` carry weights of their own."""


def update_recent(recent: float, right: bool) -> float:
    """Exponential average of success, 0 to 1, after one more token."""
    return _RECENT_KEEP * recent + (1 - _RECENT_KEEP) * right


def own_classes(order: int, successors: Sequence[int], recent: float, table_token: int | None) -> tuple[int, ...]:
    """Classes of the proposal `successors[-1]` from the text itself."""
    token = successors[-1]
    count = min(len(successors), _AGREEING)
    agreeing = 1
    while agreeing < count and successors[-1 - agreeing] == token:
        agreeing += 1
    classes = (
        min(order, _ORDERS) - 1,
        _AGREEMENT + agreeing - 1 + (0 if agreeing == count else _AGREEING),
        _RECENT + _step(recent),
    )
    return classes if table_token is None else (*classes, _SAME + (table_token != token))


def table_classes(match: TableMatch, own_token: int | None, first: int = TABLE) -> tuple[int, ...]:
    """Classes of a table's proposal; `first` is TABLE or ONLINE."""
    classes = (
        first + min(match.order, _TABLE_ORDERS) - 1,
        first + _COUNT + min(match.occurrences.bit_length(), _TABLE_COUNTS) - 1,
        first + _SHARE + _step(match.share / 255),
    )
    return classes if own_token is None else (*classes, first + _TABLE_SAME + (own_token != match.token_id))


def _step(share: float) -> int:
    return min(int(share * _STEPS), _STEPS - 1)
