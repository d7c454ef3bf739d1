"""Requests that outlive the target they wait for: handed to the engine again when it dies before they have begun."""

from __future__ import annotations

import threading
from collections.abc import Callable

from autopipe.core.errors import AutoPipeError, TargetDiedError
from autopipe.core.request import RequestHandle, TokenBlock

_MOST_TIMES = 3
"""A target that dies as often before a request's turn comes is not tried again."""


class CarriedRequest:
    """Passes an engine's tokens on to `handle`, over the death of the target while nothing has been computed.

    An engine that takes turns fails those that wait together with the one under way; they lose nothing by waiting on.

    Args:
        submit: hands the request to the engine; called again when that is needed, from the engine's thread.
    """

    def __init__(self, submit: Callable[[], RequestHandle]) -> None:
        self._submit = submit
        self._times_left = _MOST_TIMES
        self._gate = threading.RLock()
        self._inner = inner = submit()
        self.handle = RequestHandle(
            inner.id, inner.prompt, inner.params, inner.eos_token_ids, None, False, lambda _: self._inner.cancel()
        )
        inner.listen(self._pass_on)

    def _pass_on(self) -> None:
        with self._gate:
            inner, handle = self._inner, self.handle
            for event in inner.take():
                handle.begun_s = inner.begun_s
                if isinstance(event, TokenBlock):
                    handle.put_tokens(event)
                elif isinstance(event, TargetDiedError) and inner.begun_s is None and self._times_left:
                    self._carry_over()
                else:
                    handle.put_outcome(event)

    def _carry_over(self) -> None:
        self._times_left -= 1
        try:
            inner = self._submit()
        except AutoPipeError as error:
            self.handle.put_outcome(error)
            return
        self._inner, self.handle.id = inner, inner.id
        inner.submitted_s = self.handle.submitted_s  # it has waited since then
        if self.handle.cancelled:  # meanwhile, which the one before was told
            inner.cancel()
        inner.listen(self._pass_on)
