"""The worker's side of a shared engine: obeys the engine's messages between steps, runs the pipeline, reports."""

from __future__ import annotations

import logging
import select
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopipe.core.affinity import bind_cores
from autopipe.core.board import Slot
from autopipe.core.chain import bound_cores
from autopipe.core.channel import Channel, Doorbell, Message
from autopipe.core.errors import AutoPipeError, ConfigError, TokenizerMismatchError
from autopipe.core.isolation import isolate
from autopipe.core.plan import StagePlan
from autopipe.core.remote_processor import remote_processor
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared.drafting import DraftingConfig
from autopipe.core.shared.options import SharingOptions

if TYPE_CHECKING:
    from autopipe.core.ngram import NgramDrafter
    from autopipe.core.ngram_online import OnlineNgrams
    from autopipe.core.shared.drafter_keeper import DrafterKeeper
    from autopipe.core.shared.pipeline import SharedPipeline
    from autopipe.core.shared.sequence import Served, StepReport

    _Maker = Callable[[], NgramDrafter]

_log = logging.getLogger(__name__)

_OBEY_NS = 10_000_000_000
_UNMEASURED_NS = 60_000_000_000
_GRACE_NS = 800_000_000
"""A forward this much later than twice its expected time counts as hung."""


class SharedServer:
    """Serves one shared pipeline until told to shut down or the engine is gone."""

    def __init__(self, channel: Channel, slot: Slot) -> None:
        self._channel = channel
        self._slot = slot
        self._pipeline: SharedPipeline | None = None
        self._measured = False
        self._online: OnlineNgrams | None = None
        self._postponed: list[Message] = []
        self._drafters: DrafterKeeper | None = None
        self._bell = Doorbell.create()  # rung when a drafter has been loaded

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        poller.register(self._bell.read_descriptor, select.POLLIN)
        while True:
            self._bell.silence()
            if self._drafters is not None:
                self._drafters.take_loaded()
            while (message := self._next_message()) is not None:
                if message["type"] == "shutdown":
                    return
                self._obey(message)
            if self._pipeline is None or not self._pipeline.has_work:
                poller.poll()
            else:
                self._step(self._pipeline)

    def _next_message(self) -> Message | None:
        return self._postponed.pop(0) if self._postponed else self._channel.receive()

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        self._slot.deadline_ns = 0 if kind == "load" else time.monotonic_ns() + _OBEY_NS
        try:
            if kind == "load":
                self._load(message)
            elif kind == "configure":
                self._configure(message)
            elif kind == "begin":
                self._begin(message)
            elif kind == "save-ngrams":
                self._save_ngrams(message["path"])
            elif kind == "end" and self._pipeline is not None:
                self._pipeline.cancel(message["request"])
        except Exception as error:  # the engine is told why, and starts another worker
            self._fail("step-failed", error)
        finally:
            self._slot.deadline_ns = 0

    def _step(self, pipeline: SharedPipeline) -> None:
        try:
            report = pipeline.step()
        except Exception as error:  # whatever a model may raise
            self._fail("step-failed", error)
            self._pipeline = None
            return
        finally:
            self._slot.deadline_ns = 0
        self._measured = True
        self._channel.send(_step_message(report, pipeline))

    # -- messages -------------------------------------------------------------------------------------------

    def _load(self, message: Message) -> None:
        from autopipe.core.shared.calibration import measure
        from autopipe.core.shared.drafter_keeper import DrafterKeeper
        from autopipe.core.shared.drafter_loading import DrafterLoader
        from autopipe.core.shared.loading import load_model
        from autopipe.core.shared.pipeline import SharedPipeline

        started = time.monotonic()
        try:
            import torch

            options = SharingOptions.parse(message["options"])
            torch.set_num_threads(message["threads"])
            stage = StagePlan.parse(message["stage"])
            cores = bound_cores(stage)
            unbound = None if cores is None else bind_cores(cores)  # before compute threads start, which inherit it
            for reason in (*([] if unbound is None else [unbound]), *isolate(stage, self._slot)):
                self._channel.send({"type": "note", "text": reason})
            loaded = load_model(
                stage,
                options,
                message["threads"],
                shared_layers=message["shared_layers"],
                exact=message["exact"],
            )
            pipeline = SharedPipeline(loaded.runner, options)
            load_s = time.monotonic() - started
            measure(loaded.runner, pipeline.costs, stage.emulated)
        except Exception as error:  # anything that stops a model from loading is reported to the user
            self._fail("load-failed", error)
            return
        pipeline.about_to_compute = self._set_deadline
        loader = DrafterLoader(loaded.runner, options, self._bell.ring)
        self._pipeline = pipeline
        self._drafters = DrafterKeeper(pipeline.maker, loader, self._channel.send, self._set_deadline)
        runner = loaded.runner
        for reason in runner.shortfalls:
            self._channel.send({"type": "note", "text": reason})
        self._channel.send(
            {
                "type": "ready",
                "vocab_size": runner.vocab_size,
                "max_length": runner.max_length,
                "exact": runner.exact,
                "one_by_one": runner.one_by_one,
                "choice": loaded.reason,
                "load_s": load_s,
                "step_ms": {n: 1e3 * pipeline.costs.seconds(n) for n in (1, 2, 4, 8, 16, 32)},
                "kv_bytes_per_token": runner.kv_bytes_per_token,
            }
        )

    def _set_deadline(self, num_rows: int) -> None:
        allowed = 0 if self._measured else _UNMEASURED_NS
        if self._pipeline is not None:
            costs, runner = self._pipeline.costs, self._pipeline.runner
            alone = runner.one_by_one or runner.whole_prompts  # a long prompt takes more than a line through few rows
            expected_s = num_rows * costs.seconds(1) if alone else costs.seconds(num_rows)
            allowed += 2 * int(1e9 * expected_s) + _GRACE_NS
        self._slot.deadline_ns = time.monotonic_ns() + allowed

    def _configure(self, message: Message) -> None:
        pipeline, drafters = self._pipeline, self._drafters
        if pipeline is None or drafters is None:
            return
        drafting, maker = DraftingConfig.parse(message["drafting"]), pipeline.maker
        pipeline.runner.set_threads(message["threads"])
        drafters.configure(message)
        if drafting == maker.drafting:
            return
        if drafting.ngram is not None and drafting.ngram == maker.drafting.ngram:
            maker.retune(drafting)
            return
        try:
            makers = self._ngram_makers(pipeline, drafting)
        except AutoPipeError as error:
            self._channel.send({"type": "note", "text": f"no n-gram drafter: {error}"})
            drafting, makers = drafting.replace(ngram=None), (None, None)
        pipeline.configure(drafting, *makers)

    def _save_ngrams(self, path: str) -> None:
        try:
            online = self._online
            if online is None:
                allowed = "true, in the plan in force, for there to be something to save"
                raise ConfigError("ngram.online", False, allowed)
            online.save(path)
        except AutoPipeError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
            self._channel.send({"type": "saved-ngrams", **answer})
            return
        self._channel.send({"type": "saved-ngrams", "contexts": len(online)})

    def _ngram_makers(self, pipeline: SharedPipeline, drafting: DraftingConfig) -> tuple[_Maker | None, _Maker | None]:
        """Builders of drafters that share a table and what is learned online; each has its own text. The second is for
        another thread and has another consumer: what it learns of confidence is its own; the first learns online."""
        self._online = None
        if drafting.ngram is None:
            return None, None
        from autopipe.core.ngram import NgramDrafter
        from autopipe.core.ngram_table import NgramTable

        options, vocab_size = drafting.ngram, pipeline.runner.vocab_size
        table = None if options.table is None else NgramTable.load(options.table)
        first = NgramDrafter(options, table)
        if first.max_token_id >= vocab_size:
            raise TokenizerMismatchError(
                f"the n-gram table {options.table!r} has token {first.max_token_id}, the target only {vocab_size} "
                "tokens: it was learned with another tokenizer"
            )
        self._online = first.online
        apart = NgramDrafter(options, table, None, first.online).calibration
        return (
            lambda: NgramDrafter(options, table, first.calibration, first.online),
            lambda: NgramDrafter(options, table, apart, first.online, learns=False),
        )

    def _begin(self, message: Message) -> None:
        from autopipe.core.picker import Picker
        from autopipe.core.shared.sequence import SharedRequest

        pipeline = self._pipeline
        if pipeline is None:
            return
        params = SamplingParams.parse(message["params"])
        prompt: list[int] = message["prompt"]
        number: int = message["request"]
        target_vocab = pipeline.runner.vocab_size

        def drafter_picker(vocab_size: int) -> Picker:
            return Picker(
                params,
                vocab_size=min(vocab_size, target_vocab),
                eos_token_ids=message["eos"],
                prompt_length=len(prompt),
                stage=1,
                is_target=False,
            )

        picker = Picker(
            params,
            vocab_size=target_vocab,
            eos_token_ids=message["eos"],
            prompt_length=len(prompt),
            processor=remote_processor(self._channel, self._slot, number, self._postponed.append)
            if message["processor"]
            else None,
        )
        pipeline.begin(
            SharedRequest(
                id=number,
                tokens=prompt + message["output"],
                prompt_length=len(prompt),
                end=len(prompt) + params.max_new_tokens,
                eos_token_ids=frozenset(message["eos"]),
                picker=picker,
                drafter_picker=drafter_picker,
            )
        )

    # -- answers --------------------------------------------------------------------------------------------

    def _fail(self, kind: str, error: Exception) -> None:
        if not isinstance(error, AutoPipeError):
            _log.debug("%s", traceback.format_exc())
        name, text = type(error).__name__, str(error) or type(error).__name__
        self._channel.send({"type": kind, "error": name, "message": text})


