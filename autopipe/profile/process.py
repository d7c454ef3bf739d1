"""The parent's side of a process that obeys commands: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from autopipe.core.errors import StageError, rebuild_error
from autopipe.core.plan import StagePlan


class CommandProcess:
    """A process that obeys commands, one JSON object a line, so that what they load leaves nothing behind in this one.

    Args:
        module: run as a program; it calls `autopipe.profile.worker.serve`.
        name: how errors name the process.
        threads: most threads it will compute with.
    """

    _noun = "stage"

    def __init__(self, module: str, name: str, threads: int) -> None:
        self.name = name
        self._started_s = time.monotonic()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends this one
        )

    def ask(self, command: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """Have a command of the session done; its result.

        Raises:
            StageError: the process ended. AutoPipeError: as the command raised it. TimeoutError: no answer in time;
                the process is of no more use than to be closed.
        """
        self.send(command, **arguments)
        return self.receive(timeout_s)

    def send(self, command: str, **arguments: Any) -> None:
        """The first half of `ask`: begin a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The second half of `ask`: wait for the result."""
        assert self._process.stdout is not None
        if timeout_s is not None and not select.select([self._process.stdout], [], [], max(0.0, timeout_s))[0]:
            raise TimeoutError(f"{self.name}: no answer within {timeout_s:.1f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise rebuild_error(answer["error"], f"{self._noun} {self.name!r}: {answer['message']}")
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> StageError:
        code = self._process.wait()
        return StageError(self.name, f"its measuring process ended (exit code {code})")


class StageProcess(CommandProcess):
    """One stage in a process of its own; its commands are those of `StageSession`."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__("autopipe.profile.worker", name, threads)

    def load(self, stage: StagePlan, *, exact: bool, threads: int) -> dict[str, Any]:
        """Load the stage; facts as `StageSession.load` gives them, and `start_s` of the process.

        Raises:
            AutoPipeError: it cannot be loaded.
        """
        facts: dict[str, Any] = self.ask("load", stage=stage.model_dump(mode="json"), exact=exact, threads=threads)
        return {**facts, "start_s": max(0.0, time.monotonic() - self._started_s - facts["load_s"])}
