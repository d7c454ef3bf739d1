"""Published runs: the trace format, and filters that choose runs."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ConfigDict, Field

from autopipe.core.config import UserModel
from autopipe.core.errors import ConfigError

STRATEGIES = ("greedy", "chain", "async-chain")
FILTER_KEYS = ("strategy", "lookahead", "models")


class TraceSample(UserModel):
    """One prompt of a run.

    Attributes:
        model_times_s: seconds of each step, by stage.
        accepted_tokens: tokens emitted per verification, by verifying stage; 0 is an unused slot.
        token_times_s: seconds per token (plain decoding).
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    tokens_generated: int = Field(ge=1)
    total_time_s: float = Field(gt=0)
    model_times_s: tuple[tuple[float, ...], ...] = ()
    accepted_tokens: tuple[tuple[int, ...], ...] = ()
    token_times_s: tuple[float, ...] = ()


class TraceRun(UserModel):
    """A run: one setting, several prompts.

    Attributes:
        models: smallest first; the last is the target.
        lookahead: draft window; for `async-chain` the fewest drafts that a verifier waits for.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    strategy: str
    models: tuple[str, ...] = Field(min_length=1)
    lookahead: int = Field(ge=0)
    samples: tuple[TraceSample, ...] = Field(min_length=1)

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token over all prompts."""
        seconds = sum(sample.total_time_s for sample in self.samples)
        return 1e3 * seconds / sum(sample.tokens_generated for sample in self.samples)

    @property
    def is_greedy(self) -> bool:
        return self.strategy == "greedy"


def read_traces(path: str | Path) -> list[TraceRun]:
    """Read a `.jsonl` or `.jsonl.gz` file, one run a line.

    Raises:
        ConfigError: the file cannot be read, or a line is not a run; the key names the line and the field.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError("TRACES", str(path), f"a readable .jsonl or .jsonl.gz ({error})") from None
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"TRACES line {number}", line[:40], f"JSON ({error})") from None
        if not isinstance(data, dict):
            raise ConfigError(f"TRACES line {number}", line[:40], "a JSON object")
        run = TraceRun.parse(data, prefix=f"TRACES line {number}: ")
        if run.strategy not in STRATEGIES:
            raise ConfigError(f"TRACES line {number}: strategy", run.strategy, ", ".join(STRATEGIES))
        runs.append(run)
    if not runs:
        raise ConfigError("TRACES", str(path), "a file with one or more runs")
    return runs


class TraceFilter:
    """Runs that match `KEY=V1,V2` filters: one of the values of every filter.

    Keys: `strategy`; `lookahead`; `models`, a model of the run or all of them joined by `+`.

    Args:
        option: how to name the filter in errors (`--fit-on`).

    Raises:
        ConfigError: a filter is not KEY=VALUES, its key is unknown or a value cannot be one of that key.
    """

    def __init__(self, filters: Sequence[str], option: str) -> None:
        self._wanted: list[tuple[str, frozenset[str]]] = []
        for text in filters:
            key, equals, values = text.partition("=")
            wanted = frozenset(value.strip() for value in values.split(",") if value.strip())
            if not equals or key not in FILTER_KEYS or not wanted:
                raise ConfigError(option, text, f"KEY=V1,V2 with KEY one of {', '.join(FILTER_KEYS)}")
            if key == "strategy" and not wanted <= set(STRATEGIES):
                raise ConfigError(option, text, f"strategies {', '.join(STRATEGIES)}")
            if key == "lookahead":
                if not all(value.isdecimal() for value in wanted):
                    raise ConfigError(option, text, "whole numbers >= 0")
                wanted = frozenset(str(int(value)) for value in wanted)
            self._wanted.append((key, wanted))

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def matches(self, run: TraceRun) -> bool:
        values = {
            "strategy": {run.strategy},
            "lookahead": {str(run.lookahead)},
            "models": {*run.models, "+".join(run.models)},
        }
        return all(values[key] & wanted for key, wanted in self._wanted)
