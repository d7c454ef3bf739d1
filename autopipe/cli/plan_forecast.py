"""What `autopipe plan` does, without the terminal's tables: from options to a placement and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopipe.cli.options import NO_DRAFTER
from autopipe.core.backends.quantised import is_exact
from autopipe.core.errors import ConfigError
from autopipe.core.fewer_bits import in_fewer_bits
from autopipe.core.placement import (
    Candidate,
    Hardware,
    Placement,
    StagePlacement,
    apply_placement,
    device_map,
    load_hardware,
    local_hardware,
    place,
    rebalance,
    sizes_of,
)
from autopipe.core.plan import FEWER_BITS, MAX_STAGES, Dtype, Mode, Plan, StagePlan
from autopipe.plans import DEFAULT_PLAN_PATH
from autopipe.profile.forecast import (
    ASSUMED_AGREEMENT,
    Prediction,
    curves_from_profile,
    forecast,
    known_agreement,
    predicted_speed,
    resolved_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line says. None, or empty: the default."""

    hardware: str | None = None
    plan: Path | None = None
    target: str | None = None
    drafters: tuple[str, ...] = ()
    target_dtype: str | None = None
    drafter_dtype: str | None = None
    agreement: tuple[float, ...] = ()
    profile: Path | None = None
    context: int = 4096
    share: float = 0.8
    output_tokens: int = 2000
    rebalance: bool = True


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer. `plan`: the chain as asked for; `predictions`: best first."""

    plan: Plan
    placement: Placement
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]

    def best_plan(self) -> Plan:
        """The fastest prediction as a plan, with its devices; a plan with an n-gram, of which nothing was predicted,
        as it is."""
        best = self.predictions[0]
        placed = apply_placement(self.plan, self.placement)
        if any(stage.is_ngram for stage in placed.chain):
            return placed
        stages = dict(zip(placed.names(), placed.chain, strict=True))
        chain: list[StagePlan] = []
        for index, name in enumerate(best.stages):
            changes: dict[str, Any] = {"name": name}
            if index < len(best.settings.windows):
                changes["window"] = best.settings.windows[index]
            if best.mode is Mode.ASYNC and index > 0:
                is_target = index + 1 == len(best.stages)
                changes["min_drafts"] = best.settings.min_drafts if is_target else 0
                changes["when_short"] = best.settings.when_short if is_target else stages[name].when_short
            chain.append(stages[name].replace(**changes))
        return placed.replace(chain=chain, mode=best.mode)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes and milliseconds."""
        placement = self.placement
        return {
            "hardware": placement.hardware.name,
            "context": placement.context,
            "memory_share": placement.share,
            "devices": [
                {
                    "name": device.name,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "budget_bytes": placement.budget(device),
                    "used_bytes": placement.used(device),
                }
                for device in placement.hardware.devices
            ],
            "stages": [
                {
                    "name": stage.name,
                    "model": stage.candidate.sizes.name,
                    "parameters": stage.candidate.sizes.num_parameters,
                    "dtype": stage.candidate.dtype.value,
                    "parts": [{"device": part.device.name, "layers": part.num_layers} for part in stage.parts],
                    "memory_bytes": {
                        name: {**asdict(use), "total": use.total}
                        for name, use in stage.memory(placement.context).items()
                    },
                    "device_map": device_map(stage) if len(stage.parts) > 1 else None,
                    "ms": {str(n): 1e3 * s for n, s in placement.latency(stage).seconds.items()},
                    "estimated": placement.latency(stage).estimated,
                    "source": placement.latency(stage).source,
                }
                for stage in placement.stages
            ],
            "predictions": [
                {
                    "name": each.name,
                    "mode": each.mode.value,
                    "stages": list(each.stages),
                    "windows": list(each.settings.windows),
                    "min_drafts": each.settings.min_drafts,
                    "when_short": each.settings.when_short.value,
                    "ms_per_token": each.ms_per_token,
                    "tokens_per_s": each.tokens_per_s,
                    "speedup_over_plain": each.speedup_over_plain,
                    "acceptance_length": each.acceptance_length,
                    "estimated": each.estimated,
                }
                for each in self.predictions
            ],
            "notes": [*placement.notes, *self.notes],
            "plan": self.best_plan().model_dump(mode="json", exclude_defaults=True),
        }


