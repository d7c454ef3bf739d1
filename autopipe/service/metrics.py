"""Prometheus metrics under `autopipe:`, with the suffixes that vLLM uses, so that its dashboards are easily adapted.

Counters and histograms are fed when tokens and ends come; what is a state is asked when somebody scrapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from autopipe.core.plan import Plan
from autopipe.core.request import Outcome
from autopipe.service.generation import Ended
from autopipe.service.totals import StageTotal

PREFIX = "autopipe:"
_TTFT_BUCKETS_S = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LATENCY_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)

_CACHE_COUNTERS = (
    ("hits", "prefix_cache_hits", "Requests that found a beginning computed already."),
    ("reused", "prefix_cache_reused_tokens", "Prompt tokens that were not computed again."),
    ("evictions", "prefix_cache_evictions", "Kept beginnings that were dropped for want of memory."),
    ("preemptions", "num_preemptions", "Times a request gave its memory up to another."),
)

StateSource = Callable[[], Mapping[str, Any]]
"""The state of the service as `Service.status` gives it."""


class Metrics:
    """All metrics of one service.

    Args:
        model: label `model_name` of every metric.
        state: asked at each scrape.
        totals: sums by stage over finished requests, asked at each scrape.
    """

    def __init__(self, model: str, state: StateSource, totals: Callable[[], Mapping[str, StageTotal]]) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._plan: tuple[str, ...] | None = None
        self._plan_gate = threading.Lock()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have ended.")
        self._generated = self._counter("generation_tokens", "Output tokens of requests that have ended.")
        self._successes = self._counter("request_success", "Choices that ended, by how.", "finished_reason")
        self._failures = self._counter("request_failure", "Choices that failed, by error.", "error")
        self._ttft = self._histogram("time_to_first_token_seconds", "Submission to first token.", _TTFT_BUCKETS_S)
        self._gaps = self._histogram("inter_token_latency_seconds", "Time per token after the first.", _GAP_BUCKETS_S)
        self._latency = self._histogram("e2e_request_latency_seconds", "Submission to end.", _LATENCY_BUCKETS_S)
        self._queued = self._histogram("request_queue_time_seconds", "Submission to start.", _LATENCY_BUCKETS_S)
        self._plan_changes = self._counter("plan_changes", "Plans put in force, by who chose them.", "source")
        self._restarts = self._counter("worker_restarts", "Worker processes started again after a fault.", "stage")
        self._plan_info = Gauge(
            PREFIX + "plan_info",
            "The plan in force: 1, with its properties as labels.",
            ["model_name", "mode", "chain", "policy", "pinned"],
            registry=self._registry,
        )
        self._registry.register(_States(model, state, totals))

    def text(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format an Accept header asks for, where it can be read."""
        try:
            encode, content_type = choose_encoder(accept)
        except Exception:  # it fails in several ways on a header that is none
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def count_end(self, ended: Ended) -> None:
        """A choice is over."""
        timing = ended.timing
        self._prompt_tokens.labels(self._model).inc(ended.prompt_tokens)
        self._generated.labels(self._model).inc(ended.num_tokens)
        if ended.finish_reason is not None:
            self._successes.labels(self._model, ended.finish_reason).inc()
        else:
            self._failures.labels(self._model, type(ended.outcome).__name__).inc()
        if timing.first_s is not None and timing.last_s is not None:
            self._ttft.labels(self._model).observe(timing.first_s - timing.submitted_s)
            self._latency.labels(self._model).observe(timing.last_s - timing.submitted_s)
        gaps = self._gaps.labels(self._model)
        for seconds, num_tokens in timing.gaps:
            for _ in range(num_tokens):
                gaps.observe(seconds / num_tokens)
        if isinstance(ended.outcome, Outcome):
            self._queued.labels(self._model).observe(ended.outcome.stats.queued_s)

    def count_restart(self, stage: str) -> None:
        self._restarts.labels(self._model, stage).inc()

    def show_plan(self, plan: Plan, policy: str, *, pinned: bool, source: str | None) -> None:
        """A plan is in force; `source` says who chose it, None that it has only been looked at again."""
        if source is not None:
            self._plan_changes.labels(self._model, source).inc()
        chain = ">".join(
            f"{name}({stage.window})" for name, stage in zip(plan.names(), plan.drafters, strict=False)
        )  # fmt: skip
        labels = (self._model, plan.mode.value, f"{chain}>target" if chain else "target", policy, str(pinned).lower())
        with self._plan_gate:
            if self._plan is not None and labels != self._plan:
                self._plan_info.remove(*self._plan)
            self._plan = labels
            self._plan_info.labels(*labels).set(1)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=tuple(buckets))


