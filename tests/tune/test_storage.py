from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import optuna
import pytest

from autopipe.core.errors import ConfigError
from autopipe.tune.storage import open_storage


@pytest.mark.parametrize("url", ["sqlite:///{}/s.db", "journal:///{}/s.log"])
def test_a_study_is_found_again(tmp_path: Path, url: str) -> None:
    url = url.format(tmp_path)
    optuna.create_study(storage=open_storage(url), study_name="mine").set_user_attr("note", 7)

    assert optuna.load_study(storage=open_storage(url), study_name="mine").user_attrs == {"note": 7}


@pytest.mark.parametrize(
    "url", ["tune.db", "nosuch://x", "sqlite:////no/such/folder/s.db", "journal:////no/such/s.log"]
)
def test_a_storage_that_cannot_be_opened_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError, match="--storage"):
        open_storage(url)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_storage("nosuch://me:secret@host/db")

    assert "secret" not in str(raised.value)


def test_sqlite_transactions_begin_with_the_write_lock(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/s.db")
    with storage.engine.connect() as connection:  # type: ignore[attr-defined]
        connection.exec_driver_sql("select 1")
        other = sqlite3.connect(tmp_path / "s.db", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("begin immediate")
        other.close()


def test_opening_a_database_leaves_the_loggers_of_this_process_alone(tmp_path: Path) -> None:
    mine, root = logging.getLogger("autopipe.somewhere"), logging.getLogger()
    handlers, level = list(root.handlers), root.level

    open_storage(f"sqlite:///{tmp_path}/s.db")

    assert not mine.disabled
    assert (root.handlers, root.level) == (handlers, level)
