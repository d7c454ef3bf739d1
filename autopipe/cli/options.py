"""From command-line options to a plan and sampling options. Nothing here loads a model.

Every error is a `ConfigError` whose key is the option as the user typed it, or the plan file's key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from autopipe.core.fewer_bits import in_fewer_bits
from autopipe.core.models.spec import resolve
from autopipe.core.ngram_shipped import SHIPPED_TABLES
from autopipe.core.plan import FEWER_BITS, MAX_STAGES, Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.inputs import require_text
from autopipe.plans import DEFAULT_PLAN_PATH

if TYPE_CHECKING:
    from autopipe.core.preflight import PlanInfo

NO_DRAFTER = "none"
"""`--drafter none`: the target alone."""
NGRAM_WINDOW = 11
"""Most drafts of an n-gram drafter made from options; it proposes as many of them as are likely to pay."""

_Model = TypeVar("_Model", bound=UserModel)
_Result = TypeVar("_Result")

_STAGE_KEY = re.compile(r"chain\.(\d+)\.(\w+)")
_OPTION_NAMES = {"num_logprobs": "--logprobs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says about the pipeline. None, or empty: as the plan has it."""

    plan: Path | None = None
    target: str | None = None
    drafters: Sequence[str] = ()
    mode: str | None = None
    windows: Sequence[int] = ()
    min_drafts: int | None = None
    verify_cap: int | None = None
    backend: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    adapter: str | None = None
    verification: str | None = None
    exact: bool | None = None
    warmup: str | None = None
    trust_remote_code: bool = False


def build_plan(options: PlanOptions) -> Plan:
    """The plan of `--plan` (or the shipped default) with the other options laid over it.

    `--target` without `--plan` drafts with an n-gram unless `--drafter` says otherwise.

    Raises:
        ConfigError: an option or a key of the plan file is not allowed.
    """
    base = Plan.load(options.plan if options.plan is not None else DEFAULT_PLAN_PATH)
    drafters, target = list(base.drafters), base.target
    if options.target is not None:
        target = _named("--target", lambda: StagePlan.parse({"model": options.target}))
        if options.plan is None:
            drafters = [_drafter("ngram@" + options.target if options.target in SHIPPED_TABLES else "ngram", target)]
    if options.drafters:
        names = [name for name in options.drafters if name != NO_DRAFTER]
        if names and len(names) < len(options.drafters):
            raise ConfigError("--drafter", list(options.drafters), f"{NO_DRAFTER!r} alone, or models")
        target = _with_target_options(target, options)
        drafters = [_drafter(name, target) for name in names]
    drafters = _with_windows(drafters, options.windows)
    chain = _with_stage_options([*drafters, target], options)
    if len(chain) > MAX_STAGES:
        raise ConfigError("--drafter", [stage.model for stage in drafters], f"at most {MAX_STAGES - 1} drafters")
    given = {key: getattr(options, key) for key in ("mode", "verification", "exact")}
    changes = {key: value for key, value in given.items() if value is not None}
    if options.warmup is not None:
        changes["warmup"] = {**base.warmup.model_dump(), "kind": options.warmup}
    _require_known_models(chain, options)
    try:
        return Plan.parse({**base.model_dump(), **changes, "chain": chain})
    except ConfigError as error:
        key = error.key.split(".")[0]
        name = "--" + key if key in changes else "--drafter" if key == "chain" == error.key else None
        name = name or option_of(error.key, options, len(chain)) or error.key
        raise ConfigError(name, error.value, error.allowed) from None


def option_of(key: str, options: PlanOptions, num_stages: int) -> str | None:
    """The option that set a plan's key, such as `chain.1.device`; None if it came from the plan file."""
    found = _STAGE_KEY.fullmatch(key)
    if found is None:
        return None
    is_target, name = int(found[1]) == num_stages - 1, found[2]
    if not is_target and _is_of_target(options, int(found[1])):
        own = {"model": options.target, "adapter": options.adapter}
        return "--drafter" if own.get(name) is None else "--target" if name == "model" else "--adapter"
    if name == "model":
        given = options.target is not None if is_target else bool(options.drafters)
        option = "--target" if is_target else "--drafter"
        return option if given or options.plan is None else None
    if name == "window":
        return "--window" if options.windows else None
    if name == "adapter" and not is_target:
        return "--drafter" if options.drafters else None
    given = getattr(options, name, None) is not None
    return "--" + name.replace("_", "-") if given else None


@contextmanager
def naming_options(options: PlanOptions, plan: Plan) -> Iterator[None]:
    """Let errors about `plan` name the options it was built from, where they name a key that an option set."""
    try:
        yield
    except ConfigError as error:
        option = option_of(error.key, options, len(plan.chain))
        if option is None:
            raise
        raise ConfigError(option, error.value, error.allowed) from None
    except (ModelLoadError, UnsupportedModelError) as error:
        key, colon, reason = str(error).partition(": ")
        option = option_of(key, options, len(plan.chain)) if colon else None
        if option is None:
            raise
        raise type(error)(f"{option}: {reason}") from None


