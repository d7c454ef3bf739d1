"""Registers the environments with Gymnasium, without importing Gymnasium before somebody needs it.

Gymnasium up to 0.29 finds `register_envs` through the entry point `gymnasium.envs`; from 1.0 on it no longer looks at
entry points, and expects `import autopipe.envs` to register. Whoever imports `autopipe.envs` for the simulator or a
policy should not pay for Gymnasium, and the two imports may come in either order: so registration happens at once where
Gymnasium is loaded already, otherwise right after it has been.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

NAMESPACE = "AutoPipe"
SIM_ID = "PipelineSim-v0"
LIVE_ID = "Pipeline-v0"


def register_envs() -> None:
    """Register both environments in the namespace `AutoPipe`; does nothing where they are registered."""
    from gymnasium.envs.registration import register, registry

    if f"{NAMESPACE}/{SIM_ID}" not in registry:
        register(f"{NAMESPACE}/{SIM_ID}", entry_point="autopipe.envs.pipeline_sim:PipelineSimEnv")
    if f"{NAMESPACE}/{LIVE_ID}" not in registry:
        register(
            f"{NAMESPACE}/{LIVE_ID}",
            entry_point="autopipe.envs.pipeline_live:PipelineLiveEnv",
            nondeterministic=True,
        )


def register_when_imported() -> None:
    """Register now if Gymnasium is loaded, else as soon as it has been."""
    if getattr(sys.modules.get("gymnasium"), "register", None) is not None:
        register_envs()
    elif not any(isinstance(finder, _GymnasiumFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _GymnasiumFinder())


class _GymnasiumFinder(MetaPathFinder):
    """Finds Gymnasium as always, but with a loader that registers afterwards. Goes away once that has happened."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium" or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader, finder: _GymnasiumFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:  # resources and source are looked up through the module's own loader
            module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._loader.exec_module(module)
        register_envs()
