"""What a call of `tune` is asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.core.ngram_shipped import table_path
from autopipe.core.plan import Plan, StagePlan
from autopipe.tune.budget import parse_budget
from autopipe.tune.candidates import (
    NGRAM,
    named,
    own_drafters,
    parse_drafter,
    shipped_drafters,
    shipped_tables,
    with_precisions,
)
from autopipe.tune.limits import MEMORY_SHARE, Limits
from autopipe.tune.objective import Objective
from autopipe.tune.samplers import SamplerName

DEFAULT_WORKLOAD = ("humaneval:12", "chat:12")
DEFAULT_BUDGET_S = 600.0
DEFAULT_OUT = Path("plan.yaml")
REPORT_NAME = "report.html"
_MOST_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Everything that may be asked for; checked when it is made.

    Attributes:
        base: its target is tuned for; `exact` and `verification` are kept.
        drafters: neural drafters that may be used, with distinct names. An n-gram drafter always may.
        tables: learned n-gram tables that may be used.
        workload: prompt sets. max_new_tokens: longest output per prompt.
        num_trials: of the simulated search, all workers together; None: as many as its time allows.
        storage: URL of the studies; None: in memory. study_name: None: made from what is tuned.
        fresh: measure the profile anew. check_live: false: believe the simulator.
        out: the plan's file. report: the report's; its pictures lie beside it. None: not written.
    """

    base: Plan
    drafters: tuple[StagePlan, ...] = ()
    tables: tuple[str, ...] = ()
    workload: tuple[str, ...] = DEFAULT_WORKLOAD
    max_new_tokens: int = 128
    objective: Objective = Objective.THROUGHPUT
    limits: Limits = field(default_factory=Limits)
    budget_s: float = DEFAULT_BUDGET_S
    num_trials: int | None = None
    sampler: SamplerName = SamplerName.TPE
    seed: int = 0
    workers: int = 1
    storage: str | None = None
    study_name: str | None = None
    fresh: bool = False
    check_live: bool = True
    out: Path | None = DEFAULT_OUT
    report: Path | None = Path(REPORT_NAME)

    def __post_init__(self) -> None:
        if not self.workload:
            raise ConfigError("--workload", [], "at least one prompt set")
        if self.num_trials is not None and not 0 <= self.num_trials <= 1_000_000:
            raise ConfigError("--trials", self.num_trials, "0 to 1000000; 0: those that earlier calls left")
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise ConfigError("--workers", self.workers, f"1 to {_MOST_WORKERS}")
        if self.workers > 1 and self.storage is None:
            raise ConfigError("--workers", self.workers, "1, or a --storage that several processes can share")
        if self.max_new_tokens < 2:
            raise ConfigError("--max-new-tokens", self.max_new_tokens, "2 or more")
        if self.study_name is not None and not self.study_name.strip():
            raise ConfigError("--study-name", self.study_name, "a name")
        for table in self.tables:
            if not table_path(table).is_file():
                raise ConfigError("--table", table, "a learned n-gram table (see `autopipe drafts ngram`)")

    @classmethod
    def make(
        cls,
        base: Plan,
        *,
        drafters: Sequence[str | StagePlan] | None = None,
        tables: Sequence[str | Path] | None = None,
        precisions: Sequence[str] = (),
        workload: str | Sequence[str] = DEFAULT_WORKLOAD,
        objective: str = Objective.THROUGHPUT.value,
        budget: str | float = DEFAULT_BUDGET_S,
        sampler: str = SamplerName.TPE.value,
        memory_share: float = MEMORY_SHARE,
        memory_limits: Mapping[str, int] | None = None,
        max_ms_per_token: float | None = None,
        max_ttft_ms: float | None = None,
        max_j_per_token: float | None = None,
        **others: Any,
    ) -> TuneOptions:
        """Options as people write them.

        Args:
            base: a plan; its drafters and its n-gram table may be used too.
            drafters: more of them: names, `MODEL,adapter=FOLDER,dtype=fp32`, `int4` and `int8` for the target's own
                weights in fewer bits, or stages; `ngram` and `none` add none. None: the one that comes with AutoPipe
                for this target, if any, `int4` and `int8`.
            tables: more learned tables; None: likewise.
            precisions: each drafter is tried in each of these dtypes.
            budget: `90s`, `10m`, `1h30m`, or seconds.
            others: fields of this class.

        Raises:
            ConfigError: a value that is not allowed; the key is the option's.
        """
        own = [stage for stage in base.drafters if not stage.is_ngram]
        added = [
            parse_drafter(each, base.target) if isinstance(each, str) else each
            for each in (_usual(base.target, own) if drafters is None else drafters)
            if each not in (NGRAM, "none")
        ]
        first = base.chain[0]
        table = first.ngram_options().table if first.is_ngram else None
        more = shipped_tables(base.target) if tables is None else map(str, tables)
        return cls(
            base=base,
            drafters=tuple(named(with_precisions([*own, *added], precisions))),
            tables=tuple(dict.fromkeys([*([table] if table else []), *more])),
            workload=(workload,) if isinstance(workload, str) else tuple(workload),
            objective=_choice("--objective", objective, Objective),
            budget_s=parse_budget(budget) if isinstance(budget, str) else parse_budget(str(float(budget))),
            sampler=_choice("--sampler", sampler, SamplerName),
            limits=Limits(
                memory_share=memory_share,
                memory_bytes=dict(memory_limits or {}),
                ms_per_token=max_ms_per_token,
                ttft_s=None if max_ttft_ms is None else max_ttft_ms / 1e3,
                j_per_token=max_j_per_token,
            ),
            **others,
        )


def _usual(target: StagePlan, own: Sequence[StagePlan]) -> list[StagePlan]:
    """Drafters that need no naming, but for those that the plan has already."""
    found = [*shipped_drafters(target), *own_drafters(target)]
    return [stage for stage in found if all(stage.identity() != other.identity() for other in own)]


def _choice(key: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(key, value, ", ".join(kind)) from None
