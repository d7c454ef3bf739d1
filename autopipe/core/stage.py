"""The one loop that every stage runs, whatever its role: listen, choose, compute, publish.

A stage holds a *sequence*: the prompt and what it believes follows. Its consumer (the next stage in the chain)
is always right: where the two differ the stage rolls back and adopts the consumer's tokens. Its producer
(the stage before, or an n-gram drafter in this process) is a source of drafts to verify. The first stage has no
producer, so it verifies nothing and appends one token a step; the target has no consumer, so what it appends
is final. Nothing else distinguishes drafting, refining and verifying.

Who may run when is a matter of credit: a consumer publishes the length up to which its producer may draft.
In `async` mode that is always its own length plus the window; in `lockstep` it grants credit only while it
waits itself, so one stage computes at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopipe.core.backends.base import StageBackend
from autopipe.core.board import PUBLISHED_BYTES, Board, Slot
from autopipe.core.chain import StageConfig
from autopipe.core.channel import Doorbell
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.gating import best_length
from autopipe.core.logprobs import TokenLogprobs
from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import Mode, NgramOptions, Verification, WhenShort
from autopipe.core.stage_meter import StageMeter, Step
from autopipe.core.stage_request import RequestFailedError, StageRequest
from autopipe.core.stats import StageStats
from autopipe.core.verify import SparseRow

if TYPE_CHECKING:
    import torch

    from autopipe.core.backends.transformers_moves import Moved


MAX_CATCH_UP_ROWS = 8
"""A stage that has fallen further behind than this catches up first, without verifying drafts."""
_LONG_CATCH_UP = 64
"""Up to this many tokens it does so by `forward`, whose rounding is that of the target's own steps."""

EmitTokens = Callable[[StageRequest, list[int], "list[TokenLogprobs] | None"], None]


