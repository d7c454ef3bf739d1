"""The n-gram drafter: proposes what followed the end of the text before, in it or in a learned table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopipe.core.errors import ConfigError, ModelLoadError
from autopipe.core.ngram_calibration import Calibration
from autopipe.core.ngram_features import ONLINE, PRIOR, START_RECENT, TABLE, own_classes, table_classes, update_recent
from autopipe.core.ngram_index import SuffixIndex
from autopipe.core.ngram_online import MAX_ORDER as ONLINE_ORDER
from autopipe.core.ngram_online import OnlineNgrams
from autopipe.core.ngram_table import NgramTable, context_keys
from autopipe.core.plan import NgramOptions

CALIBRATION_KEY = "calibration"
"""Metadata of a table: JSON list of the weights fitted for it on held-out answers."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    Attributes:
        token_ids: the drafts, in order.
        confidence: for each, the estimated chance that it is accepted given that all before it were.
    """

    token_ids: list[int]
    confidence: list[float]


class _Proposal(NamedTuple):
    token: int
    classes: tuple[int, ...]


class NgramDrafter:
    """Drafts for one sequence at a time, in microseconds, without a model.

    For each position there are up to three proposals: the latest successor of the longest suffix of the text
    (max_order to min_order tokens) that occurred before, the learned table's, and that of what was learned online
    from earlier requests. The most confident one is drafted, appended, and the longer text looked up again, so a
    draft may hop between occurrences and sources.

    Learning is free and complete: every token that `sync` appends scores the proposals for its position, drafted
    or not, so confidence stays calibrated while a gate holds all drafts back. What is learned (`calibration`)
    survives `reset`, and so does what is learned `online`; the index does not. Not thread-safe.

    Args:
        options: orders, the file of the learned table, whether to learn online.
        table: a learned table, instead of the one named in `options`.
        calibration: to start from, and to keep learning; none: the table's own, else the shipped prior.
        online: what was learned online so far, instead of nothing; used if the options say so.
        learns: add to that.

    Raises:
        ConfigError: the table in `options` cannot be read.
        ModelLoadError: it is not an n-gram table, or it is damaged.
    """

    def __init__(
        self,
        options: NgramOptions,
        table: NgramTable | None = None,
        calibration: Calibration | None = None,
        online: OnlineNgrams | None = None,
        *,
        learns: bool = True,
    ) -> None:
        if table is None and options.table is not None:
            table = NgramTable.load(options.table)
        self.calibration = calibration or Calibration(prior_of(table))
        if online is None and options.online:
            online = OnlineNgrams(options.online_entries)
        self.online = online if options.online else None
        self._table, self._learns = table, learns
        self._index = SuffixIndex(options.min_order, options.max_order)
        self._key_order = max(table.max_order if table else 0, ONLINE_ORDER if options.online else 0)
        self._tail_length = max(options.max_order, self._key_order)
        self._recent: list[float] = []
        self._num_learned = 0  # tokens, prompt included, that were taken in online
        self._prompted = False

    @property
    def max_token_id(self) -> int:
        """Largest token id the table may propose (-1 without one): must be below the target's vocabulary size."""
        return -1 if self._table is None else self._table.max_token_id

    def reset(self) -> None:
        """Forget the sequence; keep the calibration, and what is learned online."""
        self._learn_online(len(self._index))
        self._index.clear()
        self._recent.clear()
        self._prompted = False

    def sync(self, tokens: Sequence[int], unchanged: int) -> None:
        """The sequence is now `tokens`, whose first `unchanged` are as at the last call.

        The first call after `reset` brings the prompt: it fills the index but teaches nothing, since nobody asks
        for drafts of a prompt.

        Raises:
            ConfigError: `unchanged` beyond the end of the last or of this sequence.
        """
        known = min(len(self._index), len(tokens))
        if not 0 <= unchanged <= known:
            raise ConfigError("unchanged", unchanged, f"0 to {known}")
        self._learn_online(unchanged)
        while len(self._index) > unchanged:
            self._index.pop()
        del self._recent[unchanged:]
        text = self._index.tail(self._tail_length)
        recent = self._recent[-1] if self._recent else START_RECENT
        for position in range(unchanged, len(tokens)):
            token = tokens[position]
            recent = update_recent(recent, self._score(text, recent, token))
            self._index.push(token)
            self._recent.append(recent)
            text.append(token)
        if not self._prompted:
            self._prompted, self._num_learned = True, len(tokens)

    def draft(self, limit: int) -> Draft:
        """Up to `limit` tokens that may follow; fewer, or none, where nothing matches."""
        token_ids: list[int] = []
        confidences: list[float] = []
        text = self._index.tail(self._tail_length)
        recent = self._recent[-1] if self._recent else START_RECENT
        for _ in range(limit):
            best: _Proposal | None = None
            best_confidence = 0.0
            for proposal in self._propose(text, recent):
                confidence = self.calibration.confidence(proposal.classes)
                if confidence > best_confidence:
                    best, best_confidence = proposal, confidence
            if best is None:
                break
            token_ids.append(best.token)
            confidences.append(best_confidence)
            text.append(best.token)
            recent = update_recent(recent, True)
        return Draft(token_ids, confidences)

    def _learn_online(self, end: int) -> None:
        """Take in the text up to `end`, prompt apart: tokens that a sync leaves unchanged were accepted."""
        if self.online is not None and self._learns and self._prompted and end > self._num_learned:
            start = max(0, self._num_learned - ONLINE_ORDER)
            tokens = self._index.tail(len(self._index) - start)
            self.online.learn(tokens, self._num_learned - start, end - start)
            self._num_learned = end

    def _score(self, text: list[int], recent: float, token: int) -> bool:
        """Learn how the proposals after `text` did, `token` having followed; whether the best was right."""
        right = False
        best_confidence = 0.0
        for proposal in self._propose(text, recent):
            hit = proposal.token == token
            confidence = self.calibration.confidence(proposal.classes)
            if confidence > best_confidence:
                right, best_confidence = hit, confidence
            if self._prompted:
                self.calibration.learn(proposal.classes, hit)
        return right

    def _propose(self, text: list[int], recent: float) -> list[_Proposal]:
        """At most one proposal from the text, the table and what was learned online, each."""
        own = self._index.match(text)
        own_token = None if own is None else own.successors[-1]
        keys = context_keys(text, self._key_order) if self._key_order else ()
        table = self._table.match_keys(keys) if self._table is not None else None
        online = self.online.match_keys(keys) if self.online is not None else None
        proposals = []
        if own is not None:
            other = table or online
            classes = own_classes(own.order, own.successors, recent, other and other.token_id)
            proposals.append(_Proposal(own.successors[-1], classes))
        if table is not None:
            proposals.append(_Proposal(table.token_id, table_classes(table, own_token, TABLE)))
        if online is not None:
            proposals.append(_Proposal(online.token_id, table_classes(online, own_token, ONLINE)))
        return proposals


def prior_of(table: NgramTable | None) -> Sequence[float]:
    """The weights a calibration starts from: the table's own where it carries them.

    Raises:
        ModelLoadError: the table's weights are not of this version of AutoPipe.
    """
    text = None if table is None else table.metadata.get(CALIBRATION_KEY)
    if text is None:
        return PRIOR
    try:
        weights = [float(weight) for weight in json.loads(text)]
    except (ValueError, TypeError):
        weights = []
    if len(weights) != len(PRIOR) or not all(map(math.isfinite, weights)):
        raise ModelLoadError("the n-gram table's calibration is damaged; make it again with `autopipe drafts ngram`")
    return weights