class _States(Collector):
    """Gauges read from the service's state, and counters from the sums by stage."""

    def __init__(self, model: str, state: StateSource, totals: Callable[[], Mapping[str, StageTotal]]) -> None:
        self._model = model
        self._state = state
        self._totals = totals

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering does not ask for a state

    def collect(self) -> Iterable[Metric]:
        state = self._state()
        load = state["load"]
        yield self._gauge("num_requests_running", "Choices in the pipeline.", load["running"])
        yield self._gauge("num_requests_waiting", "Choices that wait.", load["waiting"])
        yield self._gauge("tokens_per_second", "Output tokens per second, lately.", state["tokens_per_s"])
        yield self._gauge("plain_tokens_per_second", "The same of plain decoding.", state["plain_tokens_per_s"])
        yield self._gauge("energy_joules_per_token", "Energy per output token, lately.", state["energy_j_per_token"])
        yield self._gauge("plan_predicted_gain", "Goodput the last change promised.", state["plan"]["predicted_gain"])
        yield self._gauge("plan_observed_gain", "Goodput it brought so far.", state["plan"]["observed_gain"])
        cache = state["prefix_cache"]
        yield self._gauge("kv_cache_bytes", "Memory of keys and values.", cache.get("kv_bytes"))
        for key, name, text in _CACHE_COUNTERS:
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            if key in cache:
                family.add_metric([self._model], cache[key])
            yield family
        yield from self._stage_gauges(state["stages"])
        yield from self._stage_counters()

    def _stage_gauges(self, stages: list[dict[str, Any]]) -> Iterable[Metric]:
        for key, name, text in (
            ("up", "stage_up", "Whether the stage's process lives."),
            ("acceptance_rate", "stage_acceptance_rate", "Accepted per proposed draft, lately."),
            ("busy_share", "stage_busy_ratio", "Share of time computing, lately."),
            ("fill", "stage_fill_ratio", "Drafts ahead of its consumer, per window."),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "stage"])
            for stage in stages:
                if stage[key] is not None:
                    family.add_metric([self._model, stage["name"]], float(stage[key]))
            yield family

    def _stage_counters(self) -> Iterable[Metric]:
        drafts = self._counter("spec_decode_num_drafts", "Forwards of a stage that could verify drafts.")
        proposed = self._counter("spec_decode_num_draft_tokens", "Drafts of a stage that were verified.")
        accepted = self._counter("spec_decode_num_accepted_tokens", "Of these, accepted.")
        rollbacks = self._counter("stage_rollbacks", "Times a stage was corrected by its consumer.")
        busy = self._counter("stage_busy_seconds", "Seconds a stage computed.")
        per_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Forwards of a stage that accepted more drafts than `position`.",
            labels=["model_name", "stage", "position"],
        )
        for name, total in self._totals().items():
            labels = [self._model, name]
            drafts.add_metric(labels, sum(total.verifications.values()))
            proposed.add_metric(labels, total.proposed)
            accepted.add_metric(labels, total.accepted)
            rollbacks.add_metric(labels, total.rollbacks)
            busy.add_metric(labels, total.busy_s)
            for position in range(max(total.verifications, default=1) - 1):
                count = sum(times for length, times in total.verifications.items() if length - 1 > position)
                per_position.add_metric([*labels, str(position)], count)
        yield from (drafts, proposed, accepted, rollbacks, busy, per_position)

    def _counter(self, name: str, text: str) -> CounterMetricFamily:
        return CounterMetricFamily(PREFIX + name, text, labels=["model_name", "stage"])

    def _gauge(self, name: str, text: str, value: float | None) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        if value is not None:
            family.add_metric([self._model], float(value))
        return family
