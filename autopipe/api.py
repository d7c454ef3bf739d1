"""The Python API: text in, text out, over an engine and a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan, StagePlan
from autopipe.core.preflight import PlanInfo, Progress, check_plan, inspect_plan, toy_tokenizer
from autopipe.core.request import RequestHandle, RowProcessor
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import RequestStats
from autopipe.core.trace import write_trace
from autopipe.inputs import require_no_padding, require_text, require_writable, sampling_params, single_row

if TYPE_CHECKING:
    from autopipe.core.text import OutputText

Message = Mapping[str, Any]


@dataclass(slots=True)
class GenerationResult:
    """One finished generation.

    Attributes:
        text: the output, special tokens left out, cut before a stop string.
        token_ids: the output tokens; when a stop string ended it, up to the token that completed the string.
        finish_reason: `stop` (eos or stop string), `length` (max_new_tokens) or `cancelled`.
        prompt_ids: the prompt as the target saw it.
        logprobs: per output token, where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]
    logprobs: list[Any] | None
    stats: RequestStats
    plan: Plan

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and output in one list of one row, as `model.generate` returns them."""
        return [self.prompt_ids + self.token_ids]

    def to_dict(self) -> dict[str, Any]:
        """The object that `autopipe run --json` prints."""
        data: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "plan": self.plan.model_dump(mode="json", exclude_defaults=True),
            "stats": self.stats.to_dict(),
        }
        if self.logprobs is not None:
            data["logprobs"] = self.logprobs
        return data


@dataclass(slots=True)
class StreamDelta:
    """What one step added. The last has a `finish_reason` and the whole `result`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    result: GenerationResult | None = None


