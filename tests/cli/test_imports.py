from __future__ import annotations

import subprocess
import sys


def imported_by(code: str) -> set[str]:
    """Top-level packages loaded after running `code` in a fresh interpreter."""
    report = f"{code}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_cli_loads_neither_torch_nor_transformers() -> None:
    assert not imported_by("import autopipe.cli.app") & {"torch", "transformers", "numpy"}


def test_building_a_plan_from_options_loads_neither_torch_nor_transformers() -> None:
    loaded = imported_by("from autopipe.cli.options import *\nbuild_plan(PlanOptions())\nbuild_sampling(seed=1)")

    assert not loaded & {"torch", "transformers"}


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopipe", "--help"], capture_output=True, text=True, check=True, timeout=120
    )

    assert {"run", "bench", "doctor"} <= set(done.stdout.split())
