"""The engine: keeps a plan's stages running as processes, feeds them requests, survives their faults.

One thread of its own does everything (`conductor.py`): it listens to the workers and to commands from callers,
watches for dead, silent and hung workers, and hands the pipeline from one request to the next. Callers only ever put
a command into its mailbox and wait on a handle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from autopipe.core.chain import neural_names, stage_keys
from autopipe.core.channel import Message
from autopipe.core.conductor import Conductor
from autopipe.core.engine_base import EngineBase
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle, RowProcessor
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import NGRAM, StageReport, StageStats, progress_stats, report_stages


class Engine(EngineBase[Conductor]):
    """A pipeline of stages in processes of their own.

    Args:
        plan: what to run. Its target and drafters are loaded before the constructor returns.
        preflight: called before anything loads, while the processes are starting; what it raises is raised.
        load_timeout_s: seconds the models may take to load.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: the plan cannot run; the message says why.
    """

    def __init__(
        self, plan: Plan, *, preflight: Callable[[], None] = lambda: None, load_timeout_s: float = 600.0
    ) -> None:
        conductor = Conductor(plan)
        start = functools.partial(conductor.fleet.spawn, plan)
        super().__init__(conductor, start=start, preflight=preflight, load_timeout_s=load_timeout_s)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._conductor.num_waiting

    @property
    def worker_ids(self) -> dict[str, int]:
        """Process id of each live stage by name."""
        return {worker.name: worker.process.pid for worker in list(self._conductor.fleet.workers.values())}

    @property
    def running(self) -> RequestHandle | None:
        """The request under way; its counters may be read at any time, its tokens only by whoever submitted it."""
        running = self._conductor.running
        return None if running is None else running.handle

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        """Keep the drafters of these plans loaded once they are, idle while no plan uses them, so that a switch back
        costs a catch-up and no loading. Replaces what was kept before; [] keeps none."""
        keys = {key for plan in plans for key in stage_keys(plan)[:-1]}
        self._mailbox.post(lambda: setattr(self._conductor, "kept", keys))

    def facts(self, stage: str) -> Message:
        """What a stage said when it was ready: vocab_size, max_length, exact, choice, load_s, step_ms; {} before."""
        workers = list(self._conductor.fleet.workers.values())
        return next((dict(worker.facts) for worker in workers if worker.name == stage), {})

    def progress(self) -> tuple[int, list[StageReport]] | None:
        """The request under way, by its handle's id, and what its stages have done so far; None between requests.

        Costs microseconds and disturbs nobody. Figures that only the end of a request shows (waiting_s, overhead_s,
        bytes_out) are 0.
        """
        running, plan = self._conductor.running, self._conductor.plan
        if running is None:
            return None
        chain: list[StageStats] = []
        for key, upstream in zip(stage_keys(plan), ["", *neural_names(plan)], strict=False):
            worker = self._conductor.fleet.workers.get(key)
            done = None if worker is None else progress_stats(worker.slot, worker.name, running.handle.id)
            if done is not None:
                producer = upstream or (NGRAM if plan.chain[0].is_ngram else "")
                if done.verified:
                    done.count_drafts(producer, done.verified, done.accepted)
                chain.append(done)
        return running.handle.id, report_stages(chain)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        processor: RowProcessor | None = None,
        trace: bool = False,
    ) -> RequestHandle:
        """Queue a request.

        Args:
            eos_token_ids: the model's own; `params.eos_token_ids` overrides them.
            processor: changes the target's logits at each verified position; runs in the engine's thread.

        Raises:
            ConfigError: an empty prompt or a token id outside the vocabulary.
            ContextLengthError: prompt and max_new_tokens do not fit the target's context.
            EngineClosedError: the engine is closed.
        """
        self._mailbox.check_open()
        eos = tuple(map(int, eos_token_ids)) if params.eos_token_ids is None else params.eos_token_ids
        ids = self.check_request(prompt, params)
        handle = RequestHandle(next(self._numbers), ids, params, eos, processor, trace, self._cancel)
        self._mailbox.post(lambda: self._conductor.enqueue(handle))
        return handle

    def apply(self, plan: Plan, timeout_s: float | None = None) -> None:
        """Put a plan in force; also in the middle of a request, whose output it does not change.

        Windows change at once; new drafters are loaded first and join when ready; a new target waits until
        the request under way is done. The verification rule changes with the next request.

        Raises:
            AutoPipeError: a stage of the new plan cannot be loaded; the old plan stays in force.
        """
        self._apply(plan, self._load_timeout_s if timeout_s is None else timeout_s)
