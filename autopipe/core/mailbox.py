"""Commands for the engine's one thread, from any other."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

from autopipe.core.channel import Doorbell
from autopipe.core.errors import EngineClosedError

Command = Callable[[], None]


class Mailbox:
    """A queue of commands with a doorbell that its reader sleeps on.

    Attributes:
        bell: rung with every command and when the mailbox closes.
    """

    def __init__(self) -> None:
        self.bell = Doorbell.create()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._gate = threading.RLock()  # a collection of garbage inside `post` may close another engine's
        self._closed = False
        self._owner = os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a fork of the process that made it."""
        return os.getpid() != self._owner

    def check_open(self) -> None:
        """Raises EngineClosedError when nobody will read."""
        if self.forked:
            raise EngineClosedError("this process is a fork of the engine's: make an engine of its own here")
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def post(self, command: Command) -> None:
        """Have the engine's thread run `command`. Raises EngineClosedError when there is no thread any more."""
        with self._gate:
            self.check_open()
            self._commands.put(command)
            self.bell.ring()

    def close(self) -> None:
        """Accept no more; wake the reader. May be called more than once."""
        with self._gate:
            if not self._closed and not self.forked:
                self._closed = True
                self.bell.ring()

    # -- the reader's side ----------------------------------------------------------------------------------

    def take(self) -> Iterator[Command]:
        """The commands that wait, in order."""
        while not self._commands.empty():
            yield self._commands.get()
