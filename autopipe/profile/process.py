"""The parent's side of a measuring process: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from autopipe.core.errors import StageError, rebuild_error
from autopipe.core.plan import StagePlan


class StageProcess:
    """One stage in a process of its own, so that loading and measuring leave nothing behind in this one.

    Args:
        name: how errors name the stage.
        threads: most threads it will compute with.
    """

    def __init__(self, name: str, threads: int) -> None:
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
            [sys.executable, "-m", "autopipe.profile.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends this one
        )

    def load(self, stage: StagePlan, *, exact: bool, threads: int) -> dict[str, Any]:
        """Load the stage; facts as `StageSession.load` gives them, and `start_s` of the process.

        Raises:
            AutoPipeError: it cannot be loaded.
        """
        facts: dict[str, Any] = self.ask("load", stage=stage.model_dump(mode="json"), exact=exact, threads=threads)
        return {**facts, "start_s": max(0.0, time.monotonic() - self._started_s - facts["load_s"])}

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have a command of `StageSession` done; its result.

        Raises:
            StageError: the process ended. AutoPipeError: as the command raised it.
        """
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        """The first half of `ask`: begin a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> Any:
        """The second half of `ask`: wait for the result."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise rebuild_error(answer["error"], f"stage {self.name!r}: {answer['message']}")
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

    def __enter__(self) -> StageProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> StageError:
        code = self._process.wait()
        return StageError(self.name, f"its measuring process ended (exit code {code})")
