"""Who searches: a process of its own at the lowest priority, or, in simulation, this process with the time it takes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod

from autopipe.policies.plan_search import SearchProblem, SearchResult, search_plan

_log = logging.getLogger(__name__)


class Searcher(ABC):
    """Does one search at a time."""

    @abstractmethod
    def ask(self, problem: SearchProblem) -> None:
        """Begin a search; never waits. One that is under way is given up."""

    @abstractmethod
    def poll(self, elapsed_s: float) -> SearchResult | None:
        """The result, once; None while there is none.

        Args:
            elapsed_s: seconds of generation since the last call.
        """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a search is under way."""

    @property
    def disturbs(self) -> bool:
        """Whether a search takes time from the generation that is measured meanwhile."""
        return False

    def prepare(self, problem: SearchProblem) -> None:  # noqa: B027 - optional hook
        """Get ready ahead of the first search, which is of this kind; never waits."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class InlineSearcher(Searcher):
    """Searches here and now, but hands the result over only after the seconds that a search takes elsewhere.

    Args:
        search_s: seconds of generation until a result is there.
    """

    def __init__(self, search_s: float = 1.5) -> None:
        self._search_s = search_s
        self._left_s = 0.0
        self._result: SearchResult | None = None

    def ask(self, problem: SearchProblem) -> None:
        self._result, self._left_s = search_plan(problem), self._search_s

    def poll(self, elapsed_s: float) -> SearchResult | None:
        self._left_s -= elapsed_s
        if self._result is None or self._left_s > 0:
            return None
        result, self._result = self._result, None
        return result

    @property
    def busy(self) -> bool:
        return self._result is not None

    def close(self) -> None:
        self._result = None


DISTURBS_S = 10.0
"""A search that takes longer is no excuse any more for what is measured meanwhile."""


class ProcessSearcher(Searcher):
    """Searches in a process of its own at the lowest priority, with one thread.

    A thread of this process waits for its answers. A process that dies is started again with the next search. A search
    that is given up ends before the next begins; its result is dropped. On few cores even the lowest priority slows
    generation down, so what is measured meanwhile says little (`disturbs`).
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._exchange = threading.Lock()  # a problem and its answer, one pair at a time
        self._result: SearchResult | None = None
        self._number = 0
        self._waiting = False
        self._asked_s = 0.0

    def ask(self, problem: SearchProblem) -> None:
        self._begin(problem, wanted=True)

    def prepare(self, problem: SearchProblem) -> None:
        """Start the process and let it try one plan: most of its first search is imports."""
        self._begin(problem.model_copy(update={"trials": 1}), wanted=False)

    def poll(self, elapsed_s: float) -> SearchResult | None:
        with self._lock:
            result, self._result = self._result, None
            return result

    @property
    def busy(self) -> bool:
        return self._waiting

    @property
    def disturbs(self) -> bool:
        return self._waiting and time.monotonic() - self._asked_s < DISTURBS_S

    def close(self) -> None:
        with self._lock:
            self._number += 1  # nobody waits for an answer any more
            self._waiting, self._result = False, None
        self._end_process()

    def _end_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _begin(self, problem: SearchProblem, *, wanted: bool) -> None:
        with self._lock:
            self._number += 1
            self._waiting, self._result, self._asked_s = True, None, time.monotonic()
            work = (problem, self._number, wanted)
        threading.Thread(target=self._search, args=work, name="autopipe-search", daemon=True).start()

    def _search(self, problem: SearchProblem, number: int, wanted: bool) -> None:
        with self._exchange:
            result = self._answer(problem, number)
        with self._lock:
            if number == self._number:
                self._result, self._waiting = result if wanted else None, False

    def _answer(self, problem: SearchProblem, number: int) -> SearchResult | None:
        answer = ""
        try:
            process = self._running(number)
            if process is None:
                return None
            if process.stdin is None or process.stdout is None:
                raise OSError("the search process has no pipes")
            process.stdin.write(problem.model_dump_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            return SearchResult.model_validate_json(answer)
        except (OSError, ValueError) as error:
            if number == self._number:
                _log.warning("the search for a plan failed (%s): %s", error, answer.strip() or "no answer")
            self._end_process()
            return None

    def _running(self, number: int) -> subprocess.Popen[str] | None:
        """The process, started if need be; None: another search was asked for meanwhile, or the searcher closed."""
        with self._lock:
            if number != self._number:
                return None
            if self._process is None or self._process.poll() is not None:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "autopipe.policies.search_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            return self._process
