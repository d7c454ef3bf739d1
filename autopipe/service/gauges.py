"""What the last control interval showed: goodput, stages, energy."""

from __future__ import annotations

from typing import Any

from autopipe.core.telemetry import EnergyMeter, Sampler
from autopipe.service.host import EngineHost
from autopipe.service.pulse import Beat, Pulse
from autopipe.service.totals import StageTotal, StageTotals


class Gauges:
    """Figures of one interval at a time; read from any thread, measured by one.

    Attributes:
        beat: what clients got in the interval.
        stages: what the stages did in it, by name.
        energy_j_per_token: of all devices; None: not known, or nothing was delivered.
    """

    def __init__(self, host: EngineHost, pulse: Pulse, totals: StageTotals, sampler: Sampler) -> None:
        self.beat = Beat()
        self.stages: dict[str, StageTotal] = {}
        self.energy_j_per_token: float | None = None
        self._host = host
        self._pulse = pulse
        self._totals = totals
        self._sampler = sampler
        self._energy: EnergyMeter | None = None
        self._before: dict[str, StageTotal] = {}

    def measure(self) -> None:
        """End an interval, and begin the next."""
        self.beat = self._pulse.take()
        totals = self._totals.now(self._host.load().progress)
        self.stages = {name: total.since(self._before.get(name)) for name, total in totals.items()}
        self._before = totals
        use = None if self._energy is None else self._energy.stop(self.beat.num_tokens)
        self._energy = self._sampler.measure_energy()
        self.energy_j_per_token = use.total_j_per_token if use is not None and self.beat.num_tokens else None

    def plain_tokens_per_s(self, running: int) -> float | None:
        """What plain decoding would deliver with as many requests in the pipeline."""
        num_requests = max(1, running)
        step_s = self._host.plain_step_s(num_requests)
        return num_requests / step_s if step_s else None

    def stage_rows(self) -> list[dict[str, Any]]:
        """The stages of the plan in force, cheapest drafter first."""
        plan, alive = self._host.plan, self._host.worker_ids()
        names = ["ngram" if stage.is_ngram else name for stage, name in zip(plan.chain, plan.names(), strict=True)]
        rows: list[dict[str, Any]] = []
        for stage, name, after in zip(plan.chain, names, [*names[1:], None], strict=True):
            total = self.stages.get(name, StageTotal())
            consumer = None if after is None else self.stages.get(after, StageTotal())
            shares_time = self.beat.seconds > 0 and not stage.is_ngram
            rows.append(
                {
                    "name": name,
                    "role": "target" if consumer is None else "drafter",
                    "window": None if consumer is None else stage.window,
                    "up": stage.is_ngram or name in alive,
                    "fill": None if consumer is None else fill(stage.window, total, consumer),
                    "acceptance_rate": total.acceptance_rate,
                    "busy_share": min(1.0, total.busy_s / self.beat.seconds) if shares_time else None,
                    "proposed": total.proposed,
                    "accepted": total.accepted,
                    "emitted": total.emitted,
                    "rollbacks": total.rollbacks,
                }
            )
        return rows

    def to_event(self) -> dict[str, Any]:
        """The interval as the event stream tells it."""
        stages = {
            name: {
                "proposed": total.proposed,
                "accepted": total.accepted,
                "acceptance_rate": total.acceptance_rate,
                "busy_share": total.busy_s / self.beat.seconds if self.beat.seconds else None,
            }
            for name, total in self.stages.items()
        }
        return {"tokens_per_s": self.beat.tokens_per_s, "stages": stages}


def fill(window: int, drafter: StageTotal, consumer: StageTotal) -> float | None:
    """How much of a drafter's window its consumer found filled, on average; None: nothing ran."""
    return min(1.0, drafter.proposed / (consumer.forwards * window)) if consumer.forwards else None
