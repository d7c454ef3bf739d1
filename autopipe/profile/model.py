"""The profile: what was measured of a chain's stages on one machine, and on the user's own prompts.

One JSON file, documented key by key in docs/profile.md. Times are seconds, memory is bytes; what could not be
measured is null, never 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError
from autopipe.core.plan import NgramOptions, Plan, StagePlan
from autopipe.core.tuned import Machine

SCHEMA_VERSION: Literal[1] = 1

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Bits = Annotated[str, Field(pattern="^[01]*$")]
"""One character per output position: 1 where a drafter's pick is the target's token."""


class Settings(UserModel):
    """What was asked for; together with the machine it makes the content hash.

    Attributes:
        plan: its stages are the candidates.
        threads: thread counts of the latency curves.
        contexts: tokens in the cache before a verify.
        verify_tokens, prefill_tokens: points of the curves.
        repeats: measurements of each point; the median counts.
        prompts: prompt sets.
        max_new_tokens: longest output per prompt.
        models: by stage, what identifies its weights.
        prompts_digest: hash of all prompts' texts.
    """

    plan: Plan
    threads: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(min_length=1)
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    verify_tokens: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(min_length=1)
    prefill_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)
    repeats: int = Field(ge=1, le=1000)
    prompts: tuple[str, ...] = Field(min_length=1)
    max_new_tokens: int = Field(ge=2)
    models: dict[str, str] = Field(default_factory=dict)
    prompts_digest: str = ""


class LatencyPoint(UserModel):
    """Median seconds of appending `tokens` tokens to a cache of `context` tokens, and the 90th percentile."""

    context: Count
    tokens: int = Field(ge=1)
    seconds: Seconds
    p90_s: Seconds


class Curves(UserModel):
    """Latencies of a stage on one thread count.

    Attributes:
        verify: `forward` of n tokens: a verification of n - 1 drafts; n = 1 is a draft step or plain decoding.
        prefill: `prefill` into an empty cache.
        catch_up: `prefill` behind `context` tokens: a stage that has fallen far behind.
    """

    threads: int = Field(ge=1)
    verify: tuple[LatencyPoint, ...] = Field(min_length=1)
    prefill: tuple[LatencyPoint, ...] = Field(min_length=1)
    catch_up: tuple[LatencyPoint, ...] = ()


class Memory(UserModel):
    """Of the stage's process, loaded.

    Attributes:
        pss_bytes: shared pages by share; null where the system cannot tell.
        device_bytes: reserved on the GPU by torch; null on a CPU.
    """

    rss_bytes: Count
    pss_bytes: Count | None
    weight_bytes: Count | None
    kv_bytes_per_token: Count | None
    device_bytes: Count | None = None

    @property
    def resident_bytes(self) -> int:
        """Shared pages by share, where the system can tell."""
        return self.rss_bytes if self.pss_bytes is None else self.pss_bytes


class StageProfile(UserModel):
    """One neural (or emulated) stage.

    Attributes:
        stage: as in the plan it came from.
        device: where it computes, `auto` resolved; empty for an emulated stage.
        load_s: seconds from weights on disk to ready. start_s: of that stage's process before, imports included.
    """

    name: str
    stage: StagePlan
    device: str
    vocab_size: int
    max_length: int
    exact: bool
    choice: str
    load_s: Seconds
    start_s: Seconds
    memory: Memory
    curves: tuple[Curves, ...] = Field(min_length=1)


class Contention(UserModel):
    """While `other` computes, a forward of `stage` takes `factor` times as long; both with `threads` threads."""

    stage: str
    other: str
    threads: int = Field(ge=1)
    factor: float = Field(gt=0)


class EngineCosts(UserModel):
    """Of the engine around the stages, measured in live requests.

    Attributes:
        start_s: a whole engine, all stages loaded.
        settings_s: putting a plan with other windows or another mode in force.
        join_s, leave_s: by drafter, putting a plan in force that takes it in (loading included) or drops it.
        step_s: a plain decoding step. step_overhead_s: of a step, the seconds beside the forward.
        handover_s: the same in lockstep of several stages, waking the next one included; null with one stage.
    """

    start_s: Seconds
    settings_s: Seconds
    join_s: dict[str, Seconds]
    leave_s: dict[str, Seconds]
    step_s: Seconds
    step_overhead_s: Seconds
    handover_s: Seconds | None


class PromptRecord(UserModel):
    """A prompt and the target's greedy output."""

    name: str
    kind: str
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    output_ids: tuple[int, ...] = Field(min_length=1)
    finish_reason: Literal["stop", "length"]
    decode_s: Seconds


class Agreement(UserModel):
    """From a teacher-forced pass of a drafter over the target's outputs: one string per prompt.

    Attributes:
        wrong_equal: by drafter, the chance that it picks the same token as this one where both pick wrongly.
    """

    drafter: str
    agrees: tuple[Bits, ...]
    wrong_equal: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of positions at which it agrees."""
        return sum(text.count("1") for text in self.agrees) / max(1, sum(map(len, self.agrees)))


class NgramOffer(UserModel):
    """What the n-gram drafter offers at every output position of one prompt.

    Attributes:
        length: drafts offered. right: of these, from the first, how many are the target's tokens.
        confidence: the drafter's chance of each, given those before it.
    """

    length: tuple[Count, ...]
    right: tuple[Count, ...]
    confidence: tuple[tuple[float, ...], ...]


class NgramReplay(UserModel):
    """The n-gram drafter over the target's outputs. `draft_s`: seconds it takes per step."""

    options: NgramOptions
    draft_s: Seconds
    prompts: tuple[NgramOffer, ...]


class Profile(UserModel):
    """See the module."""

    schema_version: Literal[1] = SCHEMA_VERSION
    content_hash: str
    created_at: str
    took_s: Seconds
    machine: Machine
    settings: Settings
    stages: tuple[StageProfile, ...] = Field(min_length=1)
    engine: EngineCosts
    contention: tuple[Contention, ...]
    prompts: tuple[PromptRecord, ...] = Field(min_length=1)
    agreement: tuple[Agreement, ...]
    ngram: NgramReplay

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of prompts, in order of first appearance."""
        return tuple(dict.fromkeys(prompt.kind for prompt in self.prompts))

    @property
    def unsteady_share(self) -> float:
        """Share of the measured points whose 90th percentile is more than a fifth above the median.

        Under a tenth on a machine that does nothing else; more says that something else was computing.
        """
        points = [point for stage in self.stages for curves in stage.curves for point in curves.verify]
        return sum(point.p90_s > 1.2 * point.seconds for point in points) / len(points)

    @property
    def target(self) -> StageProfile:
        """The stage whose output the agreement tables speak of."""
        return self.stages[-1]

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ConfigError: the file cannot be read, is of another version, or a key in it is not right.
        """
        data = read_json(path, "--profile")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ConfigError("schema_version", version, f"{SCHEMA_VERSION}; measure again with `autopipe profile`")
        return cls.parse(data)


def read_json(path: str | Path, key: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: no such file, or no JSON object in it; `key` names the option that gave the path.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(key, str(path), f"a readable JSON file ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(key, str(path), "a JSON object")
    return data
