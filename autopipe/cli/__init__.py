"""The `autopipe` command. Importing it is cheap: torch and models load only when a command needs them."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the `autopipe` command with the arguments of this process, and exit."""
    from autopipe.cli.app import app
    from autopipe.cli.exits import replace_unprintable

    replace_unprintable()
    app(prog_name="autopipe")
