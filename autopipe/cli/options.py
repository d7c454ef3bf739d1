"""From command-line options to a plan and sampling options. Nothing here loads a model.

Every error is a `ConfigError` whose key is the option as the user typed it, or the plan file's key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.core.models.spec import resolve
from autopipe.core.plan import MAX_STAGES, Plan, StagePlan
from autopipe.core.sampling import SamplingParams
from autopipe.plans import DEFAULT_PLAN_PATH

NO_DRAFTER = "none"
"""`--drafter none`: the target alone."""
NGRAM_WINDOW = 7
"""Most drafts of an n-gram drafter made from options; it proposes as many of them as are likely to pay."""

_Model = TypeVar("_Model", bound=UserModel)
_Result = TypeVar("_Result")

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
            drafters = [_drafter("ngram")]
    if options.drafters:
        names = [name for name in options.drafters if name != NO_DRAFTER]
        if names and len(names) < len(options.drafters):
            raise ConfigError("--drafter", list(options.drafters), f"{NO_DRAFTER!r} alone, or models")
        drafters = [_drafter(name) for name in names]
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
        name = "--" + key if key in changes else "--drafter" if key == "chain" == error.key else error.key
        raise ConfigError(name, error.value, error.allowed) from None


def build_sampling(**options: Any) -> SamplingParams:
    """Sampling options of a request; options that are None were not given.

    Raises:
        ConfigError: a value is not allowed; the key is the option's name.
    """
    given = {key: value for key, value in options.items() if value is not None and value != ()}
    try:
        params = SamplingParams.parse(given)
    except ConfigError as error:
        key = error.key.split(".")[0]
        name = _OPTION_NAMES.get(key, "--" + key.replace("_", "-"))
        raise ConfigError(name, error.value, error.allowed) from None
    if params.min_new_tokens > params.max_new_tokens:
        raise ConfigError("--min-new-tokens", params.min_new_tokens, f"0 to --max-new-tokens ({params.max_new_tokens})")
    return params


def _drafter(model: str) -> StagePlan:
    fields: dict[str, Any] = {"model": model}
    if model == "ngram":
        fields["window"] = NGRAM_WINDOW
    return _named("--drafter", lambda: StagePlan.parse(fields))


def _with_windows(drafters: list[StagePlan], windows: Sequence[int]) -> list[StagePlan]:
    if not windows:
        return drafters
    if len(windows) == 1:
        windows = [windows[0]] * len(drafters)
    if len(windows) != len(drafters):
        raise ConfigError(
            "--window",
            list(windows),
            f"given once, or once for each of the {len(drafters)} drafters, in their order",
        )
    return [_replace(stage, "--window", window=size) for stage, size in zip(drafters, windows, strict=True)]


def _with_stage_options(chain: list[StagePlan], options: PlanOptions) -> list[StagePlan]:
    """Options that concern every neural stage, or every verifier."""
    for index, stage in enumerate(chain):
        if not stage.is_ngram:
            for key in ("backend", "dtype", "device", "threads"):
                value = getattr(options, key)
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
    """Look every model up on the local disk, so that a misspelt path fails before any weights load."""
    for index, stage in enumerate(chain):
        if stage.is_ngram or stage.is_emulated:
            continue
        is_target = index == len(chain) - 1
        from_option = options.target is not None if is_target else bool(options.drafters)
        option = "--target" if is_target else "--drafter"
        resolve(stage.model, option if from_option else f"chain.{index}.model")


def _replace(model: _Model, option: str, **changes: Any) -> _Model:
    return _named(option, lambda: model.replace(**changes))


def _named(option: str, build: Callable[[], _Result]) -> _Result:
    """Run `build`; its `ConfigError` gets the option's name for a key, so that the user finds it again."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError(option, error.value, error.allowed) from None