def require_context(info: PlanInfo, sampling: SamplingParams) -> None:
    """Refuse `--max-new-tokens` that the target's context cannot hold, with even one token of prompt before it.

    Raises:
        ConfigError: it cannot.
    """
    limit = info.max_length
    if limit is not None and sampling.max_new_tokens >= limit:
        allowed = f"1 to {limit - 1}: the target's context holds {limit} tokens, prompt included"
        raise ConfigError("--max-new-tokens", sampling.max_new_tokens, allowed)


def build_sampling(**options: Any) -> SamplingParams:
    """Sampling options of a request; options that are None were not given.

    Raises:
        ConfigError: a value is not allowed; the key is the option's name.
    """
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    for text in given.get("stop", ()):
        require_text(text, "--stop")
    try:
        return SamplingParams.parse(given)
    except ConfigError as error:
        key = error.key.split(".")[0]
        name = _OPTION_NAMES.get(key, "--" + key.replace("_", "-"))
        raise ConfigError(name, error.value, error.allowed) from None


def _drafter(text: str, target: StagePlan) -> StagePlan:
    """`MODEL`; `MODEL@ADAPTER` for a drafter of the model's own layers; `ngram@TABLE`; `int4`: the target's weights."""
    if text in FEWER_BITS:
        return in_fewer_bits(target, text)
    model, at, second = text.partition("@")
    fields: dict[str, Any] = {"model": model}
    if model == "ngram":
        fields |= {"window": NGRAM_WINDOW, **({"ngram": {"table": second}} if at else {})}
    elif at:
        fields["adapter"] = second
    return _named("--drafter", lambda: StagePlan.parse(fields))


def _with_windows(drafters: list[StagePlan], windows: Sequence[int]) -> list[StagePlan]:
    if not windows:
        return drafters
    if not drafters:
        raise ConfigError("--window", list(windows), "only with a drafter: this pipeline is the target alone")
    if len(windows) == 1:
        windows = [windows[0]] * len(drafters)
    if len(windows) != len(drafters):
        raise ConfigError(
            "--window",
            list(windows),
            f"given once, or once for each of the {len(drafters)} drafters, in their order",
        )
    return [_replace(stage, "--window", window=size) for stage, size in zip(drafters, windows, strict=True)]


def _is_of_target(options: PlanOptions, index: int) -> bool:
    """Whether the drafter at this place is the target in fewer bits, by `--drafter`."""
    return index < len(options.drafters) and options.drafters[index] in FEWER_BITS


def _with_target_options(target: StagePlan, options: PlanOptions) -> StagePlan:
    """The target as the options have it, for drafters that are made of it."""
    return _with_stage_options([target], replace(options, min_drafts=None, verify_cap=None))[0]


def _with_stage_options(chain: list[StagePlan], options: PlanOptions) -> list[StagePlan]:
    """Options that concern every neural stage, or every verifier."""
    for key in ("min_drafts", "verify_cap"):
        if len(chain) == 1 and getattr(options, key) is not None:
            allowed = "only with a drafter: this pipeline is the target alone"
            raise ConfigError("--" + key.replace("_", "-"), getattr(options, key), allowed)
    for index, stage in enumerate(chain):
        if not stage.is_ngram:
            is_drafter = index + 1 < len(chain)
            for key in ("backend", "dtype", "device", "threads"):
                value = getattr(options, key)
                if key == "backend" and is_drafter and stage.adapter is not None:
                    continue  # a drafter of the model's own layers has but one backend
                if key in ("backend", "dtype") and is_drafter and _is_of_target(options, index):
                    continue  # its bits are what it is there for, and it wants the fastest backend for them
                if value is not None:
                    stage = _replace(stage, f"--{key}", **{key: value})
            if options.trust_remote_code:
                stage = stage.replace(trust_remote_code=True)
        if index > 0:
            for key in ("min_drafts", "verify_cap"):
                value = getattr(options, key)
                if value is not None:
                    stage = _replace(stage, "--" + key.replace("_", "-"), **{key: value})
        chain[index] = stage
    if options.adapter is not None:
        chain[-1] = _replace(chain[-1], "--adapter", adapter=options.adapter)
    return chain


def _require_known_models(chain: list[StagePlan], options: PlanOptions) -> None:
    """Look every model up on the local disk, so that a misspelt path fails before any weights load.

    The target first: drafters may be made of it.
    """
    for index, stage in reversed(list(enumerate(chain))):
        if stage.is_ngram or stage.is_emulated:
            continue
        key = f"chain.{index}.model"
        resolve(stage.model, option_of(key, options, len(chain)) or key)


def _replace(model: _Model, option: str, **changes: Any) -> _Model:
    return _named(option, lambda: model.replace(**changes))


def _named(option: str, build: Callable[[], _Result]) -> _Result:
    """Run `build`; its `ConfigError` gets the option's name for a key, so that the user finds it again."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError(option, error.value, error.allowed) from None