def _step_message(report: StepReport, pipeline: SharedPipeline) -> Message:
    slots = pipeline.slots
    return {
        "type": "step",
        "start": report.start_ns,
        "end": report.finished_ns,
        "draft": report.draft_ns,
        "chain": pipeline.maker.names,
        "passes": [list(each) for each in report.passes],
        "rows": report.num_rows,
        "prefill": report.prefill,
        "served": [_served_message(served) for served in report.served],
        "waiting": len(pipeline.waiting),
        "cache": {
            "hits": slots.prefix_hits,
            "reused": slots.tokens_reused,
            "evictions": slots.evictions,
            "sequences": slots.num_cached,
            "preemptions": pipeline.preemptions,
            "kv_bytes": pipeline.kv_bytes_in_use,
        },
    }


def _served_message(served: Served) -> Message:
    message: Message = {
        "request": served.request,
        "ids": served.token_ids,
        "read": served.num_read,
        "drafts": served.num_drafts,
        "accepted": served.num_accepted,
        "drafter": served.drafter,
        "finish": served.finish_reason,
    }
    if served.reused:
        message["reused"] = served.reused
    if served.drafters:
        message["drafters"] = [stats.to_message() for stats in served.drafters]
    if served.logprobs is not None:
        message["logprobs"] = [asdict(item) for item in served.logprobs]
    if served.error is not None:
        message["error"] = [type(served.error).__name__, str(served.error)]
    return message
