"""Tables of `autopipe policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from autopipe.cli.show import console, number
from autopipe.envs.scenario import Scenario
from autopipe.policies.evaluation_scenarios import changes
from autopipe.policies.summary import Estimate, Row


def show_rows(rows: Sequence[Row], scenarios: Sequence[Scenario]) -> None:
    """One table for every scenario, best policy first."""
    screen = console()
    for scenario in scenarios:
        mine = sorted((row for row in rows if row.scenario == scenario.name), key=lambda row: -row.of_oracle.mean)
        seeds = mine[0].seeds if mine else 0
        table = Table(title=f"{scenario.name} ({'changes' if changes(scenario) else 'stationary'}, {seeds} seeds)")
        table.add_column("policy")
        for header in ("of oracle [95%]", "of plain", "least", "of best static", "regret", "energy", "switches", "ms"):
            table.add_column(header, justify="right")
        for row in mine:
            name = f"{row.policy}: {row.plan}" if row.plan else row.policy
            energy = "-" if row.energy_of_plain is None else f"{row.energy_of_plain:.2f}"
            table.add_row(
                name,
                _interval(row.of_oracle),
                number(row.of_plain.mean, 3),
                number(row.least_of_plain, 3),
                number(row.of_static.mean, 3),
                f"{row.regret:.0f}",
                energy,
                f"{row.switches:.0f}+{row.retunes:.0f}",
                number(row.decision_ms, 2),
            )
        screen.print(table)
    screen.print(
        "of oracle, of plain, of best static: goodput relative to these; least: of the worst seed. regret: tokens of "
        "plain decoding lost to the oracle. energy: joules a token relative to plain decoding. switches: of the chain "
        "+ of other settings. ms: of the median decision.",
        highlight=False,
    )


def show_facts(facts: Mapping[str, Any]) -> None:
    """What `policy inspect` found, a line for each."""
    table = Table(show_header=False)
    for key, value in facts.items():
        table.add_row(key, str(value))
    console().print(table)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
