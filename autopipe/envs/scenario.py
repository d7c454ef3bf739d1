"""Scenarios: which pipeline, which work, and what goes wrong meanwhile. YAML files, see docs/envs.md."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from autopipe.core.config import UserModel, load_yaml
from autopipe.core.errors import ConfigError
from autopipe.core.plan import EmulatedStage, StagePlan
from autopipe.envs.config import MAX_DRAFTERS
from autopipe.envs.events import Event
from autopipe.envs.menu import DrafterOption, PlanMenu
from autopipe.envs.prompt_kinds import PromptKind

Share = Annotated[float, Field(ge=0, le=1)]
Agreement = dict[PromptKind, Share]
Curve = dict[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]]
GIGABYTE = 10**9


class StageModel(UserModel):
    """A stage as the simulator sees it.

    Attributes:
        ms: milliseconds of a forward by number of tokens; linear in between and beyond.
        prefill_ms_per_token: milliseconds of prefill per prompt token.
        ms_per_1k_context: milliseconds a forward takes longer per 1000 tokens of prompt.
        overhead_ms: milliseconds of a step beside the forward.
        memory_gb: memory it takes.
        power_w: power its device draws more while it computes.
    """

    ms: Curve = Field(min_length=1)
    prefill_ms_per_token: float = Field(default=0.0, ge=0)
    ms_per_1k_context: float = Field(default=0.0, ge=0)
    overhead_ms: float = Field(default=0.0, ge=0)
    memory_gb: float = Field(default=0.0, ge=0)
    power_w: float = Field(default=0.0, ge=0)


class DrafterModel(StageModel):
    """A drafter.

    Attributes:
        name: how plans name it.
        ngram: an n-gram drafter: it works in its consumer's process, and only as the first of a chain.
        agreement: chance to pick what the target picks, by prompt kind; `other` counts for kinds not listed.
        adapters: agreement with an adapter, by adapter name, then by kind.
        load_ms: from the decision to take it in until it is loaded; the old plan stays in force meanwhile.
        switch_ms: from then until it can compute, beside the prefill that it needs in any case.
        rollback_ms: what a rollback adds to its next step.
    """

    name: str = Field(min_length=1, max_length=80)
    ngram: bool = False
    agreement: Agreement = Field(min_length=1)
    adapters: dict[str, Agreement] = Field(default_factory=dict)
    load_ms: float = Field(default=0.0, ge=0)
    switch_ms: float = Field(default=0.0, ge=0)
    rollback_ms: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _covers_all_kinds(self) -> DrafterModel:
        for key, table in (("agreement", self.agreement), *((f"adapters.{n}", t) for n, t in self.adapters.items())):
            if PromptKind.OTHER not in table and len(table) < len(PromptKind):
                raise ConfigError(f"drafters.{self.name}.{key}", sorted(table), "all prompt kinds, or `other`")
        return self

    def agreement_on(self, kind: PromptKind, adapter: str = "") -> float:
        """Chance to pick what the target picks."""
        table = self.adapters.get(adapter, self.agreement)
        return table[kind] if kind in table else table[PromptKind.OTHER]


class PipelineModel(UserModel):
    """The models and the device of a scenario.

    Attributes:
        drafters: cheapest first.
        contention: factor by which any stage is slower for every other stage that computes beside it (async).
        wrong_equal: chance that two neighbours that both pick wrongly pick the same.
        persistence: chance that a position is as easy or hard as the one before it; 0: positions are independent.
        device_memory_gb: memory of the device; None: not known.
        idle_power_w, power_limit_w: power of the device when idle, and at most.
    """

    target: StageModel
    drafters: tuple[DrafterModel, ...] = Field(min_length=1, max_length=MAX_DRAFTERS)
    contention: float = Field(default=1.0, ge=1)
    wrong_equal: Share = 0.0
    persistence: float = Field(default=0.0, ge=0, lt=1)
    device_memory_gb: float | None = Field(default=None, gt=0)
    idle_power_w: float = Field(default=0.0, ge=0)
    power_limit_w: float | None = Field(default=None, gt=0)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of all adapters, in the order of their first mention."""
        return tuple(dict.fromkeys(name for drafter in self.drafters for name in drafter.adapters))

    @model_validator(mode="after")
    def _names_differ(self) -> PipelineModel:
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) < len(names) or "target" in names:
            raise ConfigError("pipeline.drafters", names, "different names, none of them `target`")
        for index, drafter in enumerate(self.drafters):
            if drafter.ngram and index > 0:
                raise ConfigError(f"pipeline.drafters.{index}.ngram", True, "only the first drafter")
        return self

    def menu(self) -> PlanMenu:
        """The same pipeline as plans of emulated stages, which the real engine can run."""
        return PlanMenu(
            target=StagePlan(model="emulated", name="target", emulated=_emulated(self.target, 1.0)),
            drafters=tuple(
                DrafterOption(
                    stage=StagePlan(model="ngram", name=drafter.name)
                    if drafter.ngram
                    else StagePlan(
                        model="emulated",
                        name=drafter.name,
                        emulated=_emulated(drafter, drafter.agreement_on(PromptKind.OTHER)),
                    ),
                    memory_bytes=int(drafter.memory_gb * GIGABYTE),
                    adapters={name: name for name in drafter.adapters},
                )
                for drafter in self.drafters
            ),
            adapters=self.adapters,
            target_memory_bytes=int(self.target.memory_gb * GIGABYTE),
            device_memory_bytes=None if self.device_memory_gb is None else int(self.device_memory_gb * GIGABYTE),
        )


