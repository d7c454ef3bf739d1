"""A worker of a search: `python -m autopipe.tune.search_worker`, started by `Workers` with its task on stdin."""

from __future__ import annotations

import json
import sys

from autopipe.profile import Profile
from autopipe.tune.predict import PowerModel, Predictor
from autopipe.tune.search import run_worker
from autopipe.tune.storage import import_optuna, open_storage
from autopipe.tune.workers import settings_of, space_of


def main() -> None:
    task = json.loads(sys.stdin.readline())
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


if __name__ == "__main__":
    main()
