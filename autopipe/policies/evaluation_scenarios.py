"""Scenarios to evaluate policies on: those that nothing was tuned on, the shipped ones, and files."""

from __future__ import annotations

from pathlib import Path

from autopipe.core.errors import ConfigError
from autopipe.envs.scenario import Scenario, load_scenario, scenario_names

HELDOUT = Path(__file__).parent / "heldout"


def heldout_names() -> list[str]:
    """Scenarios that nothing was tuned or trained on."""
    return sorted(path.stem for path in HELDOUT.glob("*.yaml"))


def find_scenarios(wanted: str) -> list[Scenario]:
    """Scenarios by name or file, separated by commas; `heldout` and `shipped` stand for all of these.

    Raises:
        ConfigError: one that does not exist.
    """
    found: list[Scenario] = []
    for name in wanted.split(","):
        if name == "heldout":
            found += [load_scenario(HELDOUT / f"{each}.yaml") for each in heldout_names()]
        elif name == "shipped":
            found += [load_scenario(each) for each in scenario_names()]
        elif name in heldout_names():
            found.append(load_scenario(HELDOUT / f"{name}.yaml"))
        elif name in scenario_names() or Path(name).suffix in (".yaml", ".yml"):
            found.append(load_scenario(name))
        else:
            known = ", ".join(["heldout", "shipped", *heldout_names(), *scenario_names()])
            raise ConfigError("--scenarios", name, f"a YAML file, or {known}")
    return found


def changes(scenario: Scenario) -> bool:
    """Whether anything about a scenario changes: events, or more than one kind of prompt."""
    kinds = {kind for phase in scenario.phases for kind, weight in phase.kinds.items() if weight > 0}
    return bool(scenario.events) or len(kinds) > 1