class AutoPipe:
    """A loaded pipeline. Use it as a context manager, or call `close`.

    Several threads may generate at once; their requests queue.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        progress: Progress | None = None,
        check: Callable[[PlanInfo], None] = lambda info: None,
    ) -> None:
        """Load what `plan` needs. Prefer `from_plan` or `from_pretrained`.

        Args:
            progress: told, in a line of text, when a download or a conversion begins.
            check: called with what is known of the target before weights load; what it raises is raised.

        Raises:
            ConfigError, ModelLoadError, UnsupportedModelError, TokenizerMismatchError: before weights load
                wherever that can be told before.
        """
        loading: list[Future[Any]] = []
        with ThreadPoolExecutor(1) as pool:

            def preflight() -> None:
                info = inspect_plan(plan, progress=progress)
                check(info)
                self._eos_token_ids = info.eos_token_ids
                loading.append(pool.submit(_load_tokenizer, plan))

            self.engine = Engine(plan, preflight=preflight)
            try:
                self.tokenizer: Any = loading[0].result()
            except BaseException:
                self.engine.close()
                raise

    @classmethod
    def from_plan(
        cls,
        plan: Plan | str | Path,
        *,
        progress: Progress | None = None,
        check: Callable[[PlanInfo], None] = lambda info: None,
    ) -> AutoPipe:
        """From a plan, or the YAML file that holds it; `progress` and `check` as for the constructor."""
        return cls(plan if isinstance(plan, Plan) else Plan.load(plan), progress=progress, check=check)

    @classmethod
    def from_pretrained(
        cls, target: str, drafters: Sequence[str | StagePlan] | None = None, **plan_fields: Any
    ) -> AutoPipe:
        """From model names.

        Args:
            target: hub id, folder, GGUF file or registry name.
            drafters: cheapest first; None: an n-gram drafter; []: plain decoding.
            plan_fields: other fields of `Plan` (mode, exact, ...), and fields of the target's stage (dtype, device,
                backend, threads, adapter, ...).
        """
        stage_fields = {key: plan_fields.pop(key) for key in list(plan_fields) if key in StagePlan.model_fields}
        chain: list[Any] = [
            drafter.model_dump() if isinstance(drafter, StagePlan) else {"model": drafter}
            for drafter in (["ngram"] if drafters is None else drafters)
        ]
        for stage in chain:
            if stage["model"] == "ngram":
                stage.setdefault("window", 7)
        chain.append({"model": target, **stage_fields})
        return cls(Plan.parse({"chain": chain, **plan_fields}))

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.engine.plan

    def apply(self, plan: Plan) -> None:
        """Put another plan with the same target in force; also while requests run, whose output does not change.

        Raises:
            ConfigError: the plan has another target (make a new AutoPipe for that), or cannot run.
        """
        if plan.target.identity() != self.plan.target.identity() or plan.exact != self.plan.exact:
            raise ConfigError("chain", plan.target.model, f"plans with this target: {self.plan.target.model}")
        check_plan(plan)
        self.engine.apply(plan)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> AutoPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Any = None,
    ) -> list[int]:
        """Token ids of a prompt given in exactly one of three ways; chat `messages` go through the chat template.

        Raises:
            ConfigError: none or several given, text that is not valid Unicode, ids that are not whole numbers, or
                a tokenizer without a chat template.
        """
        given = {"prompt": prompt, "messages": messages, "input_ids": input_ids}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ConfigError("prompt", " and ".join(names) or None, "exactly one of prompt, messages, input_ids")
        if prompt is not None:
            return list(self.tokenizer(require_text(prompt, "prompt"))["input_ids"])
        if messages is not None:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ConfigError("messages", "given", "a plain prompt: this model's tokenizer has no chat template")
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(require_text(text, "messages"), add_special_tokens=False)["input_ids"])
        return single_row(input_ids)

    def generate(
        self,
        prompt: str | Any = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        logits_processor: Sequence[Callable[..., Any]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        trace: str | Path | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Generate to the end.

        Args:
            prompt: text; token ids or a tensor [1, n] are taken for `input_ids`, a list of mappings for `messages`.
            attention_mask: as tokenizers return it with `input_ids`; all ones, as nothing is padded here.
            streamer: a transformers streamer (`put`, `end`).
            logits_processor: transformers LogitsProcessors, applied at every verified position on its own prefix.
            stopping_criteria: transformers StoppingCriteria, asked after every token.
            trace: write a Chrome trace (one lane per stage) to this file.
            options: fields of `SamplingParams`; transformers' `do_sample`, `eos_token_id`, `stop_strings` too (and
                `pad_token_id`, which has no effect).

        Raises:
            ConfigError, ContextLengthError: before anything runs.
            TargetDiedError: the target's process died; call again to restart it.
        """
        deltas = self.stream(
            prompt,
            messages=messages,
            input_ids=input_ids,
            attention_mask=attention_mask,
            streamer=streamer,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            trace=trace,
            **options,
        )
        *_, last = deltas
        if last.result is None:
            raise RuntimeError("a stream ended without a result")
        return last.result

    def stream(
        self,
        prompt: str | Any = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        logits_processor: Sequence[Callable[..., Any]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        trace: str | Path | None = None,
        **options: Any,
    ) -> Iterator[StreamDelta]:
        """Like `generate`, as an iterator. Bad input raises in this call; the request starts with the first `next`.

        Abandoning the iterator cancels the request.
        """
        if messages is None and isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            prompt, messages = None, prompt
        elif prompt is not None and not isinstance(prompt, str) and input_ids is None:
            prompt, input_ids = None, prompt
        ids = self.encode(prompt, messages=messages, input_ids=input_ids)
        if attention_mask is not None:
            require_no_padding(attention_mask, len(ids))
        params = sampling_params(options)
        if trace is not None:
            require_writable(trace, "trace")
        self.engine.check_request(ids, params)
        processor = _row_processor(logits_processor) if logits_processor else None
        criteria = _as_list(stopping_criteria)
        return self._run(ids, params, processor, streamer, criteria, trace)

    def _run(
        self,
        ids: list[int],
        params: SamplingParams,
        processor: RowProcessor | None,
        streamer: Any,
        criteria: list[Callable[..., Any]],
        trace: str | Path | None,
    ) -> Iterator[StreamDelta]:
        from autopipe.core.text import OutputText

        output = OutputText(self.tokenizer, params.stop)
        pieces: list[str] = []
        token_ids: list[int] = []
        logprobs: list[Any] | None = None if params.num_logprobs is None else []
        stopped = False
        handle: RequestHandle | None = None
        num_received, ran_ahead, last_token_s = 0, False, None
        try:
            if streamer is not None:
                _put(streamer, ids)
            handle = self.engine.submit(
                ids, params, eos_token_ids=self._eos_token_ids, processor=processor, trace=trace is not None
            )
            for block in handle:
                last_token_s = handle.last_token_s
                num_received += len(block.token_ids)
                ran_ahead = handle.num_tokens > num_received
                text, count, stopped = _take(output, criteria, ids + token_ids, block.token_ids)
                if stopped:
                    handle.cancel()
                kept = block.token_ids[:count]
                kept_logprobs = None if block.logprobs is None else block.logprobs[:count]
                token_ids += kept
                pieces.append(text)
                if logprobs is not None:
                    logprobs += kept_logprobs or []
                if streamer is not None:
                    _put(streamer, kept)
                yield StreamDelta(text, kept, kept_logprobs)
                if stopped:
                    break
            outcome = handle.outcome()
        finally:
            if handle is not None:
                handle.cancel()
            if streamer is not None:
                streamer.end()
        stats = outcome.stats
        if stopped and not ran_ahead and last_token_s is not None:
            stats = _until(stats, handle, last_token_s, len(token_ids))
        pieces.append(output.finish())
        result = GenerationResult(
            text="".join(pieces),
            token_ids=token_ids,
            finish_reason="stop" if stopped or output.stopped else outcome.finish_reason,
            prompt_ids=ids,
            logprobs=logprobs,
            stats=stats,
            plan=self.plan,
        )
        if trace is not None:
            try:
                write_trace(trace, outcome.trace)
            except OSError as error:
                raise AutoPipeError(f"the trace cannot be written: {error}") from error
        yield StreamDelta(pieces[-1], finish_reason=result.finish_reason, result=result)

    def submit(self, ids: Sequence[int], params: SamplingParams) -> RequestHandle:
        """Queue token ids and get the raw handle: for servers and tools that do their own text handling."""
        return self.engine.submit(ids, params, eos_token_ids=self._eos_token_ids)


def _load_tokenizer(plan: Plan) -> Any:
    if plan.target.is_emulated:
        return toy_tokenizer()
    from autopipe.core.models import load_tokenizer, resolve

    return load_tokenizer(resolve(plan.target.model), trust_remote_code=plan.target.trust_remote_code)


def _row_processor(processors: Sequence[Callable[..., Any]]) -> RowProcessor:
    def process(prefix: list[int], row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        import torch

        ids, scores = torch.tensor([prefix]), torch.from_numpy(row)[None]  # [1, length], [1, vocab]
        for processor in processors:
            scores = processor(ids, scores)
        return scores[0].float().numpy()

    return process


def _as_list(criteria: Any) -> list[Callable[..., Any]]:
    if criteria is None:
        return []
    return list(criteria) if isinstance(criteria, Sequence) else [criteria]


def _take(
    output: OutputText, criteria: list[Callable[..., Any]], before: list[int], new: list[int]
) -> tuple[str, int, bool]:
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


def _until(stats: RequestStats, handle: RequestHandle, last_token_s: float, num_tokens: int) -> RequestStats:
    """`stats` with times that end at a token on which the caller stopped, not where the engine heard of it."""
    first = handle.first_token_s if handle.first_token_s is not None else last_token_s
    begun = handle.begun_s if handle.begun_s is not None else handle.submitted_s
    per_token_s = (last_token_s - first) / (num_tokens - 1) if num_tokens > 1 else first - begun
    return dataclasses.replace(stats, total_s=last_token_s - handle.submitted_s, ms_per_token=1e3 * per_token_s)
