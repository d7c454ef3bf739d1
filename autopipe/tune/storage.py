"""Where studies live: any URL that Optuna's users give, set up so that workers and crashes do no harm."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

HEARTBEAT_S = 10
GRACE_S = 40
"""A running trial whose heartbeat is older than that was left by a worker that died."""
_BUSY_S = 60.0
_ATTEMPTS, _PAUSE_S = 4, 0.25
"""Of opening a database: two calls that find none make its tables at the same time, and one of them fails."""
_JOURNAL = "journal:///"
_ALLOWED = "sqlite:///FILE, another database URL that SQLAlchemy knows, or journal:///FILE"


def open_storage(url: str | None) -> BaseStorage:
    """Open a storage, or make it. None: in memory, gone with this process.

    Raises:
        ConfigError: Optuna is not installed, no such kind of storage, or it cannot be opened.
    """
    optuna = import_optuna()
    if url is None:
        return optuna.storages.InMemoryStorage()  # type: ignore[no-any-return]
    if url.startswith(_JOURNAL):
        return _open_journal(url, optuna)
    if "://" not in url:
        raise ConfigError("--storage", url, _ALLOWED)
    return _open_database(url, optuna)


def import_optuna() -> Any:
    """Optuna, quiet: the caller shows what happens.

    Raises:
        ConfigError: it is not installed.
    """
    import warnings

    try:
        import optuna
    except ImportError:
        raise ConfigError("tune", "optuna", "an installed optuna (pip install 'autopipe-llm[tune]')") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def _open_journal(url: str, optuna: Any) -> BaseStorage:
    path = Path(url[len(_JOURNAL) :])
    journal = optuna.storages.journal
    try:
        backend = journal.JournalFileBackend(str(path), lock_obj=journal.JournalFileOpenLock(str(path)))
        return journal.JournalStorage(backend)  # type: ignore[no-any-return]
    except OSError as error:
        raise ConfigError("--storage", url, f"a file that can be written ({error})") from None


def _open_database(url: str, optuna: Any) -> BaseStorage:
    import sqlalchemy

    is_sqlite = url.startswith("sqlite")
    options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}} if is_sqlite else {}
    for attempt in range(_ATTEMPTS):
        try:
            with _loggers_kept():
                storage: BaseStorage = optuna.storages.RDBStorage(
                    url, engine_kwargs=options, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S
                )
            break
        except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError, ValueError) as error:
            made_by_another = isinstance(error, (sqlalchemy.exc.OperationalError, sqlalchemy.exc.IntegrityError))
            if not made_by_another or attempt == _ATTEMPTS - 1:
                reason = str(error).splitlines()[0]
                raise ConfigError("--storage", _without_password(url), f"{_ALLOWED} ({reason})") from None
            time.sleep(_PAUSE_S)
    if is_sqlite:
        _serialize(storage.engine)  # type: ignore[attr-defined]
    return storage


@contextlib.contextmanager
def _loggers_kept() -> Iterator[None]:
    """Undo what Optuna's migrations do to the loggers of this process: they switch off all that exist by then."""
    before = {
        logger: logger.disabled
        for logger in list(logging.Logger.manager.loggerDict.values())
        if isinstance(logger, logging.Logger)
    }
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for logger, disabled in before.items():
            logger.disabled = disabled
        root.handlers[:] = handlers
        root.setLevel(level)


def _serialize(engine: Any) -> None:
    """Begin every transaction with the write lock.

    Python's sqlite3 module begins one only at the first write, so of two workers that read a trial's state and then
    change it both would succeed. See "Serializable isolation" in SQLAlchemy's notes on SQLite.
    """
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the module begins nothing by itself

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections made before do not know


def _without_password(url: str) -> str:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url.partition("://")[0] + "://..."
