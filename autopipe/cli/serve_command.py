"""`autopipe serve`: an OpenAI-compatible server over a self-configuring pipeline."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.cli import arguments as arg

if TYPE_CHECKING:
    from autopipe.cli.options import PlanOptions

HELP = """Serve a pipeline to OpenAI's clients; it configures itself while it runs.

Then open http://127.0.0.1:8000/ to watch it, or point a client at http://127.0.0.1:8000/v1.

Examples:

- `autopipe serve`
- `autopipe serve --target big --drafter ngram --drafter small --policy rules`
- `AUTOPIPE_API_KEY=secret autopipe serve --plan plan.yaml --host 0.0.0.0 --port 8080`
- `autopipe serve --journal requests.sqlite --idle-unload 600`

SIGTERM or Ctrl-C: no new requests; those under way may go on for `--shutdown-timeout` seconds.
"""

_SERVING = "Serving"
_RUNTIME = "Runtime"
_LIMITS = "Limits of one request"
_CONNECTIONS = "Connections"
_OPTIONS = {
    "host": "--host",
    "port": "--port",
    "api_key": "--api-key",
    "served_model_name": "--served-model-name",
    "policy": "--policy",
    "policy_path": "--policy-path",
    "control_interval_s": "--control-interval",
    "idle_unload_s": "--idle-unload",
    "shutdown_timeout_s": "--shutdown-timeout",
    "keep_alive_s": "--keep-alive",
    "journal_path": "--journal",
    "journal_retention_s": "--journal-retention",
    "max_active": "--max-active",
    "kv_bytes": "--kv-mb",
    "limits.max_body_bytes": "--max-body-bytes",
    "limits.max_prompt_tokens": "--max-prompt-tokens",
    "limits.max_new_tokens": "--max-new-tokens",
    "limits.max_choices": "--max-choices",
    "limits.max_stops": "--max-stops",
    "limits.max_queue": "--max-queue",
    "limits.max_connections": "--max-connections",
    "limits.head_timeout_s": "--head-timeout",
    "limits.body_timeout_s": "--body-timeout",
}
"""Key of `ServiceConfig` -> the option that sets it."""


def _option(name: str, panel: str, text: str, **more: Any) -> Any:
    return typer.Option(name, rich_help_panel=panel, help=text, **more)


def serve(
    host: Annotated[str, _option("--host", _SERVING, "Address to bind. Others than this machine need a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, _option("--port", _SERVING, "Port; 0 picks a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        _option(
            "--api-key",
            _SERVING,
            "What clients must send as bearer token. Better set it in the environment, where `ps` does not show it.",
            metavar="KEY",
            envvar="AUTOPIPE_API_KEY",
        ),
    ] = None,
    allow_unauthenticated_remote: Annotated[
        bool, _option("--allow-unauthenticated-remote", _SERVING, "Let everybody who can reach --host use it.")
    ] = False,
    served_model_name: Annotated[
        str | None,
        _option("--served-model-name", _SERVING, "What clients call the target. Default: its name.", metavar="NAME"),
    ] = None,
    shutdown_timeout: Annotated[
        float, _option("--shutdown-timeout", _SERVING, "Seconds requests may go on after SIGTERM.", metavar="S")
    ] = 30.0,
    log_prompts: Annotated[bool, _option("--log-prompts", _SERVING, "Let the log hold what users write.")] = False,
    quiet: Annotated[bool, _option("--quiet", _SERVING, "Log warnings only.")] = False,
    policy: Annotated[
        str,
        _option(
            "--policy",
            _RUNTIME,
            "Who chooses the plan while it runs: `static` (nobody), `rules`, `bandit`, `planner`, `rl`.",
            metavar="NAME",
        ),
    ] = "static",
    policy_path: Annotated[
        Path | None, _option("--policy-path", _RUNTIME, "Folder of a trained policy, for `rl`.", metavar="FOLDER")
    ] = None,
    control_interval: Annotated[
        float, _option("--control-interval", _RUNTIME, "Seconds between two looks at the pipeline.", metavar="S")
    ] = 1.0,
    idle_unload: Annotated[
        float | None,
        _option(
            "--idle-unload",
            _RUNTIME,
            "Unload drafters after this many seconds without a request; the next brings them back. Default: never.",
            metavar="S",
        ),
    ] = None,
    sharing: Annotated[
        bool,
        _option("--sharing/--no-sharing", _RUNTIME, "Let requests share the target in one step, or take turns."),
    ] = True,
    max_active: Annotated[
        int, _option("--max-active", _RUNTIME, "Requests in the pipeline at once.", metavar="N")
    ] = 32,
    prefix_cache: Annotated[
        bool,
        _option("--prefix-cache/--no-prefix-cache", _RUNTIME, "Reuse the beginnings that prompts share."),
    ] = True,
    kv_mb: Annotated[
        int | None,
        _option(
            "--kv-mb", _RUNTIME, "Memory for all keys and values. Default: a quarter of what is free.", metavar="N"
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        _option(
            "--journal",
            _RUNTIME,
            "Keep accepted tokens in this SQLite file, so that requests with an idempotency key survive a crash. "
            "Default: nothing is kept.",
            metavar="FILE",
        ),
    ] = None,
    journal_retention: Annotated[
        float, _option("--journal-retention", _RUNTIME, "Seconds that finished requests are kept.", metavar="S")
    ] = 86400.0,
    plan: arg.PlanFile = None,
    target: arg.Target = None,
    drafter: arg.Drafters = None,
    mode: arg.Mode = None,
    window: arg.Windows = None,
    min_drafts: arg.MinDrafts = None,
    verify_cap: arg.VerifyCap = None,
    warmup: arg.Warmup = None,
    verification: arg.Verification = None,
    exact: arg.Exact = None,
    backend: arg.Backend = None,
    dtype: arg.Dtype = None,
    device: arg.Device = None,
    threads: arg.Threads = None,
    adapter: arg.Adapter = None,
    trust_remote_code: arg.TrustRemoteCode = False,
    max_queue: Annotated[int, _option("--max-queue", _LIMITS, "Choices that may wait; then 429.", metavar="N")] = 128,
    max_body_bytes: Annotated[int, _option("--max-body-bytes", _LIMITS, "Largest body.", metavar="N")] = 4 << 20,
    max_prompt_tokens: Annotated[
        int | None, _option("--max-prompt-tokens", _LIMITS, "Longest prompt. Default: the context.", metavar="N")
    ] = None,
    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", _LIMITS, "Most output tokens. Default: the context.", metavar="N")
    ] = None,
    max_choices: Annotated[int, _option("--max-choices", _LIMITS, "Most choices (prompts x n).", metavar="N")] = 16,
    max_stops: Annotated[int, _option("--max-stops", _LIMITS, "Most stop strings.", metavar="N")] = 4,
    max_connections: Annotated[
        int, _option("--max-connections", _CONNECTIONS, "Connections that may be open; then 503.", metavar="N")
    ] = 512,
    head_timeout: Annotated[
        float, _option("--head-timeout", _CONNECTIONS, "Seconds a request's headers may take to arrive.", metavar="S")
    ] = 15.0,
    body_timeout: Annotated[
        float, _option("--body-timeout", _CONNECTIONS, "Seconds a request's body may take to arrive.", metavar="S")
    ] = 30.0,
    keep_alive: Annotated[
        int, _option("--keep-alive", _CONNECTIONS, "Seconds a connection may idle between requests.", metavar="S")
    ] = 30,
    online: Annotated[
        bool,
        _option(
            "--online/--no-online",
            _SERVING,
            "Let the n-gram drafter learn from what it serves, in memory only. Output stays the same.",
        ),
    ] = True,
) -> None:
    from autopipe.cli.exits import orderly_exit

    with orderly_exit():
        from autopipe.cli.options import PlanOptions

        run(
            PlanOptions(
                plan=plan,
                target=target,
                drafters=drafter or (),
                mode=mode,
                windows=window or (),
                min_drafts=min_drafts,
                verify_cap=verify_cap,
                backend=backend,
                dtype=dtype,
                device=device,
                threads=threads,
                adapter=adapter,
                verification=verification,
                exact=exact,
                warmup=warmup,
                trust_remote_code=trust_remote_code,
            ),
            served_model_name=served_model_name,
            quiet=quiet,
            online=online,
            settings={
                "host": host,
                "port": port,
                "api_key": api_key,
                "allow_unauthenticated_remote": allow_unauthenticated_remote,
                "policy": policy,
                "policy_path": None if policy_path is None else str(policy_path),
                "control_interval_s": control_interval,
                "idle_unload_s": idle_unload,
                "shutdown_timeout_s": shutdown_timeout,
                "keep_alive_s": keep_alive,
                "journal_path": None if journal is None else str(journal),
                "journal_retention_s": journal_retention,
                "sharing": sharing,
                "max_active": max_active,
                "prefix_cache": prefix_cache,
                "kv_bytes": None if kv_mb is None else kv_mb << 20,
                "log_prompts": log_prompts,
                "limits": {
                    "max_queue": max_queue,
                    "max_body_bytes": max_body_bytes,
                    "max_prompt_tokens": max_prompt_tokens,
                    "max_new_tokens": max_new_tokens,
                    "max_choices": max_choices,
                    "max_stops": max_stops,
                    "max_connections": max_connections,
                    "head_timeout_s": head_timeout,
                    "body_timeout_s": body_timeout,
                },
            },
        )


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(name="serve", help=HELP)(serve)


def run(
    options: PlanOptions, *, settings: dict[str, Any], served_model_name: str | None, quiet: bool, online: bool = True
) -> None:
    """Check everything that can be checked at once, then serve.

    Raises:
        ConfigError: a bad option, before anything is loaded.
        AutoPipeError: the `serve` extra is not installed, or the models cannot be loaded.
    """
    from autopipe.cli.options import build_plan, naming_options
    from autopipe.cli.run_command import say
    from autopipe.core.errors import ConfigError
    from autopipe.service import ServiceConfig, require_extra, serve
    from autopipe.service.config import default_alias

    require_extra()
    plan = build_plan(options).learning_online(online)
    name = served_model_name or default_alias(plan.target.name or plan.target.model)
    try:
        config = ServiceConfig.parse({**settings, "served_model_name": name})
    except ConfigError as error:
        raise ConfigError(_OPTIONS.get(error.key, error.key), error.value, error.allowed) from None
    if not config.is_local and config.api_key is None:
        say(f"warning: everybody who can reach {config.host} may use this service, and see its page")
    try:
        with naming_options(options, plan), _logging_to_stderr(quiet):
            serve(plan, config, progress=say)
    except ConfigError as error:
        raise ConfigError(_OPTIONS.get(error.key, error.key), error.value, error.allowed) from None


@contextmanager
def _logging_to_stderr(quiet: bool) -> Iterator[None]:
    """AutoPipe's log, and uvicorn's warnings, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours, servers = logging.getLogger("autopipe"), logging.getLogger("uvicorn.error")
    levels = ours.level, servers.level
    ours.setLevel(logging.WARNING if quiet else logging.INFO)
    servers.setLevel(logging.WARNING)
    for logger in (ours, servers):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip((ours, servers), levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
