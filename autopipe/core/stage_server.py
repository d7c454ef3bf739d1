"""Serves one stage to the engine: obeys its messages between steps, runs the stage's loop, reports what goes wrong."""

from __future__ import annotations

import logging
import select
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopipe.core.affinity import allowed_cores, bind_cores
from autopipe.core.board import Board
from autopipe.core.channel import Channel, Doorbell, Message
from autopipe.core.errors import AutoPipeError, RequestCancelledError, TokenizerMismatchError
from autopipe.core.isolation import isolate
from autopipe.core.plan import NgramOptions, StagePlan
from autopipe.core.remote_processor import remote_processor
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import StageStats

if TYPE_CHECKING:
    from autopipe.core.backends.base import StageBackend
    from autopipe.core.ngram import NgramDrafter
    from autopipe.core.stage import Stage
    from autopipe.core.stage_request import StageRequest

_IDLE_CHECK_S = 0.1
"""How long a stage with a request sleeps at most: bounds the harm of a wake-up lost to a weak memory model."""
_OBEY_NS = 10_000_000_000
"""A worker that takes longer than this over a message, loading apart, counts as hung."""

_log = logging.getLogger(__name__)


class StageServer:
    """Serves one stage until told to shut down or the engine is gone."""

    def __init__(self, channel: Channel, board: Board, slot: int, bells: Sequence[Doorbell]) -> None:
        self._channel = channel
        self._board = board
        self._slot_index = slot
        self._slot = board.slot(slot)
        self._bells = bells
        self._stage: Stage | None = None
        self._backend: StageBackend | None = None
        self._outgrown_reported = False
        self._postponed: list[Message] = []
        self._failed_request: int | None = None
        self._missing: list[str] = []
        self._unbound: list[str] = []
        self._cores = allowed_cores()

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self._bells[self._slot_index].read_descriptor, select.POLLIN)
        while True:
            self._bells[self._slot_index].silence()
            while (message := self._next_message()) is not None:
                if message["type"] == "shutdown":
                    return
                try:
                    self._slot.deadline_ns = time.monotonic_ns() + _OBEY_NS if message["type"] != "load" else 0
                    self._obey(message)
                except Exception as error:  # the engine is told why, and goes on without this stage
                    self._fail("step-failed", error)
                finally:
                    self._slot.deadline_ns = 0
            stage = self._stage
            if stage is not None and self._advance(stage):
                continue
            active = stage is not None and stage.request is not None
            poller.poll(_IDLE_CHECK_S * 1e3 if active else None)

    def _next_message(self) -> Message | None:
        return self._postponed.pop(0) if self._postponed else self._channel.receive()

    def _advance(self, stage: Stage) -> bool:
        from autopipe.core.stage_request import RequestFailedError

        if stage.request is None or stage.request.id == self._failed_request:
            return False
        try:
            advanced = stage.advance()
        except RequestCancelledError:
            self._slot.deadline_ns = 0
            self._failed_request = stage.request.id
            return False
        except RequestFailedError as failure:
            self._slot.deadline_ns = 0
            self._failed_request = stage.request.id
            self._fail("request-failed", failure.error, request=stage.request.id)
            return False
        except Exception as error:  # whatever a model may raise: the engine goes on without this stage
            request = stage.request
            stage.end()
            self._slot.deadline_ns = 0
            self._fail("step-failed", error, request=request.id if request else 0)
            return False
        if stage.outgrown and not self._outgrown_reported:
            self._outgrown_reported = True
            max_length = stage.backend.max_length
            self._channel.send({"type": "outgrown", "request": stage.request.id, "max_length": max_length})
        return advanced

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind == "load":
            self._load(message)
        elif kind == "configure":
            self._configure(message["config"])
        elif kind == "begin":
            self._begin(message)
        elif kind == "end":
            self._end(message["request"])
        elif kind == "save-ngrams":
            self._save_ngrams(message)

    # -- messages -------------------------------------------------------------------------------------------

    def _load(self, message: Message) -> None:
        started = time.monotonic()
        try:
            plan = StagePlan.parse(message["stage"])
            self._bind(message["cores"], message["threads"])
            self._missing = isolate(plan, self._slot)
            from autopipe.core.backends.load import load_backend
            from autopipe.core.stage import Stage
            from autopipe.core.stage_calibration import expect, measure

            backend = load_backend(
                plan, exact=message["exact"], threads=message["threads"], shared_layers=message["shared_layers"]
            )
            backend.name = message["name"]
            self._stage = Stage(backend, self._board, self._slot_index, self._bells, self._emit, self._make_ngram)
            self._backend = backend
            loaded = time.monotonic()
            if plan.emulated is not None:
                expect(self._stage.meter, plan.emulated)
            else:
                measure(backend, self._stage.meter)
        except Exception as error:  # anything that stops a model from loading is reported to the user
            self._fail("load-failed", error)
            return
        meter = self._stage.meter
        self._channel.send(
            {
                "type": "ready",
                "vocab_size": backend.vocab_size,
                "max_length": backend.max_length,
                "exact": backend.exact,
                "choice": getattr(backend, "choice_reason", ""),
                "load_s": loaded - started,
                "step_ms": {n: 1e3 * meter.costs.seconds(n) for n in (1, 2, 4, 8)} if meter.measured else {},
            }
        )

    def _make_ngram(self, options: NgramOptions) -> NgramDrafter:
        from autopipe.core.ngram import NgramDrafter

        assert self._backend is not None
        drafter = NgramDrafter(options)
        if drafter.max_token_id >= self._backend.vocab_size:
            raise TokenizerMismatchError(
                f"the n-gram table {options.table!r} has token {drafter.max_token_id}, {self._backend.name!r} only "
                f"{self._backend.vocab_size} tokens: it was learned with another tokenizer"
            )
        return drafter

    def _configure(self, data: dict[str, Any]) -> None:
        from autopipe.core.chain import StageConfig

        assert self._stage is not None
        config = StageConfig.parse(data)
        if config.threads is not None:
            self._bind(config.cores, config.threads)
            set_threads = getattr(self._backend, "set_threads", None)
            if set_threads is not None:
                set_threads(config.threads)
        if config.adapter is not None:
            self._select(config.adapter)
        if config.device_map is not None:
            self._move(config.device_map)
        try:
            self._stage.configure(config)
        except AutoPipeError as error:
            self._note(f"no n-gram drafter: {error}")
            self._stage.configure(config.replace(ngram=None))

    def _select(self, adapter: str) -> None:
        """Change to another of the backend's adapters; the one in use stays where that fails."""
        from autopipe.core.backends.shared_base import SharedBaseBackend
        from autopipe.core.models.shared_base import adapter_folder

        if isinstance(self._backend, SharedBaseBackend):
            try:
                self._backend.select(adapter_folder(adapter))
            except AutoPipeError as error:
                self._note(f"still drafting with {self._backend.adapter}: {error}")

    def _move(self, device_map: dict[str, int | str]) -> None:
        """Have the backend's layers elsewhere; they stay where that fails."""
        from autopipe.core.backends.transformers import TransformersBackend

        assert self._stage is not None
        if not isinstance(self._backend, TransformersBackend) or self._backend.device_map == device_map:
            return
        before = self._backend.device_map
        try:
            self._stage.count_moved(self._backend.place(device_map))
        except AutoPipeError as error:
            if before is None:
                raise
            self._backend.place(before)
            self._note(f"layers are not moved: {error}")

    def _bind(self, cores: Sequence[int] | None, threads: int | None) -> None:
        """Bind this process to `cores` (None: those it was started with) and torch to `threads`."""
        import torch

        wanted = cores or self._cores
        reason = bind_cores(wanted) if wanted else None
        self._unbound = [] if reason is None else [reason]
        if reason is not None:
            self._note(reason)
        if threads:
            torch.set_num_threads(threads)

    def _note(self, text: str) -> None:
        """Tell the engine of something that did not go as planned."""
        self._channel.send({"type": "note", "text": text})

    def _begin(self, message: Message) -> None:
        from autopipe.core.picker import Picker
        from autopipe.core.plan import Verification
        from autopipe.core.stage_request import StageRequest

        stage = self._stage
        assert stage is not None
        assert self._backend is not None
        self._outgrown_reported = False
        self._failed_request = None
        for reason in (*self._missing, *self._unbound, *self._backend.shortfalls):
            self._note(reason)  # so that every request's stats show it
        params = SamplingParams.parse(message["params"])
        prompt: list[int] = message["prompt"]
        is_target = stage.config.consumer is None
        verification = Verification(message["verification"])
        picker = Picker(
            params,
            vocab_size=min(self._backend.vocab_size, message["vocab_size"]),
            eos_token_ids=message["eos"],
            prompt_length=len(prompt),
            rule=verification,
            stage=message["stage"],
            is_target=is_target,
            processor=remote_processor(self._channel, self._slot, message["request"], self._postponed.append)
            if message["processor"] and is_target
            else None,
        )
        request = StageRequest(
            id=message["request"],
            tokens=prompt,
            prompt_length=len(prompt),
            end=len(prompt) + params.max_new_tokens,
            eos_token_ids=frozenset(message["eos"]),
            verification=verification,
            picker=picker,
            committed=len(prompt),
            producer_committed=len(prompt),
            changed_from=len(prompt),
        )
        stage.begin(request, trace=message["trace"])

    def _end(self, request: int) -> None:
        assert self._stage is not None
        current = self._stage.request
        trace, stats = None, StageStats()
        if current is not None and current.id == request:
            trace, stats = self._stage.meter.trace, self._stage.end()
        self._channel.send(
            {
                "type": "ended",
                "request": request,
                "stats": stats.to_message(),
                "trace": [list(e) for e in trace or ()],
            }
        )

    def _save_ngrams(self, message: Message) -> None:
        assert self._stage is not None
        answer: Message = {"type": "saved-ngrams", "number": message["number"]}
        try:
            self._channel.send({**answer, "contexts": self._stage.save_ngrams(message["path"])})
        except AutoPipeError as error:
            self._channel.send({**answer, "error": type(error).__name__, "message": str(error)})

    # -- answers --------------------------------------------------------------------------------------------

    def _emit(self, request: StageRequest, tokens: list[int], logprobs: Any) -> None:
        reason = None
        if request.tokens[-1] in request.eos_token_ids:
            reason = "stop"
        elif len(request.tokens) >= request.end:
            reason = "length"
        message: Message = {"type": "tokens", "request": request.id, "ids": tokens, "finish": reason}
        if logprobs is not None:
            message["logprobs"] = [asdict(item) for item in logprobs]
        self._channel.send(message)

    def _fail(self, kind: str, error: Exception, **extra: Any) -> None:
        if not isinstance(error, AutoPipeError):
            _log.debug("%s", traceback.format_exc())
        self._channel.send(
            {
                "type": kind,
                "error": type(error).__name__,
                "message": str(error) or type(error).__name__,
                **extra,
            }
        )
