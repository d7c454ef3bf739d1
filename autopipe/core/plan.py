"""A plan: everything a user or a policy may choose about a pipeline.

mode: lockstep
chain:                       # cheapest drafter first, the target last
  - {model: ngram, window: 7}
  - {model: smollm2-135m, dtype: bf16}
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from autopipe.core.config import UserModel, load_yaml
from autopipe.core.errors import ConfigError
from autopipe.core.tuned import Tuned

MAX_STAGES = 5
MAX_WINDOW = 128


class Mode(StrEnum):
    """How the stages of a chain take turns."""

    PLAIN = "plain"
    """The target alone; drafters stay loaded, but idle."""
    LOCKSTEP = "lockstep"
    """One stage computes at a time: draft a full window, then verify it."""
    ASYNC = "async"
    """PipeSpec: every stage runs ahead optimistically and rolls back when corrected."""


class Verification(StrEnum):
    EQUALITY = "equality"
    REJECTION = "rejection"


class BackendName(StrEnum):
    AUTO = "auto"
    FUSED = "fused"
    TRANSFORMERS = "transformers"
    NGRAM = "ngram"
    EMULATED = "emulated"


class Dtype(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    """Weights in 8 bits. As a target's it changes the output (`autopipe bench` says how much); never part of `auto`."""
    INT4 = "int4"


FEWER_BITS = (Dtype.INT8, Dtype.INT4)
"""Weights quantised as they load; never what `auto` stands for."""


class StreamPriority(StrEnum):
    HIGH = "high"
    LOW = "low"


class WhenShort(StrEnum):
    WAIT = "wait"
    STEP = "step"


class WarmupKind(StrEnum):
    NONE = "none"
    CONSERVATIVE = "conservative"
    PROGRESSIVE = "progressive"


class EmulatedStage(UserModel):
    """A stage made of a latency curve and an acceptance rate.

    Attributes:
        ms: milliseconds of a forward by number of tokens, e.g. {1: 123.7, 2: 427}; the largest key <= n counts.
        agreement: chance that this stage picks what the target picks, per position. Nested: where a stage with a
            smaller figure agrees, so does this one. 1 for the target.
        trace: instead of `agreement`, recorded agreement by position (repeated when the text is longer).
        vocab_size: size of the toy vocabulary.
        seed: seed of text and agreement; the same in every stage of a chain.
        prefill_ms: milliseconds of a prefill of any length; None: as one forward.
        max_length: longest sequence in tokens.
        fail_after, hang_after: raise, or hang, in this forward (1 is the first): to rehearse faults.
    """

    ms: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]] = Field(min_length=1)
    agreement: float = Field(default=1.0, ge=0, le=1)
    trace: tuple[bool, ...] | None = Field(default=None, min_length=1)
    vocab_size: int = Field(default=256, ge=4, le=1_000_000)
    seed: int = 0
    prefill_ms: float | None = Field(default=None, ge=0)
    max_length: int = Field(default=1 << 20, ge=1, le=1 << 20)
    fail_after: int | None = Field(default=None, ge=1)
    hang_after: int | None = Field(default=None, ge=1)


class NgramOptions(UserModel):
    """The n-gram drafter: longest suffix match in the request's own text, then a learned table.

    Attributes:
        max_order: longest suffix looked up, in tokens.
        min_order: shortest suffix that may propose.
        table: learned table: a safetensors file made by `autopipe drafts ngram`, or the name of a model whose table
            comes with AutoPipe (`smollm2-135m`); None: the request's own text alone.
        online: also learn from the tokens accepted in earlier requests, in this process, for as long as it runs.
            Output never changes; timing does, so it is off where runs are compared.
        online_entries: most contexts learned online, about 250 bytes each.
        gate: choose the number of drafts by confidence and measured step cost; false: always fill the window.
    """

    max_order: int = Field(default=6, ge=1, le=16)
    min_order: int = Field(default=1, ge=1, le=16)
    table: str | None = None
    online: bool = False
    online_entries: int = Field(default=100_000, ge=1, le=10_000_000)
    gate: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        if self.min_order > self.max_order:
            raise ConfigError("ngram.min_order", self.min_order, f"1 to max_order ({self.max_order})")
        return self


