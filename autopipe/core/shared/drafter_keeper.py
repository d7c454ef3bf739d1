"""Which neural drafters the worker of a shared engine has loaded, and what it tells the engine of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopipe.core.channel import Message
from autopipe.core.shared.draft_maker import DraftMaker
from autopipe.core.shared.drafter_loading import DrafterLoader, LoadedDrafter
from autopipe.core.shared.drafting import NeuralDrafting


class DrafterKeeper:
    """Loads what is wanted, keeps what is to be kept, and unloads the rest. For the thread of the steps.

    Args:
        send: takes messages for the engine.
        about_to_compute: see `SharedDrafter`.
    """

    def __init__(
        self,
        maker: DraftMaker,
        loader: DrafterLoader,
        send: Callable[[Message], None],
        about_to_compute: Callable[[int], None],
    ) -> None:
        self._maker, self._loader, self._send = maker, loader, send
        self._about_to_compute = about_to_compute
        self._kept: set[str] = set()
        self._failed: set[str] = set()  # not loaded again until somebody asks
        self._number = 0  # of the last configuration
        maker.failed = lambda key, name, error: self._say("drafter-lost", key, name, error)

    def configure(self, message: Message) -> None:
        """Obey a `configure`: its number, the drafters that are wanted, the keys of those to keep, of which those in
        `again` are loaded although they have failed."""
        self._number, self._kept = message["number"], set(message["kept"])
        self._failed.difference_update(message["again"])
        for key in self._maker.drafters.keys() - self._kept:
            self._maker.remove(key)
        for wanted in map(NeuralDrafting.parse, message["wanted"]):
            threads = wanted.stage.threads or message["drafter_threads"]
            if wanted.key in self._maker.drafters:
                self._maker.set_threads(wanted.key, threads)
            elif wanted.key not in self._failed:
                self._loader.load(wanted, threads)

    def take_loaded(self) -> None:
        """Let drafters take part that have been loaded meanwhile."""
        while (loaded := self._loader.take(self._maker.resting, self._kept)) is not None:
            self._take(loaded)

    def _take(self, loaded: LoadedDrafter) -> None:
        key, name, drafter = loaded.drafting.key, loaded.drafting.name, loaded.drafter
        if key not in self._kept or key in self._maker.drafters:  # given up meanwhile
            if drafter is not None:
                drafter.close()
        elif drafter is None:
            self._say("drafter-failed", key, name, loaded.error)
        else:
            drafter.about_to_compute = self._about_to_compute
            short = f"stage {name!r}: its KV memory is full, so it rests; requests go on without its drafts meanwhile"
            drafter.fell_short = lambda: self._send({"type": "note", "text": short})
            self._maker.add(key, drafter)
            for reason in drafter.runner.shortfalls:
                self._send({"type": "note", "text": f"stage {name!r}: {reason}"})
            self._say("drafter-ready", key, name, None, facts=loaded.facts)

    def _say(self, kind: str, key: str, name: str, error: Exception | None, **more: Any) -> None:
        """Tell the engine what has become of a drafter, and as of which configuration."""
        message: Message = {"type": kind, "key": key, "name": name, "number": self._number, **more}
        if error is not None:
            self._failed.add(key)
            message |= {"error": type(error).__name__, "message": str(error)}
        self._send(message)