class Stage:
    """One stage of a chain: a backend, its slot on the board, and the loop's four steps.

    Args:
        emit: called by a stage without consumer with each block of final tokens.
        ngram: drafter in front of this stage, used when the config says so.
    """

    def __init__(
        self,
        backend: StageBackend,
        board: Board,
        slot: int,
        bells: Sequence[Doorbell],
        emit: EmitTokens,
        make_ngram: Callable[[NgramOptions], NgramDrafter],
    ) -> None:
        self.backend = backend
        self.meter = StageMeter()
        self.config = StageConfig(active=False)
        self.request: StageRequest | None = None
        self._board = board
        self._slot = board.slot(slot)
        self._bells = bells
        self._emit = emit
        self._make_ngram = make_ngram
        self._producer: Slot | None = None
        self._consumer: Slot | None = None
        self._ngram: NgramDrafter | None = None
        self._ngram_options: NgramOptions | None = None

    def configure(self, config: StageConfig) -> None:
        """Take a new place in the chain. What neighbours know of each other is found out anew."""
        if config.ngram is not None and config.ngram != self._ngram_options:
            self._ngram, self._ngram_options = self._make_ngram(config.ngram), config.ngram
            if self.request is not None:
                self.request.ngram_unchanged = 0
        self.config = config
        self._producer = None if config.producer is None else self._board.slot(config.producer)
        self._consumer = None if config.consumer is None else self._board.slot(config.consumer)
        self._slot.credit = 0
        if self.request is not None:
            self.request.producer_committed = self.request.prompt_length

    def begin(self, request: StageRequest, *, trace: bool) -> None:
        """Start on a request; nothing of the last one is left."""
        self.backend.reset()
        if self._ngram is not None:
            self._ngram.reset()
        self.request = request
        self.meter.begin(self.backend.name, trace)
        self._slot.credit = 0
        self._slot.wake_at = 0
        self._slot.forget_rows()
        now = time.monotonic_ns()
        request.started_ns = request.idle_since_ns = request.ready_ns = now
        self._publish(request)

    def end(self) -> StageStats:
        """Leave the request, wherever it stands."""
        request, stats = self.request, self.meter.stats
        self.request = None
        self._slot.credit = 0
        if request is not None:
            elapsed_s = (time.monotonic_ns() - request.started_ns) / 1e9
            stats.waiting_s = max(0.0, elapsed_s - stats.busy_s - stats.overhead_s)
        return stats

    def count_moved(self, moved: Moved) -> None:
        """Layers have moved to other devices."""
        self.meter.stats.kv_moved_bytes += moved.kv_bytes
        self.meter.stats.kv_resend_bytes += moved.kv_resend_bytes

    def save_ngrams(self, path: str) -> int:
        """Write what the n-gram drafter in front of this stage learned online; how many contexts that is.

        Raises:
            ConfigError: it does not learn online, or the file cannot be written.
        """
        online = None if self._ngram is None else self._ngram.online
        if online is None:
            raise ConfigError("ngram.online", False, "true, in the plan in force, for there to be something to save")
        online.save(path)
        return len(online)

    @property
    def outgrown(self) -> bool:
        """Whether the text has become too long for this stage."""
        return self.request is not None and len(self.request.tokens) > self.backend.max_length

    def advance(self) -> bool:
        """One turn of the loop; False when there is nothing to do until somebody rings."""
        request = self.request
        if request is None or not self.config.active:
            return False
        self._listen(request)
        drafts = self._choose(request)
        if drafts is not None:
            self._compute(request, drafts)
        if request.changed_from < len(request.tokens) or self._stopped(request) != request.published_stopped:
            self._publish(request)
        return drafts is not None

    # -- listen ---------------------------------------------------------------------------------------------

    def _listen(self, request: StageRequest) -> None:
        """Adopt the consumer's sequence where it differs from ours or is longer."""
        if self._consumer is None:
            return
        heard = self._consumer.read(request.id, request.committed)
        if heard is None:
            return
        ours, theirs = request.tokens, heard.tokens
        position = request.committed
        shared = min(len(ours), heard.length)
        while position < shared and ours[position] == theirs[position - heard.start]:
            position += 1
        if position < shared:
            self.meter.count_rollback(time.monotonic_ns(), len(ours) - position)
        if position < heard.length:
            self._replace(request, position, theirs[position - heard.start :])
        request.ready_ns = max(request.ready_ns, heard.published_ns)
        request.committed = max(request.committed, heard.committed)

    def _replace(self, request: StageRequest, position: int, tokens: Sequence[int]) -> None:
        """Make the sequence `tokens` from `position` on."""
        request.tokens[position:] = tokens
        if self.backend.length > position:
            self.backend.rollback(position)
        request.changed_from = min(request.changed_from, position)
        request.ngram_unchanged = min(request.ngram_unchanged, position)

    # -- choose ---------------------------------------------------------------------------------------------

    def _choose(self, request: StageRequest) -> list[int] | None:
        """The drafts to verify now (perhaps none), or None to wait."""
        length = len(request.tokens)
        if self._stopped(request) or (self._consumer is not None and length >= self._consumer.credit):
            if self.config.mode is Mode.LOCKSTEP:
                self._slot.credit = 0  # whoever feeds us rests as well
            return None
        if self.backend.length < request.prompt_length:
            return []
        room = min(self.config.verify_cap, request.end - length - 1, self.backend.max_length - length)
        if self._consumer is not None:
            room = min(room, self._consumer.credit - length - 1)
        generated = length - request.prompt_length
        budget = request.end - request.prompt_length
        window = self.config.warmup.window(self.config.window, generated, budget)
        if self._ngram is not None and self.config.ngram is not None:
            return self._draft_locally(request, min(window, room))
        if self._producer is None:
            return []
        lockstep = self.config.mode is Mode.LOCKSTEP
        wanted = max(0, min(window if lockstep else self.config.min_drafts, window, room))
        drafts, stopped = self._pending(request)
        if len(drafts) < wanted and not lockstep and self.config.when_short is WhenShort.STEP:
            return []
        if len(drafts) < wanted and not stopped:
            self._ask(length + (wanted if lockstep else window), length + wanted)
            drafts, stopped = self._pending(request)  # what came before the producer knew when to wake us
        if len(drafts) >= wanted or stopped:
            return drafts[: max(room, 0)]
        return None

    def _stopped(self, request: StageRequest) -> bool:
        """Whether this stage can add nothing to its sequence as it is."""
        length = len(request.tokens)
        return (
            length >= request.end
            or length > self.backend.max_length
            or (length > request.prompt_length and request.tokens[-1] in request.eos_token_ids)
        )

    def _draft_locally(self, request: StageRequest, limit: int) -> list[int]:
        assert self._ngram is not None
        self._ngram.sync(request.tokens, request.ngram_unchanged)
        request.ngram_unchanged = len(request.tokens)
        if limit <= 0:
            return []
        draft = self._ngram.draft(limit)
        if self._ngram_options is None or not self._ngram_options.gate:
            return draft.token_ids
        return draft.token_ids[: best_length(draft.confidence, self.meter.costs)]

    def _pending(self, request: StageRequest) -> tuple[list[int], bool]:
        """The producer's drafts that follow our sequence, and whether it can give no more."""
        assert self._producer is not None
        heard = self._producer.read(request.id, request.producer_committed)
        if heard is None:
            return [], False
        known = request.tokens[heard.start :]
        shared = min(len(known), len(heard.tokens))
        if heard.tokens[:shared] != known[:shared]:
            return [], False  # it will roll back once it has read our sequence
        request.producer_committed = max(request.producer_committed, heard.committed)
        request.ready_ns = max(request.ready_ns, heard.published_ns)
        return heard.tokens[len(known) :], heard.stopped

    def _ask(self, credit: int, wake_at: int) -> None:
        """Let the producer draft up to length `credit`; be woken at `wake_at`."""
        assert self.config.producer is not None
        self._slot.wake_at = wake_at
        if self._slot.credit != credit:
            self._slot.credit = credit
            self._bells[self.config.producer].ring()

    # -- compute --------------------------------------------------------------------------------------------

    def _compute(self, request: StageRequest, drafts: list[int]) -> None:
        """One forward over what the cache lacks and the drafts; verify them; append what is accepted."""
        length, cached = len(request.tokens), self.backend.length
        missing = length - cached
        rows: list[SparseRow] | None = None
        if missing > MAX_CATCH_UP_ROWS or cached < request.prompt_length:
            drafts = []
        elif drafts and request.verification is Verification.REJECTION:
            rows = self._draft_rows(request, drafts)
            drafts = drafts if rows is not None else []
        if self.config.mode is Mode.LOCKSTEP:
            self._slot.credit = 0

        start = time.monotonic_ns()
        self.meter.stats.overhead_s += max(0, start - max(request.ready_ns, request.idle_since_ns)) / 1e9
        prefill = missing > MAX_CATCH_UP_ROWS or cached < request.prompt_length
        self._slot.deadline_ns = start + self.meter.allowed_ns(missing + len(drafts), prefill)
        takes_best = not prefill and request.picker.takes_best(length, self.backend.vocab_size)
        best = self.backend.best(request.tokens[cached:] + drafts)[missing - 1 :] if takes_best else []
        logits = None if takes_best else self._logits(request, drafts)  # [n + 1, vocab]
        computed = time.monotonic_ns()
        try:
            if logits is None:
                verdict = request.picker.verify_best(best, length, drafts)
            else:
                verdict = request.picker.verify(logits, request.tokens, drafts, rows)
        except AutoPipeError as error:
            raise RequestFailedError(error) from error
        self._slot.deadline_ns = 0

        tokens = self._up_to_eos(request, verdict.token_ids)
        request.tokens.extend(tokens)
        if drafts:
            self.backend.rollback(length + verdict.num_accepted)
        for position, row in enumerate(verdict.rows or (), length):
            request.rows[position] = row
        if self._consumer is None:
            request.committed = len(request.tokens)
            self._emit(request, tokens, verdict.logprobs and verdict.logprobs[: len(tokens)])
        finished = time.monotonic_ns()
        name = "prefill" if prefill else "verify" if drafts else "draft" if self._consumer else "decode"
        step = Step(name, missing, len(drafts), verdict.num_accepted, len(tokens), start, computed, finished)
        self._slot.write_progress(request.id, self.meter.count(step, self.config.producer_name))
        request.idle_since_ns = request.ready_ns = finished

    def _logits(self, request: StageRequest, drafts: list[int]) -> torch.Tensor:
        """Logits after the last token and after each draft, float32 [n + 1, vocab].

        The prompt is always one prefill by itself, as it is for the target in plain decoding: the same rounding.
        """
        cached = self.backend.length
        if cached < request.prompt_length:
            logits = self.backend.prefill(request.tokens[cached : request.prompt_length])
            cached = request.prompt_length
            if cached == len(request.tokens):
                return logits[None]
        missing = request.tokens[cached:]
        if len(missing) > _LONG_CATCH_UP:
            return self.backend.prefill(missing)[None]
        return self.backend.forward(missing + drafts)[len(missing) - 1 :]

    def _draft_rows(self, request: StageRequest, drafts: list[int]) -> list[SparseRow] | None:
        if self._producer is None:
            return [SparseRow.one_hot(token) for token in drafts]
        return self._producer.read_rows(request.id, len(request.tokens), drafts)

    def _up_to_eos(self, request: StageRequest, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in request.eos_token_ids:
                return tokens[: index + 1]
        return tokens[: request.end - len(request.tokens)]

    # -- publish --------------------------------------------------------------------------------------------

    def _publish(self, request: StageRequest) -> None:
        """Show neighbours the sequence as it is now, and wake those it concerns."""
        length, start = len(request.tokens), min(request.changed_from, len(request.tokens))
        stopped = self._stopped(request)
        drawn = request.verification is Verification.REJECTION and self._consumer is not None
        rows = [request.rows.get(position) for position in range(start, length)] if drawn else ()
        if self.config.mode is Mode.ASYNC and self._producer is not None:
            budget = request.end - request.prompt_length
            window = self.config.warmup.window(self.config.window, length - request.prompt_length, budget)
            self._slot.credit = length + window
        stats = self.meter.stats
        stats.resend_bytes += PUBLISHED_BYTES + 4 * length
        stats.vocabulary_bytes += 4 * self.backend.vocab_size * sum(row is not None for row in rows)
        stats.bytes_out += self._slot.publish(
            request.id,
            start,
            request.tokens[start:],
            committed=request.committed,
            rollbacks=stats.rollbacks,
            stopped=stopped,
            rows=rows,
        )
        request.rows.clear()
        request.changed_from = length
        request.published_stopped = stopped
        if self._consumer is not None and (stopped or length >= self._consumer.wake_at):
            assert self.config.consumer is not None
            self._bells[self.config.consumer].ring()
        if self.config.producer is not None and self._slot.credit:
            self._bells[self.config.producer].ring()
