"""One request from token ids to text: what `AutoPipe.stream` iterates over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from autopipe.core.errors import AutoPipeError
from autopipe.core.request import Outcome, RequestHandle, RowProcessor
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats
from autopipe.core.trace import TraceEvent, write_trace
from autopipe.results import GenerationResult, StreamDelta

if TYPE_CHECKING:
    from autopipe.core.engine import Engine
    from autopipe.core.telemetry import Sampler, UseMeter
    from autopipe.core.text import OutputText

Criterion = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is to be generated, checked.

    Attributes:
        ids: the prompt.
        eos_token_ids: the model's own.
        processors: transformers LogitsProcessors.
        streamer: a transformers streamer, or None.
        criteria: transformers StoppingCriteria.
        trace: where a Chrome trace goes, or None.
    """

    ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    processors: Sequence[Callable[..., Any]] = ()
    streamer: Any = None
    criteria: Sequence[Criterion] = ()
    trace: str | Path | None = None


def run_request(
    engine: Engine, tokenizer: Any, request: GenerationRequest, sampler: Sampler | None = None
) -> Iterator[StreamDelta]:
    """Submit a request and yield what it adds, the result last. Closing the iterator cancels the request.

    Args:
        sampler: where energy and device figures come from; None: they stay None.
    """
    from autopipe.core.text import OutputText

    output = OutputText(tokenizer, request.params.stop)
    collected = _Collected(request, output)
    handle: RequestHandle | None = None
    try:
        if request.streamer is not None:
            _put(request.streamer, request.ids)
        meter = None if sampler is None else sampler.measure_use()
        handle = engine.submit(
            request.ids,
            request.params,
            eos_token_ids=request.eos_token_ids,
            processor=_row_processor(request.processors) if request.processors else None,
            trace=request.trace is not None,
        )
        for block in handle:
            delta = collected.take(block.token_ids, block.logprobs, handle)
            if collected.stopped:
                handle.cancel()
            if request.streamer is not None:
                _put(request.streamer, delta.token_ids)
            yield delta
            if collected.stopped:
                break
        outcome = handle.outcome()
    finally:
        if handle is not None:
            handle.cancel()
        if request.streamer is not None:
            request.streamer.end()
    stats = collected.stats(outcome, handle)
    if meter is not None:
        stats = _with_telemetry(stats, meter, handle, collected.last_token_s, len(collected.token_ids))
    rest = output.finish()
    result = GenerationResult(
        text="".join([*collected.pieces, rest]),
        token_ids=collected.token_ids,
        finish_reason="stop" if collected.stopped or output.stopped else outcome.finish_reason,
        prompt_ids=request.ids,
        logprobs=collected.logprobs,
        stats=stats,
        plan=engine.plan,
    )
    if request.trace is not None:
        try:
            write_trace(request.trace, _in_chain_order(outcome.trace, engine.plan.names()))
        except OSError as error:
            raise AutoPipeError(f"the trace cannot be written: {error}") from error
    yield StreamDelta(rest, finish_reason=result.finish_reason, result=result)


class _Collected:
    """What has come of a request so far, cut where the caller's stop strings and criteria end it."""

    def __init__(self, request: GenerationRequest, output: OutputText) -> None:
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Any] | None = None if request.params.num_logprobs is None else []
        self.stopped = False
        self.last_token_s: float | None = None
        self._request = request
        self._output = output
        self._num_received = 0
        self._ran_ahead = False

    def take(self, new: list[int], logprobs: list[Any] | None, handle: RequestHandle) -> StreamDelta:
        """Take a block of tokens; return what of it counts."""
        self.last_token_s = handle.last_token_s
        self._num_received += len(new)
        self._ran_ahead = handle.num_tokens > self._num_received
        before = self._request.ids + self.token_ids if self._request.criteria else []
        text, count, self.stopped = _cut(self._output, self._request.criteria, before, new)
        kept, kept_logprobs = new[:count], None if logprobs is None else logprobs[:count]
        self.token_ids += kept
        self.pieces.append(text)
        if self.logprobs is not None:
            self.logprobs += kept_logprobs or []
        return StreamDelta(text, kept, kept_logprobs)

    def stats(self, outcome: Outcome, handle: RequestHandle) -> RequestStats:
        """Times end at the token on which the caller stopped, not where the engine heard of it."""
        if not self.stopped or self._ran_ahead or self.last_token_s is None:
            return outcome.stats
        last_s, count = self.last_token_s, len(self.token_ids)
        first_s = handle.first_token_s if handle.first_token_s is not None else last_s
        begun_s = _begun_s(handle)
        per_token_s = (last_s - first_s) / (count - 1) if count > 1 else first_s - begun_s
        return dataclasses.replace(outcome.stats, total_s=last_s - handle.submitted_s, ms_per_token=1e3 * per_token_s)


def _in_chain_order(lanes: dict[str, list[TraceEvent]], names: Sequence[str]) -> dict[str, list[TraceEvent]]:
    """Lanes of the chain's stages first, cheapest drafter on top; then those of stages that have left it."""
    order = {name: place for place, name in enumerate(names)}
    return dict(sorted(lanes.items(), key=lambda lane: order.get(lane[0], len(order))))


def _with_telemetry(
    stats: RequestStats, meter: UseMeter, handle: RequestHandle, last_token_s: float | None, num_tokens: int
) -> RequestStats:
    """Energy and devices from the request's turn in the pipeline to its last token: waiting in the queue is not its."""
    use = meter.stop(num_tokens, _begun_s(handle), last_token_s)
    return dataclasses.replace(stats, energy=use.energy, devices=use.devices)


def _begun_s(handle: RequestHandle) -> float:
    return handle.begun_s if handle.begun_s is not None else handle.submitted_s


def _row_processor(processors: Sequence[Callable[..., Any]]) -> RowProcessor:
    def process(prefix: list[int], row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        import torch

        ids, scores = torch.tensor([prefix]), torch.from_numpy(row)[None]  # [1, length], [1, vocab]
        for processor in processors:
            scores = processor(ids, scores)
        return scores[0].float().numpy()

    return process


def _cut(output: OutputText, criteria: Sequence[Criterion], before: list[int], new: list[int]) -> tuple[str, int, bool]:
    """Text of the `new` tokens, how many of them count, and whether the output ends there."""
    if not criteria:
        delta = output.push(new)
        return delta.text, delta.num_tokens_used, delta.stopped
    import torch

    pieces = []
    for count in range(1, len(new) + 1):
        delta = output.push([new[count - 1]])
        pieces.append(delta.text)
        ids = torch.tensor([before + new[:count]])  # [1, length]
        if delta.stopped or any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in criteria):
            return "".join(pieces), count, True
    return "".join(pieces), len(new), False


def _put(streamer: Any, token_ids: list[int]) -> None:
    import torch

    if token_ids:
        streamer.put(torch.tensor(token_ids))