class Range(UserModel):
    """A whole number drawn evenly from `low` to `high`."""

    low: int = Field(ge=1, le=1 << 20)
    high: int = Field(ge=1, le=1 << 20)

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ConfigError("low", self.low, f"at most high ({self.high})")
        return self


class Phase(UserModel):
    """A stretch of the work with one mix of prompts.

    Attributes:
        tokens: output tokens after which the next phase begins (with the next request).
        kinds: weight of each prompt kind.
        arrivals_per_s: mean rate of arriving requests; None: the next request arrives when the last is done.
        prompt_tokens, output_tokens: length of prompts and outputs.
    """

    tokens: int = Field(ge=1)
    kinds: dict[PromptKind, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    arrivals_per_s: float | None = Field(default=None, gt=0)
    prompt_tokens: Range = Range(low=64, high=512)
    output_tokens: Range = Range(low=128, high=512)

    @model_validator(mode="after")
    def _has_weight(self) -> Phase:
        if sum(self.kinds.values()) <= 0:
            raise ConfigError("kinds", {kind.value: weight for kind, weight in self.kinds.items()}, "a weight above 0")
        return self


class Scenario(UserModel):
    """One scenario.

    Attributes:
        phases: one after the other; the work is done, and an episode terminates, when the last has ended.
        cycles: how often the phases are gone through.
        events: what changes at which output token of the episode.
    """

    name: str = Field(min_length=1, max_length=80)
    description: str = ""
    pipeline: PipelineModel
    phases: tuple[Phase, ...] = Field(min_length=1)
    cycles: int = Field(default=1, ge=1)
    events: tuple[Event, ...] = ()

    @model_validator(mode="after")
    def _events_name_stages(self) -> Scenario:
        names = [drafter.name for drafter in self.pipeline.drafters]
        for index, event in enumerate(self.events):
            stage = getattr(event, "stage", None)
            allowed = names if event.type in ("drafter_dies", "drift") else [*names, "target"]
            if stage is not None and stage not in allowed:
                raise ConfigError(f"events.{index}.stage", stage, ", ".join(allowed))
        return self

    @property
    def total_tokens(self) -> int:
        """Output tokens of the whole work."""
        return self.cycles * sum(phase.tokens for phase in self.phases)

    @classmethod
    def load(cls, path: str | Path, key: str = "--scenario") -> Scenario:
        """Read a scenario from YAML.

        Raises:
            ConfigError: the file, or a key in it, is not right; the message names it.
        """
        return cls.parse(load_yaml(path, key), prefix=f"{key} ")


def scenario_names() -> list[str]:
    """Scenarios that ship with AutoPipe."""
    folder = resources.files("autopipe.envs") / "scenarios"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_scenario(name: str | Path) -> Scenario:
    """A shipped scenario by name, or any by its file (`FILE.yaml`).

    Raises:
        ConfigError: neither a shipped scenario nor a readable file.
    """
    if str(name) in scenario_names():
        folder = resources.files("autopipe.envs") / "scenarios"
        with resources.as_file(folder / f"{name}.yaml") as path:
            return Scenario.load(path)
    if Path(name).suffix in (".yaml", ".yml"):
        return Scenario.load(name)
    raise ConfigError("--scenario", str(name), f"a YAML file, or one of {', '.join(scenario_names())}")


def _emulated(stage: StageModel, agreement: float) -> EmulatedStage:
    return EmulatedStage(ms={n: ms for n, ms in stage.ms.items()}, agreement=agreement)
