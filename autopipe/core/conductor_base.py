"""What the threads of both engines have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import Any

from autopipe.core.mailbox import Mailbox
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle

_log = logging.getLogger(__name__)

WATCH_S, IDLE_WATCH_S = 0.1, 1.0
"""How long a thread sleeps at most, while something is under way and while nothing is."""
_RECENT = 16


class ConductorBase(ABC):
    """Run by one thread only; everybody else puts commands into its mailbox.

    Attributes:
        plan: the plan in force.
        target_facts: what the target said when it was ready.
        fallbacks: what has not gone as planned so far, in words.
        num_tokens: output tokens of all requests so far.
        recent: the requests begun last, oldest first.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.target_facts: dict[str, Any] = {}
        self.fallbacks: list[str] = []
        self.num_tokens = 0
        self.recent: deque[RequestHandle] = deque(maxlen=_RECENT)
        self.mailbox = Mailbox()

    def run(self) -> None:
        """The thread: returns once the mailbox is closed and everything has ended."""
        try:
            while not self.mailbox.closed:
                self._turn()
        except BaseException:  # whatever it is, it must not leave callers waiting for ever
            _log.exception("the engine failed")
        finally:
            self.mailbox.close()
            self._shut_down()

    @abstractmethod
    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Fail what has not ended; give everything back."""

    @abstractmethod
    def start_plan(self, plan: Plan, done: Future[None]) -> None:
        """Put `plan` in force as soon as it can be; `done` learns when it is, or why not."""

    @abstractmethod
    def withdraw_plan(self, done: Future[None]) -> None:
        """Nobody waits for the plan of `done` any more."""

    @abstractmethod
    def save_ngrams(self, path: str, done: Future[int]) -> None:
        """Have what the n-gram drafter learned online written; `done` gets the number of contexts."""

    @abstractmethod
    def cancel(self, handle: RequestHandle) -> None:
        """End a request, whether it has begun or waits."""

    def _note(self, text: str) -> None:
        """Something has not gone as planned: it is logged once, and kept."""
        if text not in self.fallbacks:
            _log.warning("%s", text)
            self.fallbacks.append(text)
