"""Loads neural drafters of a shared pipeline beside its steps, which go on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from autopipe.core.backends.batch import BatchRunner
from autopipe.core.backends.load import check_stage
from autopipe.core.plan import BackendName
from autopipe.core.shared.calibration import measure
from autopipe.core.shared.drafting import NeuralDrafting
from autopipe.core.shared.loading import load_model
from autopipe.core.shared.neural import SharedDrafter
from autopipe.core.shared.options import SharingOptions


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """What came of loading a drafter: the drafter and its facts, or an error."""

    drafting: NeuralDrafting
    drafter: SharedDrafter | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


class DrafterLoader:
    """One thread for each drafter that is being loaded, except on the transformers backend: while transformers loads a
    model, numbers made elsewhere in the process have that model's dtype, so nothing else may compute meanwhile.

    Args:
        target: of all drafters.
        ring: called, in the loading thread, when there is something to take.
    """

    def __init__(self, target: BatchRunner, options: SharingOptions, ring: Callable[[], None]) -> None:
        self._target, self._options, self._ring = target, options, ring
        self._done: SimpleQueue[LoadedDrafter] = SimpleQueue()
        self._alone: SimpleQueue[tuple[NeuralDrafting, int]] = SimpleQueue()  # to be loaded while nobody computes
        self._under_way: set[str] = set()

    def load(self, drafting: NeuralDrafting, threads: int) -> None:
        """Begin to load a drafter, unless that is under way."""
        if drafting.key not in self._under_way:
            self._under_way.add(drafting.key)
            name = f"autopipe-load-{drafting.name}"
            threading.Thread(target=self._begin, args=(drafting, threads), name=name, daemon=True).start()

    def take(
        self, nobody_computes: Callable[[], AbstractContextManager[None]], kept: Collection[str]
    ) -> LoadedDrafter | None:
        """What has been loaded, or could not be, one at a time; None: nothing more so far.

        Args:
            nobody_computes: entered while something is loaded in this thread, the one that computes.
            kept: keys of drafters that are still wanted.
        """
        while not self._alone.empty():
            drafting, threads = self._alone.get_nowait()
            if drafting.key in kept:
                with nobody_computes():
                    self._load(drafting, threads)
                break
            self._under_way.discard(drafting.key)
        try:
            loaded = self._done.get_nowait()
        except Empty:
            return None
        self._under_way.discard(loaded.drafting.key)
        return loaded

    def _begin(self, drafting: NeuralDrafting, threads: int) -> None:
        try:
            alone = check_stage(drafting.stage).backend is BackendName.TRANSFORMERS
        except Exception as error:  # as in `_load`
            self._done.put(LoadedDrafter(drafting, error=error))
            self._ring()
            return
        if alone:
            self._alone.put((drafting, threads))
            self._ring()
        else:
            self._load(drafting, threads)

    def _load(self, drafting: NeuralDrafting, threads: int) -> None:
        started = time.monotonic()
        try:
            runner, reason = load_model(drafting.stage, self._options, threads, self._target)
            drafter = SharedDrafter(drafting.name, runner, self._options)
            load_s = time.monotonic() - started
            measure(runner, drafter.costs, drafting.stage.emulated)
            facts = {
                "vocab_size": runner.vocab_size,
                "max_length": runner.max_length,
                "exact": runner.exact,
                "choice": reason,
                "load_s": load_s,
                "step_ms": {n: 1e3 * drafter.costs.seconds(n) for n in (1, 2, 4, 8)},
            }
            self._done.put(LoadedDrafter(drafting, drafter, facts))
        except Exception as error:  # anything that stops a model from loading is reported to the user
            self._done.put(LoadedDrafter(drafting, error=error))
        self._ring()