def make_forecast(request: PlanRequest, *, check_models: bool) -> Forecast:
    """Place and predict.

    Args:
        check_models: the models must be on this machine, and able to run on it.

    Raises:
        ConfigError: an option is not allowed, or a model's sizes are not known.
        PlacementError: the chain does not fit.
    """
    if not 1 <= request.context <= 1 << 20:
        raise ConfigError("--context", request.context, f"1 to {1 << 20}")
    if not 0 < request.share <= 1:
        raise ConfigError("--memory-share", request.share, "above 0, up to 1")
    if not 1 <= request.output_tokens <= 100_000:
        raise ConfigError("--output-tokens", request.output_tokens, "1 to 100000")
    plan = _plan(request)
    if check_models:
        from autopipe.core.preflight import inspect_plan

        inspect_plan(plan)
    hardware = _hardware(request)
    names = dict(zip(plan.names(), plan.chain, strict=True))
    neural = {name: stage for name, stage in names.items() if not stage.is_ngram}
    candidates = [
        Candidate(
            name,
            sizes_of(_location(stage.model, check_models), _key(request, stage)),
            resolved_dtype(stage.dtype),
            stage.backend,
        )
        for name, stage in neural.items()
    ]
    longest = [c.sizes.max_length for c in candidates if c.sizes.max_length is not None]
    context = min([request.context, *longest])
    placement = place(hardware, candidates, context=context, share=request.share)
    notes = [] if context == request.context else [f"the models' context holds {context} tokens"]
    if request.profile is not None and request.hardware is not None:
        notes.append(f"latencies of models in {request.profile.name} are those of the machine it was measured on")
    agreement = {**known_agreement(placement), **_given_agreement(request, list(neural)[:-1])}
    for name in list(neural)[:-1]:
        if name not in agreement:
            notes.append(
                f"{name}: agreement with the target is not known, {ASSUMED_AGREEMENT} is assumed; measure it with "
                "`autopipe profile`, or give --agreement"
            )
    if len(neural) < len(names):
        notes.append("the n-gram drafter is left out of the prediction: what it brings depends on the text")
    with _progress() as advance:
        if request.rebalance and len(hardware.devices) > 1:
            advance("moving layers")
            placement, _ = rebalance(placement, lambda each: predicted_speed(each, agreement))
        predictions = forecast(placement, agreement, output_tokens=request.output_tokens, advance=advance)
    if plan.exact and not _can_be_exact(placement.stages[-1]):
        plan = plan.replace(exact=False)
        notes.append("exact: false, since 4 bits on a GPU do not round alike in blocks and alone")
    return Forecast(plan, placement, tuple(predictions), tuple(notes))


def _can_be_exact(target: StagePlacement) -> bool:
    """Whether a target, where it is placed, can give plain decoding's bits: see `core.preflight`."""
    return is_exact(target.candidate.dtype) or all(part.device.name == "cpu" for part in target.parts)


def _plan(request: PlanRequest) -> Plan:
    """The chain of --plan, --target and --drafter. Hub ids are not looked up."""
    base = Plan.load(request.plan if request.plan is not None else DEFAULT_PLAN_PATH)
    drafters, target = list(base.drafters), base.target
    if request.target is not None:
        target = StagePlan.parse({"model": request.target}, prefix="--target: ")
        if request.plan is None:
            drafters = []
    if request.target_dtype is not None:
        target = target.replace(dtype=_dtype(request.target_dtype, "--target-dtype"))
    dtype = None if request.drafter_dtype is None else _dtype(request.drafter_dtype, "--drafter-dtype")
    drafters = [_in_dtype(stage, dtype) for stage in drafters]
    if request.drafters:
        drafters = [_drafter(model, target, dtype) for model in request.drafters if model != NO_DRAFTER]
    if len(drafters) >= MAX_STAGES:
        raise ConfigError("--drafter", list(request.drafters), f"at most {MAX_STAGES - 1} drafters")
    if target.is_emulated:
        raise ConfigError(
            "--plan", "emulated stages", "a chain of real models; `autopipe simulate` takes emulated ones"
        )
    return base.replace(chain=[*drafters, target])


def _drafter(model: str, target: StagePlan, dtype: Dtype | None) -> StagePlan:
    if model in FEWER_BITS:
        return in_fewer_bits(target, model)
    return _in_dtype(StagePlan.parse({"model": model}, prefix="--drafter: "), dtype)


def _in_dtype(stage: StagePlan, dtype: Dtype | None) -> StagePlan:
    return stage if dtype is None or stage.is_ngram else stage.replace(dtype=dtype)


def _dtype(value: str, key: str) -> Dtype:
    try:
        return Dtype(value)
    except ValueError:
        raise ConfigError(key, value, ", ".join(Dtype)) from None


def _hardware(request: PlanRequest) -> Hardware:
    hardware = local_hardware() if request.hardware is None else load_hardware(request.hardware)
    if request.profile is None:
        return hardware
    from autopipe.profile import Profile

    curves = curves_from_profile(Profile.load(request.profile), f"profile {request.profile.name}")
    return hardware.replace(curves=(*curves, *hardware.curves))


def _location(model: str, check_models: bool) -> str:
    """Where sizes can be read: a folder for what is on this machine, else the name itself."""
    if not check_models:
        return model
    from autopipe.core.models.loading import local_folder
    from autopipe.core.models.spec import resolve

    return str(local_folder(resolve(model), weights=False))


def _key(request: PlanRequest, stage: StagePlan) -> str:
    if stage.model == request.target:
        return "--target"
    return "--drafter" if stage.model in request.drafters else "model"


def _given_agreement(request: PlanRequest, drafters: list[str]) -> dict[str, float]:
    if not request.agreement:
        return {}
    for rate in request.agreement:
        if not 0 <= rate <= 1:
            raise ConfigError("--agreement", rate, "0 to 1")
    if len(request.agreement) != len(drafters):
        allowed = f"given once for each drafter, in their order ({', '.join(drafters) or 'there is none'})"
        raise ConfigError("--agreement", list(request.agreement), allowed)
    return dict(zip(drafters, request.agreement, strict=True))


@contextmanager
def _progress() -> Iterator[Any]:
    """What is being predicted, on a terminal's stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    with console.status("predicting") as status:
        yield lambda name: status.update(f"predicting {name}")
