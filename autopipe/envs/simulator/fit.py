"""Fit the authors' systems to some of their published runs and predict others.

What is fitted, and from what: where the drafter disagrees with the target, per prompt (the runs' acceptance
sequences); seconds of a draft step and of a verification, per strategy (the runs' step times; plain decoding
gives the verification of one token); seconds beside the steps, for the first prompt of a run (which starts
cold) and for the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.core.errors import ConfigError
from autopipe.envs.simulator.authors import PairResult, PairTimes, simulate_async_pair, simulate_sync_pair
from autopipe.envs.simulator.model import LatencyCurve
from autopipe.envs.simulator.traces import TraceFilter, TraceRun, TraceSample, read_traces

ASYNC, SYNC = "async-chain", "chain"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run that was not fitted, measured and predicted."""

    strategy: str
    models: tuple[str, ...]
    lookahead: int
    measured_ms_per_token: float
    predicted_ms_per_token: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_ms_per_token / self.measured_ms_per_token - 1


@dataclass(frozen=True, slots=True)
class FitReport:
    """Predictions, labels of the runs that were fitted, and of those left out: runs of three models or more."""

    predictions: tuple[Prediction, ...]
    fitted: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return statistics.median(abs(prediction.error) for prediction in self.predictions)

    @property
    def worst_error(self) -> float:
        """Largest of the absolute errors."""
        return max(abs(prediction.error) for prediction in self.predictions)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: {predictions: [...], median_error, worst_error, fitted, left_out}."""
        return {
            "predictions": [
                {
                    "strategy": each.strategy,
                    "models": list(each.models),
                    "lookahead": each.lookahead,
                    "measured_ms_per_token": each.measured_ms_per_token,
                    "predicted_ms_per_token": each.predicted_ms_per_token,
                    "error": each.error,
                }
                for each in self.predictions
            ],
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "fitted": list(self.fitted),
            "left_out": list(self.left_out),
        }


def fit_traces(path: str | Path, fit_on: Sequence[str] = (), predict: Sequence[str] = ()) -> FitReport:
    """Fit on some runs of a trace file, predict others. A run that is fitted is never predicted.

    Args:
        fit_on: filters (see `TraceFilter`) of the runs to fit; runs of plain decoding always are. None: all
            runs that are not to be predicted, or, with `predict` empty as well, each run is predicted from
            all others.
        predict: filters of the runs to predict; none: all that are not fitted.

    Raises:
        ConfigError: the file or a filter is wrong, nothing is left to predict, or what is fitted does not
            determine what is to be predicted.
    """
    runs = read_traces(path)
    chosen, wanted = TraceFilter(fit_on, "--fit-on"), TraceFilter(predict, "--predict")
    greedy = [run for run in runs if run.is_greedy]
    pairs = [run for run in runs if not run.is_greedy and len(run.models) == 2]
    left_out = tuple(_label(run) for run in runs if not run.is_greedy and len(run.models) != 2)
    if not chosen and not wanted:
        predictions = tuple(
            _predict_run(run, [*greedy, *(other for other in pairs if other is not run)]) for run in pairs
        )
        return FitReport(_some(predictions), tuple(_label(run) for run in greedy), left_out)
    if chosen:
        fitted = [run for run in pairs if chosen.matches(run)]
        to_predict = [run for run in pairs if not chosen.matches(run) and wanted.matches(run)]
    else:
        fitted = [run for run in pairs if not wanted.matches(run)]
        to_predict = [run for run in pairs if wanted.matches(run)]
    fit_set = [*greedy, *fitted]
    predictions = tuple(_predict_run(run, fit_set) for run in to_predict)
    return FitReport(_some(predictions), tuple(_label(run) for run in fit_set), left_out)


def _some(predictions: tuple[Prediction, ...]) -> tuple[Prediction, ...]:
    if not predictions:
        raise ConfigError("--predict", "no runs", "filters that leave runs of two models not fitted")
    return predictions


def _label(run: TraceRun) -> str:
    return f"{run.strategy} {'+'.join(run.models)} lookahead {run.lookahead}"


def _predict_run(run: TraceRun, fitted: Sequence[TraceRun]) -> Prediction:
    """Predict the time of `run` from its setting and lengths of its texts."""
    same_models = [other for other in fitted if other.models == run.models]
    same = [other for other in same_models if other.strategy == run.strategy]
    if not same:
        raise ConfigError("--fit-on", "no such run", f"at least one run like: {_label(run)}")
    plain = [other for other in fitted if other.is_greedy and other.models[0] == run.models[-1]]
    times = _fit_times(same, plain)
    cold_s, warm_s = _fit_rest(same, same_models, times)
    total_s = 0.0
    for index, sample in enumerate(run.samples):
        agrees = fit_agreement(same_models, index, sample.tokens_generated)
        simulated = _simulate(run.strategy, run.lookahead, agrees, times)
        total_s += simulated.total_s + (cold_s if index == 0 else warm_s)
    tokens = sum(sample.tokens_generated for sample in run.samples)
    return Prediction(run.strategy, run.models, run.lookahead, run.ms_per_token, 1e3 * total_s / tokens)


def _simulate(strategy: str, lookahead: int, agrees: Sequence[bool], times: PairTimes) -> PairResult:
    simulate = simulate_async_pair if strategy == ASYNC else simulate_sync_pair
    return simulate(agrees, lookahead, times)


def _fit_times(runs: Sequence[TraceRun], plain: Sequence[TraceRun]) -> PairTimes:
    """Step times from runs of one strategy and pair of models."""
    samples = [sample for run in runs for sample in run.samples]
    draft_s = statistics.fmean(seconds for sample in samples for seconds in _steps(sample, 0))
    points: dict[int, float] = {}
    token_times = [seconds for run in plain for sample in run.samples for seconds in sample.token_times_s]
    if token_times:
        points[1] = statistics.median(token_times)
    waiting: dict[int, float] = {}
    for run in runs:
        verify_s = sorted(seconds for sample in run.samples for seconds in _steps(sample, 1)[1:])
        if not verify_s:
            continue
        median_s = statistics.median(verify_s)
        if run.strategy == SYNC or run.lookahead * draft_s > median_s + draft_s:
            points[max(run.lookahead, 1)] = median_s
        else:  # such a verifier also waits for draft steps: take what the shortest steps take
            waiting[max(run.lookahead, 2)] = verify_s[len(verify_s) // 20]
    if not any(num_drafts > 1 for num_drafts in points):
        points.update(waiting)
    if not points:
        raise ConfigError("--fit-on", "no step times", "runs with model_times_s or token_times_s")
    return PairTimes(draft_s, LatencyCurve(_monotone(points)))


def _monotone(points: dict[int, float]) -> dict[int, float]:
    """Seconds that never fall; flat from 2 tokens to the first measured verification of several."""
    several = [num_tokens for num_tokens in sorted(points) if num_tokens > 1]
    if several:
        points.setdefault(2, points[several[0]])
    highest, result = 0.0, {}
    for num_tokens in sorted(points):
        highest = max(highest, points[num_tokens])
        result[num_tokens] = highest
    return result


def _steps(sample: TraceSample, stage: int) -> tuple[float, ...]:
    return sample.model_times_s[stage] if len(sample.model_times_s) > stage else ()


def _fit_rest(runs: Sequence[TraceRun], same_models: Sequence[TraceRun], times: PairTimes) -> tuple[float, float]:
    """Seconds that the fitted runs took beyond what is simulated: first prompt, and mean of the others."""
    cold: list[float] = []
    warm: list[float] = []
    for run in runs:
        for index, sample in enumerate(run.samples):
            agrees = fit_agreement(same_models, index, sample.tokens_generated)
            rest_s = sample.total_time_s - _simulate(run.strategy, run.lookahead, agrees, times).total_s
            (warm if index else cold).append(rest_s)
    return statistics.fmean(cold), statistics.fmean(warm) if warm else 0.0


def fit_agreement(runs: Iterable[TraceRun], index: int, num_tokens: int) -> list[bool]:
    """Whether the drafter agrees at each position of prompt `index`'s text, by vote of the runs.

    Positions that no run speaks of count as agreement.
    """
    right, wrong = [0] * num_tokens, [0] * num_tokens
    unsure: list[int] = []
    for run in runs:
        if run.is_greedy or index >= len(run.samples) or not run.samples[index].accepted_tokens:
            continue
        unsure += _vote(run, run.samples[index], right, wrong)
    for position in unsure:  # the first draft was wrong, or it was right and the second wrong
        if position < num_tokens and wrong[position] <= right[position] and position + 1 < num_tokens:
            wrong[position + 1] += 1
        elif position < num_tokens:
            wrong[position] += 1
    return [not (bad and bad >= good) for good, bad in zip(right, wrong, strict=True)]


def _vote(run: TraceRun, sample: TraceSample, right: list[int], wrong: list[int]) -> list[int]:
    """Count what one run says of each position; return where verifications can be read in two ways."""
    lengths = [length for length in sample.accepted_tokens[0] if length > 0]
    full = max(run.lookahead, 1)
    position, maybe_corrected = 0, True
    unsure: list[int] = []
    for number, length in enumerate(lengths):
        end = position + length
        for accepted in range(position + maybe_corrected, min(end, len(right))):
            right[accepted] += 1
        alone = run.strategy == ASYNC and run.lookahead == 0 and length == 1
        if alone:  # not waiting for drafts, the verifier takes up a correction at once, alone
            follows = number > 0 and lengths[number - 1] == 1
            followed = number + 1 < len(lengths) and lengths[number + 1] == 1
            if position < len(wrong) and (follows or not followed):
                wrong[position] += 1
        broken = length < full
        if broken and run.strategy == SYNC and length == 1 and not maybe_corrected:
            right[position] -= position < len(right)
            unsure.append(position)
        elif broken and end < len(wrong):
            wrong[end] += 1
        maybe_corrected = broken or run.strategy == ASYNC
        position = end
    return unsure