class CudaOptions(UserModel):
    """How a stage shares a GPU with others. Where the platform lacks one of these, stats say why it has no effect.

    Attributes:
        stream_priority: of what it computes, against other streams of its process and, with MPS, of others.
        mps_percent: of the multiprocessors, for its process; needs the MPS daemon. None: all.
        graphs: the `fused` backend replays CUDA graphs; false: operation by operation.
        pinned: page-lock the token rings.
    """

    stream_priority: StreamPriority | None = None
    mps_percent: int | None = Field(default=None, ge=1, le=100)
    graphs: bool = True
    pinned: bool = False


class StagePlan(UserModel):
    """One stage of a chain.

    Attributes:
        model: a model in the registry (`smollm2-135m`), hub id, folder, `FILE.gguf`, `REPO:FILE.gguf`; or `ngram`,
            or `emulated`.
        name: how stats name the stage; default: made from the model and the adapter.
        adapter: folder of a PEFT adapter; or of a drafter made by `autopipe drafts distill`, which makes the stage some
            of the model's layers; or the name of a model whose drafter comes with AutoPipe (`smollm2-135m`).
        adapters: drafters that are loaded together, `adapter` among them, so that changing `adapter` loads nothing.
        device_map: accelerate's: `auto`, or module name -> device. A plan that differs in where modules are, and keeps
            none in memory that is not computed with, moves the layers of the loaded model: a drafter's at once, the
            target's between requests.
        window: tokens this stage may be ahead of its consumer (ignored for the target).
        min_drafts: drafts this stage waits for before it verifies (ignored for the first stage and in lockstep,
            which waits for the full window).
        when_short: what this stage does in async mode while fewer than min_drafts wait: `wait` for more, or `step`:
            append one token of its own without drafts (right where a verification costs several single steps).
        verify_cap: most drafts checked in one forward.
        threads: compute threads; None: all cores in lockstep and plain, an equal share in async.
        cores: CPU cores the stage's process is bound to; None: all.
        numa: NUMA node that its memory comes from, and its cores where `cores` is None; None: any.
    """

    model: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1, max_length=80)
    backend: BackendName = BackendName.AUTO
    dtype: Dtype = Dtype.AUTO
    device: str = "auto"
    device_map: str | dict[str, int | str] | None = None
    adapter: str | None = Field(default=None, min_length=1)
    adapters: tuple[str, ...] = ()
    window: int = Field(default=4, ge=1, le=MAX_WINDOW)
    min_drafts: int = Field(default=1, ge=0, le=MAX_WINDOW)
    when_short: WhenShort = WhenShort.WAIT
    verify_cap: int = Field(default=MAX_WINDOW, ge=1, le=MAX_WINDOW)
    threads: int | None = Field(default=None, ge=1, le=1024)
    cores: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, min_length=1)
    numa: int | None = Field(default=None, ge=0, lt=1024)
    cuda: CudaOptions = CudaOptions()
    emulated: EmulatedStage | None = None
    ngram: NgramOptions | None = None
    trust_remote_code: bool = False

    @property
    def is_ngram(self) -> bool:
        return self.backend is BackendName.NGRAM or self.model == "ngram"

    @property
    def is_emulated(self) -> bool:
        return self.backend is BackendName.EMULATED or self.model == "emulated"

    @model_validator(mode="after")
    def _options_fit_model(self) -> StagePlan:
        if self.is_emulated != (self.emulated is not None):
            raise ConfigError("emulated", self.emulated, "given exactly when model is `emulated`")
        if self.ngram is not None and not self.is_ngram:
            raise ConfigError("ngram", "given", "only when model is `ngram`")
        if self.adapters and self.adapter not in self.adapters:
            raise ConfigError("adapter", self.adapter, f"one of `adapters` ({', '.join(self.adapters)})")
        return self

    def ngram_options(self) -> NgramOptions:
        """Options of an n-gram stage."""
        return self.ngram or NgramOptions()

    @property
    def movable(self) -> bool:
        """Whether its layers can move while it is loaded: accelerate keeps the weights where they are computed with."""
        if not isinstance(self.device_map, dict):
            return False
        places = set(self.device_map.values())
        return places == {"cpu"} or not places & {"cpu", "disk"}

    def identity(self) -> dict[str, Any]:
        """What must be equal for two stages to share a loaded model."""
        exclude = {"name", "window", "min_drafts", "when_short", "verify_cap", "threads", "cores", "ngram"}
        found = self.model_dump(mode="json", exclude=exclude | ({"adapter"} if self.adapters else set()))
        return {**found, "device_map": "movable"} if self.movable else found

    def default_name(self) -> str:
        """The last parts of the model's and the adapter's names; `MODEL+drafter` for one named like its model."""
        model, adapter = (part.rstrip("/").rsplit("/", 1)[-1] for part in (self.model, self.adapter or ""))
        if not adapter:
            return model
        return f"{model}+{'drafter' if adapter == model else adapter}"


