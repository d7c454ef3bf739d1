"""The service: an OpenAI-compatible server whose pipeline configures itself. Needs the `serve` extra.

from autopipe.service import ServiceConfig, serve

serve(Plan.load("plan.yaml"), ServiceConfig(port=8000))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError
from autopipe.service.config import Limits, ServiceConfig

if TYPE_CHECKING:
    from autopipe.core.plan import Plan

__all__ = ["Limits", "ServiceConfig", "require_extra", "serve"]

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
INSTALL = "pip install 'autopipe-llm[serve]'"


def require_extra() -> None:
    """Check that what the service needs is installed.

    Raises:
        AutoPipeError: it is not; the message names the command that installs it.
    """
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise AutoPipeError(f"the service needs the package {name} ({error}): {INSTALL}") from None


def serve(plan: Plan, config: ServiceConfig, **options: Any) -> None:
    """Serve `plan` until SIGTERM or SIGINT.

    Args:
        options: as for `open_host` (`check`, `progress`).

    Raises:
        ConfigError: the address cannot be bound.
        AutoPipeError: the extra is not installed, or the models cannot be loaded.
    """
    require_extra()
    from autopipe.service.host import open_host
    from autopipe.service.server import bind, run
    from autopipe.service.service import Service

    sock = bind(config)
    run(Service(config, plan, lambda wanted: open_host(wanted, config, **options)), sock)
