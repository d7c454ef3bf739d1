"""Registration, in whatever order things are imported, and how little importing costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import gymnasium
import pytest

import autopipe.envs
from autopipe.envs.registration import register_envs

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


LIST = "print(sorted(key for key in gymnasium.registry if key.startswith('AutoPipe/')))"
BOTH = "['AutoPipe/Pipeline-v0', 'AutoPipe/PipelineSim-v0']\n"


@pytest.mark.parametrize("imports", ["import gymnasium, autopipe.envs", "import autopipe.envs, gymnasium"])
def test_both_environments_are_registered_in_either_order(imports: str) -> None:
    assert run(f"{imports}\n{LIST}") == BOTH


def test_looking_for_gymnasium_does_not_use_up_the_registration() -> None:
    code = f"import autopipe.envs, importlib.util; importlib.util.find_spec('gymnasium')\nimport gymnasium\n{LIST}"
    assert run(code) == BOTH


def test_gymnasium_keeps_its_own_loader() -> None:
    code = "import autopipe.envs, gymnasium as g; print([type(x).__name__ for x in (g.__spec__.loader, g.__loader__)])"
    assert run(code) == "['SourceFileLoader', 'SourceFileLoader']\n"


def test_gymnasiums_module_syntax_works() -> None:
    code = "import gymnasium; gymnasium.make('autopipe.envs:AutoPipe/PipelineSim-v0').reset(seed=0); print('made')"
    assert run(code) == "made\n"


def test_importing_the_package_imports_neither_gymnasium_nor_torch_nor_numba() -> None:
    heavy = ("gymnasium", "torch", "numba", "matplotlib")
    assert run(f"import sys, autopipe.envs; print([name for name in {heavy} if name in sys.modules])") == "[]\n"


def test_importing_still_works_without_gymnasium() -> None:
    code = "import sys; sys.modules['gymnasium'] = None\nimport autopipe.envs; print(autopipe.envs.scenario_names()[0])"
    assert run(code) == "alternating\n"


def test_registering_twice_does_nothing() -> None:
    before = dict(gymnasium.registry)
    register_envs()
    assert gymnasium.registry == before


def test_only_the_live_environment_is_nondeterministic() -> None:
    assert gymnasium.spec("AutoPipe/Pipeline-v0").nondeterministic
    assert not gymnasium.spec("AutoPipe/PipelineSim-v0").nondeterministic


def test_the_entry_point_names_the_function() -> None:
    points = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["gymnasium.envs"]
    assert points == {"AutoPipe": "autopipe.envs.registration:register_envs"}


@pytest.mark.parametrize("name", autopipe.envs.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(autopipe.envs, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        autopipe.envs.no_such_name  # noqa: B018
