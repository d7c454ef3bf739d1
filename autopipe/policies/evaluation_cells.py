"""The cells of an evaluation, one an episode, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from autopipe.envs.scenario import Scenario

ORACLE, STATIC, OFF = "oracle", "static", "off"
"""The yardsticks, which are in every evaluation."""
CURVE_POINTS = 64


@dataclass(slots=True)
class Cell:
    """One episode.

    Attributes:
        curve_s: seconds of decoding up to each of `CURVE_POINTS` equal shares of the tokens; plain_curve_s: plain
            decoding's.
        energy_j: None where it is not known.
        plan: the static plan, for `static`.
    """

    scenario: str
    policy: str
    seed: int
    relative_goodput: float
    curve_s: list[float]
    plain_curve_s: list[float]
    tokens: int
    energy_j: float | None
    switches: int
    retunes: int
    decision_ms: float
    safety: dict[str, Any] = field(default_factory=dict)
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A cell to be filled."""

    scenario: Scenario
    policy: str
    seed: int
    action: tuple[int, ...] | None = None


class CellStore:
    """Cells by what they are of, in memory and in a file of JSON lines."""

    def __init__(self, path: Path | None, scenarios: Sequence[Scenario]) -> None:
        self._path = path
        self._hash = {each.name: _hash_of(each) for each in scenarios}
        self._cells: dict[str, Cell] = {}
        self._statics: dict[str, tuple[int, ...]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                if "static" in data:
                    self._statics[data["key"]] = tuple(data["static"])
                else:
                    self._cells[data["key"]] = Cell(**data["cell"])
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a run that was killed

    def get(self, task: Task) -> Cell | None:
        return self._cells.get(self._key(task))

    def goodput(self, task: Task) -> float:
        return self._cells[self._key(task)].relative_goodput

    def put(self, task: Task, cell: Cell, *, keep_on_file: bool = True) -> None:
        self._cells[self._key(task)] = cell
        if keep_on_file:
            self.keep(task)

    def keep(self, task: Task) -> None:
        """Write a cell that is in memory to the file."""
        key = self._key(task)
        self._write({"key": key, "cell": asdict(self._cells[key])})

    def best_static(self, scenario: Scenario, num_seeds: int) -> tuple[int, ...] | None:
        return self._statics.get(f"{self._hash[scenario.name]}/{num_seeds}")

    def note_static(self, scenario: Scenario, num_seeds: int, action: tuple[int, ...]) -> None:
        key = f"{self._hash[scenario.name]}/{num_seeds}"
        self._statics[key] = action
        self._write({"key": key, "static": action})

    def _key(self, task: Task) -> str:
        action = "" if task.action is None else ",".join(map(str, task.action))
        return f"{self._hash[task.scenario.name]}/{task.policy}/{task.seed}/{action}"

    def _write(self, data: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(data) + "\n")


def _hash_of(scenario: Scenario) -> str:
    return sha256(scenario.model_dump_json().encode()).hexdigest()[:12]
