"""From samples to rows: the statistics of a bench, without a model in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from autopipe.core.telemetry.combine import combine_devices, total_j_per_token
from autopipe.core.telemetry.use import DeviceUse, TelemetryUse

PLAIN = "plain"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt through one arm, once.

    Attributes:
        prompt: index of the prompt.
        token_ids: the output.
        seconds: wall-clock time from the prompt's ids to the last output token, prefill included.
        acceptance_length: output tokens per forward of the target; None where the arm cannot tell.
        use: energy and devices in that time; None without telemetry.
    """

    prompt: int
    token_ids: tuple[int, ...]
    seconds: float
    acceptance_length: float | None = None
    use: TelemetryUse | None = None

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per output token, prefill included."""
        return 1000 * self.seconds / max(1, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where an output first leaves plain decoding's.

    Attributes:
        prompt: index of the first prompt whose output differs.
        position: index of the first output token that differs (the shorter length, if one is a prefix).
        gap: difference of the two best logits there, recomputed by plain decoding; None if it cannot be had.
            A gap near 0 means rounding could tip the choice; a wide one means a wrong output.
    """

    prompt: int
    position: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One arm's figures; None where there is nothing to measure or to compare with.

    Attributes:
        ms_per_token: median over prompts of the median over repeats.
        ms_per_token_min: the fastest prompt's; `_max`: the slowest one's.
        tokens_per_s: of one pass over the prompts, output tokens over seconds (of a prompt, the median over repeats).
        speedup_over_plain: `tokens_per_s` over plain's; `speedup_over_transformers` likewise.
        median_speedup: median over prompts of plain's milliseconds per token over this arm's. It is the smaller where
            short outputs, which are mostly prefill, gain less than long ones.
        acceptance_length: output tokens of all samples over forwards of the target in all of them.
        tokens: output tokens of one pass over the prompts.
        identical: prompts whose output equals plain decoding's in every repeat.
        j_per_token: joules per output token, of all devices with an energy counter, whatever else ran on them.
        devices: what each device did while this arm ran, its own joules per token included; None without telemetry.
    """

    name: str
    ms_per_token: float | None = None
    ms_per_token_min: float | None = None
    ms_per_token_max: float | None = None
    tokens_per_s: float | None = None
    speedup_over_plain: float | None = None
    speedup_over_transformers: float | None = None
    median_speedup: float | None = None
    acceptance_length: float | None = None
    prompts: int = 0
    tokens: int = 0
    identical: int | None = None
    first_difference: FirstDifference | None = None
    j_per_token: float | None = None
    devices: tuple[DeviceUse, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        devices = None if self.devices is None else [device.to_dict() for device in self.devices]
        return {**asdict(replace(self, devices=None)), "devices": devices}


GapAt = Callable[[int, Sequence[int]], "float | None"]
"""(prompt, output tokens so far) -> gap of the two best logits that plain decoding sees next."""


def make_rows(
    samples: Mapping[str, Sequence[Sample]],
    *,
    comparable: Callable[[str], bool] = lambda name: True,
    gap_at: GapAt = lambda prompt, prefix: None,
) -> list[Row]:
    """One row per arm, in the order of `samples`. Arms without samples give a row without figures.

    Args:
        samples: arm name -> its samples.
        comparable: whether an arm's output should equal plain decoding's at all (a peer that draws its own
            random numbers should not).
        gap_at: called once for each arm that differs.
    """
    speeds = {name: _ms_per_prompt(arm) for name, arm in samples.items()}
    totals = {name: _tokens_per_s(arm) for name, arm in samples.items()}
    reference = first_outputs(samples.get(PLAIN, ()))
    rows = []
    for name, arm in samples.items():
        if not arm:
            rows.append(Row(name))
            continue
        identical, difference = None, None
        if reference and comparable(name):
            identical, difference = _compare(arm, reference, gap_at)
        uses = [sample.use for sample in arm if sample.use is not None]
        devices = combine_devices(uses) if uses else None
        rows.append(
            Row(
                name,
                ms_per_token=median(speeds[name].values()),
                ms_per_token_min=min(speeds[name].values()),
                ms_per_token_max=max(speeds[name].values()),
                tokens_per_s=totals[name],
                speedup_over_plain=_ratio(totals[name], totals.get(PLAIN)),
                speedup_over_transformers=_ratio(totals[name], totals.get(TRANSFORMERS)),
                median_speedup=_median_speedup(speeds.get(PLAIN, {}), speeds[name]),
                acceptance_length=_acceptance_length(arm),
                prompts=len(speeds[name]),
                tokens=sum(len(ids) for ids in first_outputs(arm).values()),
                identical=identical,
                first_difference=difference,
                j_per_token=None if devices is None else total_j_per_token(devices),
                devices=devices,
            )
        )
    return rows


def first_outputs(arm: Sequence[Sample]) -> dict[int, tuple[int, ...]]:
    """Prompt index -> output of its first repeat."""
    outputs: dict[int, tuple[int, ...]] = {}
    for sample in arm:
        outputs.setdefault(sample.prompt, sample.token_ids)
    return outputs


def first_difference(output: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one is a prefix; None if equal."""
    for position, (token, wanted) in enumerate(zip(output, reference, strict=False)):
        if token != wanted:
            return position
    return None if len(output) == len(reference) else min(len(output), len(reference))


def _ms_per_prompt(arm: Sequence[Sample]) -> dict[int, float]:
    by_prompt: dict[int, list[float]] = {}
    for sample in arm:
        by_prompt.setdefault(sample.prompt, []).append(sample.ms_per_token)
    return {prompt: median(values) for prompt, values in by_prompt.items()}


def _tokens_per_s(arm: Sequence[Sample]) -> float | None:
    by_prompt: dict[int, list[float]] = {}
    for sample in arm:
        by_prompt.setdefault(sample.prompt, []).append(sample.seconds)
    seconds = sum(map(median, by_prompt.values()))
    return sum(map(len, first_outputs(arm).values())) / seconds if seconds else None


def _median_speedup(plain: Mapping[int, float], arm: Mapping[int, float]) -> float | None:
    ratios = [plain[prompt] / speed for prompt, speed in arm.items() if speed and prompt in plain]
    return median(ratios) if ratios else None


def _acceptance_length(arm: Sequence[Sample]) -> float | None:
    """Output tokens of all samples over forwards of all samples (tokens / acceptance length each)."""
    tokens, forwards = 0, 0.0
    for sample in arm:
        if sample.acceptance_length:
            tokens += len(sample.token_ids)
            forwards += len(sample.token_ids) / sample.acceptance_length
    return tokens / forwards if forwards else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if reference and value else None


def _compare(
    arm: Sequence[Sample], reference: Mapping[int, tuple[int, ...]], gap_at: GapAt
) -> tuple[int, FirstDifference | None]:
    same = dict.fromkeys(reference, True)
    earliest: tuple[int, int] | None = None
    for sample in arm:
        position = first_difference(sample.token_ids, reference[sample.prompt])
        if position is not None:
            same[sample.prompt] = False
            earliest = min(earliest or (sample.prompt, position), (sample.prompt, position))
    if earliest is None:
        return sum(same.values()), None
    prompt, position = earliest
    return sum(same.values()), FirstDifference(prompt, position, gap_at(prompt, reference[prompt][:position]))
