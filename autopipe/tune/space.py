"""The space that is searched: every parameter of every plan over some drafters and a target.

It is flat: every trial has all parameters, those of a drafter that is left out among them. So any of Optuna's samplers
can model it, and importances are of all trials. Parameters that do not matter are dropped when the plan is built, and
plans that differ in nothing else are the same plan.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopipe.core.plan import MAX_STAGES, Mode, NgramOptions, Plan, StagePlan, Warmup, WarmupKind, WhenShort

if TYPE_CHECKING:
    from optuna.trial import Trial

NGRAM = "ngram"
MAX_NGRAM_WINDOW = 24
MAX_NEURAL_WINDOW = 64
MAX_MIN_DRAFTS = 16
NGRAM_MAX_ORDERS = (4, 6, 8)
NGRAM_MIN_ORDERS = (1, 2)
"""Few: each pair is replayed over all outputs once, which takes a second."""
VERIFY_CAPS = (8, 16, 32, 128)
NO_TABLE = "none"

Params = Mapping[str, Any]


class TooDeepError(Exception):
    """More drafters than a chain can have."""


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen.

    Attributes:
        target: the target's stage.
        drafters: neural drafters, cheapest first, with distinct names.
        tables: learned n-gram tables that may be used; the request's own text alone always may.
        threads: thread counts that were measured.
        cores: cores that this process may use.
        base: whose `exact` and `verification` every plan has.
    """

    target: StagePlan
    drafters: tuple[StagePlan, ...] = ()
    tables: tuple[str, ...] = ()
    threads: tuple[int, ...] = (1,)
    cores: tuple[int, ...] = (0,)
    base: Plan | None = field(default=None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the neural drafters."""
        return tuple(stage.name or stage.model for stage in self.drafters)

    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Have a trial choose every parameter."""
        choose = trial.suggest_categorical
        params: dict[str, Any] = {f"use.{NGRAM}": choose(f"use.{NGRAM}", [False, True])}
        params[f"window.{NGRAM}"] = trial.suggest_int(f"window.{NGRAM}", 1, MAX_NGRAM_WINDOW)
        params["ngram.gate"] = choose("ngram.gate", [False, True])
        params["ngram.max_order"] = choose("ngram.max_order", list(NGRAM_MAX_ORDERS))
        params["ngram.min_order"] = choose("ngram.min_order", list(NGRAM_MIN_ORDERS))
        if self.tables:
            params["ngram.table"] = choose("ngram.table", [NO_TABLE, *self.tables])
        params["verify_cap"] = choose("verify_cap", list(VERIFY_CAPS))
        params["warmup"] = choose("warmup", [kind.value for kind in WarmupKind])
        params["warmup.start_window"] = trial.suggest_int("warmup.start_window", 1, 4)
        for name in self.names:
            params[f"use.{name}"] = choose(f"use.{name}", [False, True])
            params[f"window.{name}"] = trial.suggest_int(f"window.{name}", 1, MAX_NEURAL_WINDOW, log=True)
        if self.drafters:
            params["mode"] = choose("mode", [Mode.LOCKSTEP.value, Mode.ASYNC.value])
            params["when_short"] = choose("when_short", [each.value for each in WhenShort])
            params["min_drafts"] = trial.suggest_int("min_drafts", 0, MAX_MIN_DRAFTS)
            if len(self.drafters) > 1:
                params["min_drafts.drafters"] = trial.suggest_int("min_drafts.drafters", 0, MAX_MIN_DRAFTS)
            if len(self.cores) > 1:
                params["cores"] = choose("cores", ["shared", "split"])
        if len(self.threads) > 1:
            for name in (*self.names, "target"):
                params[f"threads.{name}"] = choose(f"threads.{name}", [0, *self.threads])
        return params

    def defaults(self) -> dict[str, Any]:
        """Parameters of plain decoding; those that do not matter to it are as a plan has them by default."""
        options, warmup = NgramOptions(), Warmup()
        params: dict[str, Any] = {
            f"use.{NGRAM}": False,
            f"window.{NGRAM}": 7,
            "ngram.gate": options.gate,
            "ngram.max_order": options.max_order,
            "ngram.min_order": options.min_order,
            "verify_cap": VERIFY_CAPS[-1],
            "warmup": warmup.kind.value,
            "warmup.start_window": warmup.start_window,
        }
        if self.tables:
            params["ngram.table"] = NO_TABLE
        for name in self.names:
            params |= {f"use.{name}": False, f"window.{name}": 4}
        if self.drafters:
            params |= {"mode": Mode.LOCKSTEP.value, "when_short": WhenShort.WAIT.value, "min_drafts": 1}
            if len(self.drafters) > 1:
                params["min_drafts.drafters"] = 1
            if len(self.cores) > 1:
                params["cores"] = "shared"
        if len(self.threads) > 1:
            params |= {f"threads.{name}": 0 for name in (*self.names, "target")}
        return params

    def first_params(self) -> list[dict[str, Any]]:
        """Plain decoding, and plans that are often good: what a search begins with."""
        plain = self.defaults()
        found = [plain]
        for table in (NO_TABLE, *self.tables) if self.tables else (None,):
            for window in (3, 7, 11):  # the last is the shipped default plan's
                ngram = {**plain, f"use.{NGRAM}": True, f"window.{NGRAM}": window}
                found.append(ngram if table is None else {**ngram, "ngram.table": table})
        for name in self.names:
            alone = {**plain, f"use.{name}": True}
            behind = {**found[-1], f"use.{name}": True}
            found += [alone, {**alone, "mode": Mode.ASYNC.value}, behind]
        return found

    def plan(self, params: Params) -> Plan:
        """The plan of these parameters; equal for parameters that differ only where it does not matter.

        Raises:
            TooDeepError: more drafters than a chain can have.
        """
        chosen = [stage for stage, name in zip(self.drafters, self.names, strict=True) if params[f"use.{name}"]]
        has_ngram = bool(params[f"use.{NGRAM}"])
        if len(chosen) + has_ngram >= MAX_STAGES:
            raise TooDeepError(f"{len(chosen) + has_ngram} drafters; at most {MAX_STAGES - 1}")
        base: dict[str, Any] = self.base.model_dump(include={"exact", "verification"}) if self.base else {}
        if not chosen and not has_ngram:
            target = self._stage(self.target, "target", params, None, Mode.PLAIN, 1, None)
            return Plan.parse({**base, "mode": Mode.PLAIN, "chain": [target]})
        # With one neural stage there is nobody to take turns with: both modes are the same work.
        mode = Mode(params["mode"]) if chosen else Mode.LOCKSTEP
        chain: list[StagePlan] = [self._ngram(params)] if has_ngram else []
        names = [*(str(stage.name or stage.model) for stage in chosen), "target"]
        own = self._own_cores(params, names, mode)
        for stage, name, cores in zip([*chosen, self.target], names, own, strict=True):
            upstream = chain[-1] if chain else None
            chain.append(self._stage(stage, name, params, upstream, mode, len(names), cores))
        return Plan.parse({**base, "mode": mode, "chain": chain, "warmup": self._warmup(params, chain)})

    def _ngram(self, params: Params) -> StagePlan:
        table = params.get("ngram.table", NO_TABLE)
        options = {
            "max_order": params["ngram.max_order"],
            "min_order": params["ngram.min_order"],
            "gate": params["ngram.gate"],
            "table": None if table == NO_TABLE else table,
        }
        return StagePlan.parse({"model": NGRAM, "window": params[f"window.{NGRAM}"], "ngram": options})

    def _stage(
        self,
        stage: StagePlan,
        name: str,
        params: Params,
        upstream: StagePlan | None,
        mode: Mode,
        num_neural: int,
        cores: tuple[int, ...] | None,
    ) -> StagePlan:
        """A neural stage behind `upstream`, one of `num_neural`; `cores`: of its own."""
        changes: dict[str, Any] = {}
        if name != "target":
            changes["window"] = params[f"window.{name}"]
        if upstream is not None and params["verify_cap"] < upstream.window:
            changes["verify_cap"] = params["verify_cap"]
        if mode is Mode.ASYNC and upstream is not None and not upstream.is_ngram:
            wanted = params["min_drafts"] if name == "target" else params.get("min_drafts.drafters", 1)
            changes["min_drafts"] = min(wanted, upstream.window)
            if changes["min_drafts"] > 0:
                changes["when_short"] = params["when_short"]
        threads = params.get(f"threads.{name}", 0)
        if cores is not None:
            changes["cores"] = cores
            threads = min(threads, len(cores)) if threads else len(cores)
        if threads and not self._is_default(threads, mode, num_neural):
            changes["threads"] = threads
        return stage.replace(**changes) if changes else stage

    def _own_cores(self, params: Params, names: Sequence[str], mode: Mode) -> list[tuple[int, ...] | None]:
        """Cores of each neural stage alone: as many as it has threads where that is said of all and they are enough,
        else as equal parts as can be, of which the last (the target's) get what is over; None: all cores are shared."""
        if mode is not Mode.ASYNC or params.get("cores") != "split" or len(self.cores) < len(names):
            return [None] * len(names)
        sizes = [params.get(f"threads.{name}", 0) for name in names]
        if not all(sizes) or sum(sizes) > len(self.cores):
            small, over = divmod(len(self.cores), len(names))
            sizes = [small + (place >= len(names) - over) for place in range(len(names))]
        ends = list(itertools.accumulate(sizes))
        return [self.cores[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _is_default(self, threads: int, mode: Mode, num_neural: int) -> bool:
        """Whether a stage would have so many threads without being told."""
        return threads == max(1, len(self.cores) // (num_neural if mode is Mode.ASYNC else 1))

    @staticmethod
    def _warmup(params: Params, chain: list[StagePlan]) -> dict[str, Any]:
        kind, start = WarmupKind(params["warmup"]), params["warmup.start_window"]
        if kind is WarmupKind.NONE or start >= max(stage.window for stage in chain[:-1]):
            return {}
        return {"kind": kind, "start_window": start}


def plan_key(plan: Plan) -> str:
    """Equal for equal plans."""
    return json.dumps(plan.model_dump(mode="json", exclude={"tuned"}), sort_keys=True)


def structure(plan: Plan) -> str:
    """Chain and mode in a few words: `ngram > small > target, async`."""
    if plan.mode is Mode.PLAIN or not plan.drafters:
        return "plain"
    names = [name + _table_mark(stage) for name, stage in zip(plan.names(), plan.chain, strict=True)]
    return f"{' > '.join(names)}, {plan.mode.value}"


def _table_mark(stage: StagePlan) -> str:
    return "+table" if stage.is_ngram and stage.ngram_options().table else ""
