"""The Python API: text in, text out, over an engine and a tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError
from autopipe.core.fewer_bits import in_fewer_bits
from autopipe.core.ngram_shipped import SHIPPED_TABLES
from autopipe.core.plan import FEWER_BITS, Plan, StagePlan
from autopipe.core.preflight import PlanInfo, Progress, check_plan, inspect_plan, toy_tokenizer
from autopipe.core.request import RequestHandle
from autopipe.core.sampling import SamplingParams
from autopipe.generation import GenerationRequest, run_request
from autopipe.inputs import require_no_padding, require_text, require_writable, sampling_params, single_row
from autopipe.results import GenerationResult, StreamDelta
from autopipe.tuned import warn_if_elsewhere

if TYPE_CHECKING:
    from autopipe.core.telemetry import Sampler
    from autopipe.policies import Policy, RuntimeController

__all__ = ["AutoPipe", "GenerationResult", "Message", "StreamDelta"]

Message = Mapping[str, Any]
_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def _arguments_of(
    other: Callable[Concatenate[AutoPipe, _Arguments], Any],
) -> Callable[[Callable[..., _Returned]], Callable[Concatenate[AutoPipe, _Arguments], _Returned]]:
    """Have a method take, and be documented with, the arguments of another one."""

    def decorate(method: Callable[..., _Returned]) -> Callable[Concatenate[AutoPipe, _Arguments], _Returned]:
        returned = inspect.signature(method).return_annotation
        method.__signature__ = inspect.signature(other).replace(return_annotation=returned)  # type: ignore[attr-defined]  # read by inspect
        return method

    return decorate


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
        telemetry: bool | Sampler = True,
        engine: Callable[..., Any] = Engine,
    ) -> None:
        """Load what `plan` needs. Prefer `from_plan` or `from_pretrained`.

        Args:
            progress: told, in a line of text, when a download or a conversion begins.
            check: called with what is known of the target before weights load; what it raises is raised.
            telemetry: sample devices in the background, so that `stats` has energy and device figures, and show this
                pipeline to `autopipe top`. A `Sampler` (running, and the caller's to stop) is used instead of the
                process's own.
            engine: what runs the plan: `Engine`, or a drop-in for it (`core.shared.SharedEngine`).

        Raises:
            ConfigError, ModelLoadError, UnsupportedModelError, TokenizerMismatchError: before weights load
                wherever that can be told before.
        """
        loading: list[Future[Any]] = []
        with ExitStack() as opened, ThreadPoolExecutor(1) as pool:

            def preflight() -> None:
                info = inspect_plan(plan, progress=progress)
                check(info)
                self._eos_token_ids = info.eos_token_ids
                loading.append(pool.submit(_load_tokenizer, plan))
                warn_if_elsewhere(plan)

            self._sampler = _sampler(telemetry, opened)
            self.engine: Engine = opened.enter_context(engine(plan, preflight=preflight))
            self.tokenizer: Any = loading[0].result()
            if telemetry is not False:
                from autopipe.core.telemetry.announce import Announcer

                opened.callback(Announcer(self.engine, self._sampler).close)
            self.controller: RuntimeController | None = None
            self._policy: str | Path | Policy | None = None
            opened.callback(self.set_policy, None)
            self._opened = opened.pop_all()

    @classmethod
    def from_plan(
        cls,
        plan: Plan | str | Path,
        *,
        progress: Progress | None = None,
        check: Callable[[PlanInfo], None] = lambda info: None,
        telemetry: bool | Sampler = True,
        policy: str | Path | Policy | None = None,
    ) -> AutoPipe:
        """From a plan, or the YAML file that holds it; `policy` as for `set_policy`, others as for the constructor."""
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        made = cls(loaded, progress=progress, check=check, telemetry=telemetry)
        try:
            made.set_policy(policy)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafters: Sequence[str | StagePlan] | None = None,
        *,
        telemetry: bool | Sampler = True,
        **plan_fields: Any,
    ) -> AutoPipe:
        """From model names.

        Args:
            target: hub id, folder, GGUF file or registry name.
            drafters: cheapest first; `int4` and `int8` are the target itself with its weights in fewer bits. None: an
                n-gram drafter, with the table that ships for the target if there is one; []: plain decoding.
            telemetry: as for the constructor.
            plan_fields: other fields of `Plan` (mode, exact, ...), and fields of the target's stage (dtype, device,
                backend, threads, adapter, ...).
        """
        stage_fields = {key: plan_fields.pop(key) for key in list(plan_fields) if key in StagePlan.model_fields}
        chain: list[Any] = []
        for drafter in ["ngram"] if drafters is None else drafters:
            if drafter in FEWER_BITS:
                drafter = in_fewer_bits(StagePlan.parse({"model": target, **stage_fields}), str(drafter), "drafters")
            chain.append(drafter.model_dump() if isinstance(drafter, StagePlan) else {"model": drafter})
        for stage in chain:
            if stage["model"] == "ngram":
                stage.setdefault("window", 11)
                if drafters is None and target in SHIPPED_TABLES:
                    stage["ngram"] = {"table": target}
        chain.append({"model": target, **stage_fields})
        return cls(Plan.parse({"chain": chain, **plan_fields}), telemetry=telemetry)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.engine.plan

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end the target's text."""
        return self._eos_token_ids

    def apply(self, plan: Plan) -> None:
        """Put another plan with the same target in force; also while requests run, whose output does not change.

        Raises:
            ConfigError: the plan has another target (make a new AutoPipe for that), or cannot run.
        """
        if plan.target.identity() != self.plan.target.identity() or plan.exact != self.plan.exact:
            raise ConfigError("chain", plan.target.model, f"plans with this target: {self.plan.target.model}")
        check_plan(plan)
        self.engine.apply(plan)

    def set_policy(self, policy: str | Path | Policy | None) -> None:
        """Have a policy choose among plans of this plan's drafters from now on; the output stays the same.

        Args:
            policy: `rules`, `bandit`, `planner`, `rl`, the folder of a trained policy, or a `Policy`; None: the plan in
                force stays. What it does is in `controller.status()` and `controller.events`.

        Raises:
            ConfigError: no such policy.
        """
        if policy == self._policy:
            return
        if self.controller is not None:
            self.controller.stop()
            self.controller, self._policy = None, None
        if policy is not None:
            from autopipe.policies.attach import attach_policy

            self.controller = attach_policy(self.engine, policy, tokenizer=self.tokenizer, sampler=self._sampler)
            self._policy = policy

    def save_ngrams(self, path: str | Path) -> int:
        """Write what was learned online (`ngram: {online: true}`) as a table for `ngram.table`; return its size.

        Raises:
            AutoPipeError: the plan does not learn online, or the file cannot be written.
        """
        return self.engine.save_ngrams(path)

    def close(self) -> None:
        """End the workers and the sampling. May be called more than once."""
        self._opened.close()

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

    def stream(
        self,
        /,
        prompt: str | Any = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        logits_processor: Sequence[Callable[..., Any]] | None = None,
        stopping_criteria: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        trace: str | Path | None = None,
        policy: str | Path | Policy | None = None,
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
        request = GenerationRequest(
            ids,
            sampling_params(options),
            eos_token_ids=self._eos_token_ids,
            processors=logits_processor or (),
            streamer=streamer,
            criteria=_as_list(stopping_criteria),
            trace=trace,
        )
        if trace is not None:
            require_writable(trace, "trace")
        self.engine.check_request(ids, request.params)
        if policy is not None:
            self.set_policy(policy)
        return run_request(self.engine, self.tokenizer, request, self._sampler)

    @_arguments_of(stream)
    def generate(self, *arguments: Any, **options: Any) -> GenerationResult:
        """Generate to the end.

        Args:
            prompt: text; token ids or a tensor [1, n] are taken for `input_ids`, a list of mappings for `messages`.
            attention_mask: as tokenizers return it with `input_ids`; all ones, as nothing is padded here.
            streamer: a transformers streamer (`put`, `end`).
            logits_processor: transformers LogitsProcessors, applied at every verified position on its own prefix.
            stopping_criteria: transformers StoppingCriteria, asked after every token.
            trace: write a Chrome trace (one lane per stage) to this file.
            policy: as for `set_policy`, from this request on; None: as it is.
            options: fields of `SamplingParams`; transformers' `do_sample`, `eos_token_id`, `stop_strings` too (and
                `pad_token_id`, which has no effect).

        Raises:
            ConfigError, ContextLengthError: before anything runs.
            TargetDiedError: the target's process died; call again to restart it.
        """
        *_, last = self.stream(*arguments, **options)
        if last.result is None:
            raise RuntimeError("a stream ended without a result")
        return last.result

    def submit(self, ids: Sequence[int], params: SamplingParams) -> RequestHandle:
        """Queue token ids and get the raw handle: for servers and tools that do their own text handling."""
        return self.engine.submit(ids, params, eos_token_ids=self._eos_token_ids)


def _load_tokenizer(plan: Plan) -> Any:
    if plan.target.is_emulated:
        return toy_tokenizer()
    from autopipe.core.models import load_tokenizer, resolve

    return load_tokenizer(resolve(plan.target.model), trust_remote_code=plan.target.trust_remote_code)


def _sampler(telemetry: bool | Sampler, opened: ExitStack) -> Sampler | None:
    """The sampler to use; one that is shared with the rest of the process is given back with `opened`."""
    if isinstance(telemetry, bool):
        if not telemetry:
            return None
        from autopipe.core.telemetry import SamplerLease

        lease = SamplerLease()
        opened.callback(lease.close)
        return lease.sampler
    return telemetry


def _as_list(criteria: Any) -> list[Callable[..., Any]]:
    if criteria is None:
        return []
    return list(criteria) if isinstance(criteria, Sequence) else [criteria]
