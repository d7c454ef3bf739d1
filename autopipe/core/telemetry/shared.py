"""One sampler for the whole process: pipelines, requests and benches that run at once share its threads."""

from __future__ import annotations

import os
import threading
import weakref

from autopipe.core.telemetry.sampler import Sampler

_lock = threading.RLock()  # a lease may be collected, and so closed, while this thread takes one
_sampler: Sampler | None = None
_num_users = 0


class SamplerLease:
    """Keeps the process's sampler running until `close`, or until the lease is collected; the last one stops it."""

    def __init__(self) -> None:
        global _sampler, _num_users
        with _lock:
            if _sampler is None:
                _sampler = Sampler().start()
            _num_users += 1
            self.sampler = _sampler
        self._finalizer = weakref.finalize(self, _give_back, os.getpid())
        self._finalizer.atexit = False  # the threads are daemons: at exit nothing is waited for

    def close(self) -> None:
        """May be called more than once, and in a forked copy, where it does nothing."""
        self._finalizer()


def _give_back(owner: int) -> None:
    global _sampler, _num_users
    if os.getpid() != owner:
        return
    with _lock:
        _num_users -= 1
        unused = _sampler if not _num_users else None
        if unused is not None:
            _sampler = None
    if unused is not None:
        unused.stop()


def _start_anew() -> None:
    """A forked copy has no threads: it makes a sampler of its own."""
    global _lock, _sampler, _num_users
    _lock, _sampler, _num_users = threading.RLock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
