"""The service without HTTP: loads the pipeline, hands out requests, knows how things stand, ends in order."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.plan import Plan
from autopipe.core.request import Outcome
from autopipe.core.sampling import SamplingParams
from autopipe.service.config import ServiceConfig
from autopipe.service.control import Control
from autopipe.service.errors import ApiError, from_engine, invalid, unavailable
from autopipe.service.events import EventHub
from autopipe.service.generation import Choice, Ended
from autopipe.service.host import EngineHost, Opener
from autopipe.service.metrics import Metrics
from autopipe.service.pulse import Pulse
from autopipe.service.status import empty_status
from autopipe.service.token_text import TokenTexts
from autopipe.service.totals import StageTotals

if TYPE_CHECKING:
    from autopipe.core.journal import Journal

_log = logging.getLogger("autopipe.service")


_LOADER_PATIENCE_S = 5.0


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"
    """The target is gone and being started again, or could not be loaded."""
    STOPPING = "stopping"


class Service:
    """One pipeline for many clients.

    `start` returns at once; the models load in a thread. Everything may be called from any thread.

    Args:
        plan: to begin with.
        opener: loads it.

    Raises:
        ConfigError, JournalError: the journal cannot be used.
    """

    def __init__(self, config: ServiceConfig, plan: Plan, opener: Opener) -> None:
        self.config = config
        self.events = EventHub(config.limits.max_event_streams)
        self.totals = StageTotals()
        self.pulse = Pulse()
        self.metrics = Metrics(config.served_model_name, self.status, self.totals.finished)
        self.fingerprint = _fingerprint(plan)
        self.loaded = threading.Event()
        self.load_error: BaseException | None = None
        self._journal = _open_journal(config)
        self._plan = plan
        self._opener = opener
        self._host: EngineHost | None = None
        self._control: Control | None = None
        self._texts: TokenTexts | None = None
        self._opened = ExitStack()
        self._stopping = False
        self._closed = False
        self._choices: set[Choice] = set()
        self._gate = threading.Lock()
        self._loader = threading.Thread(target=self._load, name="autopipe-load", daemon=True)

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load."""
        self._loader.start()

    def _load(self) -> None:
        with ExitStack() as opened:
            try:
                host = self._opener(self._plan)
                opened.callback(host.close)
                texts = TokenTexts(host.tokenizer)
                control = Control(self.config, host, self.pulse, self.totals, self.events, self.metrics)
                opened.callback(control.stop)
                control.start()
                num_cut_off = 0 if self._journal is None else self._journal.recover(host)
            except BaseException as error:  # whoever waits for `loaded` is told
                self.load_error = error
            else:
                self._take_over(opened, host, texts, control)
                if num_cut_off:
                    _log.info("%d requests in the journal were cut off and go on", num_cut_off)
        self.events.publish("service", {"state": self.state})
        self.loaded.set()

    def _take_over(self, opened: ExitStack, host: EngineHost, texts: TokenTexts, control: Control) -> None:
        """Put what was loaded to use, unless the service has been closed meanwhile."""
        with self._gate:
            if not self._closed:
                self._host, self._texts, self._control = host, texts, control
                self._opened = opened.pop_all()

    @property
    def state(self) -> State:
        if self._stopping:
            return State.STOPPING
        if self.load_error is not None:
            return State.DEAD
        if self._host is None or self._control is None:
            return State.LOADING
        return State.READY if self._control.target_lives else State.DEAD

    def begin_shutdown(self) -> None:
        """Take no new requests."""
        if not self._stopping:
            self._stopping = True
            self.events.publish("service", {"state": self.state})
            self.events.close()

    def abort_all(self) -> int:
        """Cut what is under way short; clients get what there is, with its finish_reason. Returns how many."""
        with self._gate:
            choices = list(self._choices)
        for choice in choices:
            choice.abort()
        return len(choices)

    def close(self) -> None:
        """End the pipeline; returns when its processes are gone."""
        self.begin_shutdown()
        if self._loader.is_alive():
            self._loader.join(_LOADER_PATIENCE_S)
        with self._gate:
            self._closed = True  # what is still loading is closed by the thread that loads it
        self._opened.close()
        if self._journal is not None:
            self._journal.close()

    # -- requests -------------------------------------------------------------------------------------------

    def ready(self) -> EngineHost:
        """The engine.

        Raises:
            ApiError: it is loading, could not be loaded, or the service is shutting down.
        """
        if self._stopping:
            raise unavailable("the service is shutting down", "shutting_down", 5)
        if self.load_error is not None:
            raise unavailable("the models could not be loaded; the server's log says why", "dead", 60)
        if self._host is None:
            raise _loading()
        return self._host

    @property
    def texts(self) -> TokenTexts:
        if self._texts is None:
            raise _loading()
        return self._texts

    def open_choices(
        self, rows: Sequence[tuple[list[int], SamplingParams]], names: Mapping[str, str], key: str | None = None
    ) -> list[Choice]:
        """Submit choices, all or none. With a key this waits for the disk.

        Args:
            rows: prompt and options of each.
            names: the engine's keys -> the request's fields, for errors.
            key: idempotency key, for the journal.

        Raises:
            ApiError: the engine refuses one of them, or its queue is full.
        """
        host = self.ready()
        opened: list[Choice] = []
        try:
            for number, (ids, params) in enumerate(rows):
                if key is None:
                    handle = host.submit(ids, params)
                else:
                    handle = self.journal.submit(
                        host, choice_key(key, number), ids, params, eos_token_ids=host.eos_token_ids
                    )
                opened.append(Choice(handle, params, host.tokenizer, self))
        except Exception as error:
            for choice in opened:
                choice.discard()
            raise from_engine(error, names) from error
        with self._gate:
            self._choices.update(opened)
        if self._control is not None:
            self._control.note_request()
        return opened

    def forget(self, choices: Sequence[Choice]) -> None:
        """Nobody waits for these any more: what is not finished is cancelled."""
        for choice in choices:
            choice.discard()
        with self._gate:
            self._choices.difference_update(choices)

    @property
    def journal(self) -> Journal:
        """Where requests with an idempotency key are kept.

        Raises:
            ApiError: this service keeps none.
        """
        if self._journal is None:
            raise invalid(
                "Idempotency-Key", "Idempotency-Key: this service keeps no journal (autopipe serve --journal FILE)"
            )
        return self._journal

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def num_open(self) -> int:
        """Choices whose clients are still being served."""
        return len(self._choices)

    # what choices report (`generation.Listener`)

    def delivered(self, num_tokens: int) -> None:
        self.pulse.delivered(num_tokens)

    def ended(self, ended: Ended) -> None:
        self.pulse.touch()
        self.metrics.count_end(ended)
        if isinstance(ended.outcome, Outcome):
            self.totals.count(ended.request, ended.outcome.stats.stages)

    # -- how things stand -----------------------------------------------------------------------------------

    @property
    def control(self) -> Control:
        """The runtime controller.

        Raises:
            ApiError: the models are loading.
        """
        self.ready()
        if self._control is None:
            raise _loading()
        return self._control

    def status(self) -> dict[str, Any]:
        """Everything the live page shows, see docs/serve.md."""
        head = {"state": self.state.value, "model": self.config.served_model_name, "time": round(time.time(), 3)}
        if self._control is None:
            return {**head, **empty_status()}
        with contextlib.suppress(AutoPipeError):
            return {**head, **self._control.status()}
        return {**head, **empty_status()}


def _loading() -> ApiError:
    return unavailable("the models are loading; try again in a moment", "loading", 2)


def choice_key(key: str, number: int) -> str:
    """The journal's key of a request's choice."""
    return key if number == 0 else f"{key}#{number}"


def _open_journal(config: ServiceConfig) -> Journal | None:
    if config.journal_path is None:
        return None
    from autopipe.core.journal import Journal

    try:
        return Journal(config.journal_path, max_age_s=config.journal_retention_s)
    except ConfigError as error:
        raise ConfigError("journal_path", error.value, error.allowed) from None


def _fingerprint(plan: Plan) -> str:
    """Of what determines the output: the target and exactness; drafters, windows and mode do not."""
    identity = f"{sorted(plan.target.identity().items())}{plan.exact}{plan.verification}"
    return "fp_" + hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
