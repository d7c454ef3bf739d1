"""How a command ends: messages without tracebacks, and exit codes scripts can rely on.

0 done; 1 something failed while running; 2 a bad option, plan or prompt; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import typer

from autopipe.core.errors import AutoPipeError, ConfigError, ContextLengthError

EXIT_FAILED = 1
EXIT_BAD_OPTION = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@contextmanager
def orderly_exit() -> Iterator[None]:
    """Turn AutoPipe's errors and signals into a message on stderr and an exit code.

    SIGTERM unwinds the stack like Ctrl-C does, so that engines close and leave nothing behind.
    """
    replace_unprintable()
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _terminate) if in_main_thread else None
    try:
        yield
    except (ConfigError, ContextLengthError) as error:
        fail(str(error), EXIT_BAD_OPTION)
    except AutoPipeError as error:
        fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (`head`) has gone. Python would complain once more when it flushes stdout at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous)


def replace_unprintable() -> None:
    """Let stdout show `?` for a character that its encoding does not have, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def fail(message: str, code: int) -> NoReturn:
    """Say what went wrong on stderr and leave with `code`."""
    print(f"error: {message}" if code != EXIT_INTERRUPTED else f"\n{message}", file=sys.stderr)
    raise typer.Exit(code) from None


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)
