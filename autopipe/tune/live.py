"""Measures plans for real, each set of models in a process of its own."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autopipe.core.chain import stage_keys
from autopipe.core.errors import AutoPipeError, StageError
from autopipe.core.plan import Mode, Plan
from autopipe.profile import ProfilePrompt
from autopipe.profile.process import CommandProcess

WARM_UP_TOKENS = 16
_CLOSE_S = 5.0


class OutOfTimeError(Exception):
    """The deadline came before the answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one plan, once.

    Attributes:
        seconds: from the prompt's ids to the last output token, prefill included.
        energy_j: of the whole machine in that time; None where it has no counter.
        fallbacks: what did not go as planned, in words.
        memory_bytes: main memory that the plan's stages hold after it, counted as the profile does; None: not known.
    """

    token_ids: tuple[int, ...]
    seconds: float
    ttft_s: float | None
    acceptance_length: float | None
    energy_j: float | None
    fallbacks: tuple[str, ...] = ()
    memory_bytes: int | None = None

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / max(1, len(self.token_ids))


class LiveProcess(CommandProcess):
    """An engine in a process of its own; its commands are those of `LiveSession`."""

    _noun = "plan"

    def __init__(self, name: str) -> None:
        super().__init__("autopipe.tune.live_worker", name, threads=1)

    def end(self) -> None:
        """Let it close its engine, then end it."""
        with contextlib.suppress(AutoPipeError, TimeoutError):  # it is killed then, and its stages end with it
            self.ask("close", timeout_s=_CLOSE_S)
        self.close()


class LiveBench:
    """Runs plans on prompts; plans with the same models share a process.

    Args:
        max_new_tokens: longest output.
        deadline_s: on the clock of `time.monotonic`: nothing is waited for any longer.
        keep: processes that may live at once; for another one the oldest ends first.
    """

    def __init__(self, max_new_tokens: int, deadline_s: float, keep: int = 1) -> None:
        self._max_new_tokens = max_new_tokens
        self.deadline_s = deadline_s
        self._keep = max(1, keep)
        self._processes: dict[str, LiveProcess] = {}
        self._in_force: dict[str, Plan] = {}
        self._usual: dict[str, set[str]] = {}

    def __enter__(self) -> LiveBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, plan: Plan, prompt: ProfilePrompt) -> Run:
        """Continue a prompt under a plan.

        Raises:
            OutOfTimeError: the deadline came before. AutoPipeError: the plan fails, or did not run as planned; the next
                one is not the worse for it.
        """
        self._put(plan, prompt)
        return self._run(plan, prompt, self._max_new_tokens)

    def trace(self, plan: Plan, prompt: ProfilePrompt, max_new_tokens: int, path: Path) -> None:
        """Write the Chrome trace of a short request; raises as `run`."""
        self._put(plan, prompt)
        self._ask(plan, "trace", ids=list(prompt.ids), max_new_tokens=max_new_tokens, path=str(path))

    def idle_power_w(self, plan: Plan, seconds: float) -> float | None:
        """Watts of the machine while the engine of a plan that has run sleeps; None without an energy counter."""
        energy_j = self._ask(plan, "rest", seconds=seconds)
        return None if energy_j is None else float(energy_j) / seconds

    def close(self) -> None:
        """End all processes; their memory is back with the system."""
        for models in list(self._processes):
            self._end(models)

    def _put(self, plan: Plan, prompt: ProfilePrompt) -> None:
        """Have `plan` in force, its models loaded and warm."""
        models = models_of(plan)
        is_new = models not in self._processes
        if is_new:
            while len(self._processes) >= self._keep:
                self._end(next(iter(self._processes)))
            self._processes[models] = LiveProcess(plan.names()[-1])
        if plan != self._in_force.get(models):
            self._ask(plan, "put", plan=plan.model_dump(mode="json"))
            self._in_force[models] = plan
        if is_new:
            self._run(plan, prompt, min(WARM_UP_TOKENS, self._max_new_tokens))

    def _run(self, plan: Plan, prompt: ProfilePrompt, max_new_tokens: int) -> Run:
        answer = self._ask(plan, "run", ids=list(prompt.ids), max_new_tokens=max_new_tokens)
        found = Run(**{**answer, "token_ids": tuple(answer["token_ids"]), "fallbacks": tuple(answer["fallbacks"])})
        usual = self._usual.setdefault(models_of(plan), set())
        if plan.mode is Mode.PLAIN:  # what is missing here, whatever the plan
            usual |= set(found.fallbacks)
        unusual = [note for note in found.fallbacks if note not in usual]
        if unusual:
            self._end(models_of(plan))
            raise StageError(plan.names()[-1], f"ran, but not as planned: {'; '.join(unusual)}")
        return found

    def _ask(self, plan: Plan, command: str, /, **arguments: Any) -> Any:
        """Ask the process of the plan; one that fails, or is not awaited any longer, is killed."""
        models = models_of(plan)
        left_s = self.deadline_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            return self._processes[models].ask(command, timeout_s=left_s, **arguments)
        except (AutoPipeError, TimeoutError) as error:
            self._processes.pop(models).close()
            self._in_force.pop(models, None)
            if isinstance(error, TimeoutError):
                raise OutOfTimeError from None
            raise

    def _end(self, models: str) -> None:
        self._in_force.pop(models, None)
        self._processes.pop(models).end()


def models_of(plan: Plan) -> str:
    """Equal for plans that an engine can change between without loading anything."""
    return repr(stage_keys(plan))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, in this process or as another one reported it, says that memory is out."""
    text = str(error).lower()
    signs = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory", "exit code -9")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)
