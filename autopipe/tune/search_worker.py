"""A worker of a search: `python -m autopipe.tune.search_worker`, started by `Workers` with its task on stdin.

It ends with its input, which stays open as long as the process that started it lives.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from autopipe.profile import Profile
from autopipe.tune.predict import PowerModel, Predictor
from autopipe.tune.search import run_worker
from autopipe.tune.storage import import_optuna, open_storage
from autopipe.tune.workers import settings_of, space_of


def main() -> None:
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, name="tune-parent", daemon=True).start()
    optuna = import_optuna()
    study = optuna.load_study(study_name=task["study"], storage=open_storage(task["storage"]))
    power = None if task["power"] is None else PowerModel(**task["power"])
    run_worker(
        study,
        space_of(task["space"]),
        Predictor(Profile.parse(task["profile"]), power),
        settings_of(task["settings"]),
        endless=task["endless"],
        deadline_s=task["deadline_s"],
    )


def _end_with_input() -> None:
    """End this process at once when its parent is gone, however it ended: nobody waits for the trial in flight."""
    while os.read(sys.stdin.fileno(), 1):  # not `sys.stdin`, whose lock would be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