class Warmup(UserModel):
    """How windows open in the course of a request.

    Attributes:
        kind: `conservative`: `start_window` for the first `fraction` of max_new_tokens, then the plan's windows;
            `progressive`: windows double every `double_every` output tokens, from `start_window` up to
            the plan's windows.
    """

    kind: WarmupKind = WarmupKind.NONE
    fraction: float = Field(default=0.05, ge=0, le=1)
    start_window: int = Field(default=2, ge=1, le=MAX_WINDOW)
    double_every: int = Field(default=64, ge=1)

    def window(self, full: int, generated: int, max_new_tokens: int) -> int:
        """The window in force after `generated` of at most `max_new_tokens` output tokens."""
        small = min(self.start_window, full)
        if self.kind is WarmupKind.CONSERVATIVE and generated < self.fraction * max_new_tokens:
            return small
        if self.kind is WarmupKind.PROGRESSIVE:
            return min(full, small << min(generated // self.double_every, 16))
        return full


class Plan(UserModel):
    """A chain of 1 to 5 stages and how it runs.

    Attributes:
        chain: stages, cheapest drafter first, the target last.
        exact: true (default): output is bit for bit that of plain decoding, in any dtype. False may be faster.
        tuned: written by `autopipe tune`: where and for what the plan was chosen. Has no effect on how it runs.
    """

    chain: tuple[StagePlan, ...] = Field(min_length=1, max_length=MAX_STAGES)
    mode: Mode = Mode.LOCKSTEP
    verification: Verification = Verification.EQUALITY
    exact: bool = True
    warmup: Warmup = Warmup()
    tuned: Tuned | None = None

    @property
    def target(self) -> StagePlan:
        return self.chain[-1]

    @property
    def drafters(self) -> tuple[StagePlan, ...]:
        return self.chain[:-1]

    def learning_online(self, online: bool) -> Plan:
        """This plan with its n-gram drafter, if it has one, learning from earlier requests or not."""
        first = self.chain[0]
        if not first.is_ngram or first.ngram_options().online == online:
            return self
        drafter = first.model_copy(update={"ngram": first.ngram_options().replace(online=online)})
        return self.model_copy(update={"chain": (drafter, *self.chain[1:])})

    @model_validator(mode="after")
    def _chain_fits(self) -> Plan:
        for index, stage in enumerate(self.chain):
            if stage.is_ngram and index > 0:
                raise ConfigError(f"chain.{index}.model", stage.model, "`ngram` only as the first stage of a chain")
        if self.target.is_ngram:
            raise ConfigError("chain", "ngram", "a chain that ends in a target model (an n-gram can only draft)")
        emulated = [stage.is_emulated for stage in self.chain if not stage.is_ngram]
        if any(emulated) and not all(emulated):
            raise ConfigError("chain", "emulated and real stages", "all neural stages emulated, or none")
        if self.mode is Mode.ASYNC:
            for index in range(1, len(self.chain)):
                upstream, stage = self.chain[index - 1], self.chain[index]
                if stage.min_drafts > upstream.window:
                    raise ConfigError(
                        f"chain.{index}.min_drafts",
                        stage.min_drafts,
                        f"0 to the window of the stage before it ({upstream.window})",
                    )
        names = self.names()
        if len(set(names)) < len(names):
            raise ConfigError("chain", names, "stages with distinct names")
        return self

    def names(self) -> list[str]:
        """A name for each stage: its own, or one made from the model, numbered where two are alike."""
        taken: list[str] = []
        for stage in self.chain:
            base = stage.name or stage.default_name()
            name, number = base, 2
            while stage.name is None and name in taken:
                name, number = f"{base}-{number}", number + 1
            taken.append(name)
        return taken

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from YAML.

        Raises:
            ConfigError: the file, or a key in it, is not right; the message names it.
        """
        return cls.parse(load_yaml(path, "--plan"))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
