"""The process that measures one stage: `python -m autopipe.profile.worker`, started by `StageProcess`.

Commands come as JSON objects, one a line, on standard input; each is answered by one line. It ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from autopipe.core.errors import AutoPipeError

_log = logging.getLogger(__name__)


class StageSession:
    """A loaded stage that obeys commands. Each method is one; its result is JSON-ready."""

    def __init__(self) -> None:
        self._backend: Any = None

    def load(self, stage: dict[str, Any], exact: bool, threads: int) -> dict[str, Any]:
        """Load the stage."""
        from autopipe.core.backends.load import check_stage, load_backend
        from autopipe.core.plan import StagePlan

        plan = StagePlan.parse(stage)
        started = time.monotonic()
        self._backend = backend = load_backend(plan, exact=exact, threads=threads)
        load_s = time.monotonic() - started
        return {
            "load_s": load_s,
            "device": check_stage(plan).device,
            "vocab_size": backend.vocab_size,
            "max_length": backend.max_length,
            "exact": backend.exact,
            "choice": backend.choice_reason,
        }

    def memory(self) -> dict[str, Any]:
        """Memory of this process, and on the GPU; null where it cannot be told."""
        import psutil

        full = psutil.Process().memory_full_info()
        notes = self._backend.cost_notes()
        return {
            "rss_bytes": full.rss,
            "pss_bytes": getattr(full, "pss", None),
            "weight_bytes": notes.weight_bytes,
            "kv_bytes_per_token": notes.kv_bytes_per_token,
            "device_bytes": _reserved_on_gpu(),
        }

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        import torch

        torch.set_num_threads(threads)
        set_threads = getattr(self._backend, "set_threads", None)
        if set_threads is not None:
            set_threads(threads)

    def verify(self, contexts: list[int], tokens: list[int], repeats: int) -> dict[str, list[dict[str, Any]]]:
        """Latency of a forward of n tokens behind each context, for each n; see `measure.verify_points`."""
        from autopipe.profile import measure

        return measure.verify_points(self._backend, contexts, tokens, repeats)

    def prefill(self, context: int, tokens: list[int], repeats: int) -> list[dict[str, Any]]:
        """Latency of a prefill of n tokens behind `context` tokens, for each n."""
        from autopipe.profile import measure

        return measure.prefill_points(self._backend, context, tokens, repeats)

    def spin(self, context: int, tokens: int, seconds: float) -> list[tuple[float, float]]:
        """Forward `tokens` tokens over and over; start and end of each, on the clock all processes share."""
        from autopipe.profile import measure

        return measure.spin(self._backend, context, tokens, seconds)

    def greedy(self, prompt: list[int], max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        """The greedy output of this stage as a target."""
        from autopipe.profile import teacher

        return teacher.greedy_output(self._backend, prompt, max_new_tokens, eos)

    def picks(self, prompt: list[int], output: list[int], vocab_size: int) -> list[int]:
        """What this stage would pick at each position of `output`."""
        from autopipe.profile import teacher

        return teacher.forced_picks(self._backend, prompt, output, vocab_size)


def _reserved_on_gpu() -> int | None:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.memory_reserved():
        return None
    return int(torch.cuda.memory_reserved())


COMMANDS = ("load", "memory", "set_threads", "verify", "prefill", "spin", "greedy", "picks")


def serve(session: Any, commands: Sequence[str]) -> None:
    """Obey commands until the input ends, and leave.

    Args:
        session: has a method for each command; results are JSON-ready.
    """
    # Answers leave through a descriptor of their own: whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name not in commands:
                raise ValueError(f"no such command: {name}")
            answer = {"result": getattr(session, name)(**command)}
        except Exception as error:  # reported to the parent, which decides
            if not isinstance(error, AutoPipeError):
                _log.error("%s", traceback.format_exc())
            answer = {"error": type(error).__name__, "message": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    serve(StageSession(), COMMANDS)
    os._exit(0)  # nothing to save; skips the slow teardown of threads and libraries


if __name__ == "__main__":
    main()
