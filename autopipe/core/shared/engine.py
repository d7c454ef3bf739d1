"""The shared engine: many requests on one target at once, in one process of its own.

A drop-in for `Engine` where the plan allows it (`reason_unshareable`): the same calls, the same handles, the same
text. One thread (`conductor.py`) passes requests to the worker and tokens back; callers put commands into its mailbox.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.core.chain import neural_names, stage_keys
from autopipe.core.channel import Message
from autopipe.core.engine_base import EngineBase
from autopipe.core.errors import ConfigError, QueueFullError
from autopipe.core.plan import Plan
from autopipe.core.request import RequestHandle, RowProcessor
from autopipe.core.sampling import SamplingParams
from autopipe.core.shared.conductor import SharedConductor
from autopipe.core.shared.ledger import OpenRequest
from autopipe.core.shared.loading import require_shareable
from autopipe.core.shared.options import SharingOptions
from autopipe.core.stats import StageReport


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """What is under way.

    Attributes:
        running: requests for which something has been computed. waiting: the others.
        progress: for each running one, by the id of its handle, what its stages have done so far.
    """

    running: int = 0
    waiting: int = 0
    progress: Mapping[int, list[StageReport]] = field(default_factory=dict)


class SharedEngine(EngineBase[SharedConductor]):
    """One target, many requests at a time.

    Args:
        plan: what to run; loaded before the constructor returns.
        options: how requests share it.
        preflight: called before anything loads, while the process is starting; what it raises is raised.
        load_timeout_s: seconds the model may take to load.

    Raises:
        ConfigError: the plan cannot be shared, or not run.
        ModelLoadError, UnsupportedModelError: the target cannot be loaded, or not for sharing.
    """

    continues = True
    """`submit` takes `output=`, to go on with a request that was cut off."""

    def __init__(
        self,
        plan: Plan,
        options: SharingOptions | None = None,
        *,
        preflight: Callable[[], None] = lambda: None,
        load_timeout_s: float = 600.0,
    ) -> None:
        require_shareable(plan)
        self.options = options or SharingOptions()
        self._gate = threading.Lock()
        conductor = SharedConductor(plan, self.options, load_timeout_s)
        start = functools.partial(conductor.keeper.spawn, plan)
        super().__init__(conductor, start=start, preflight=preflight, load_timeout_s=load_timeout_s)

    @property
    def num_running(self) -> int:
        """Requests for which something has been computed."""
        return self._conductor.counts()[0]

    @property
    def num_waiting(self) -> int:
        """Requests for which nothing has been computed yet."""
        return self._conductor.counts()[1]

    @property
    def worker_ids(self) -> dict[str, int]:
        """Process id by name of each stage that is loaded: one process has them all; {} while there is none."""
        worker, plan = self._conductor.keeper.worker, self.plan
        if worker is None:
            return {}
        return dict.fromkeys([*self._conductor.drafters.names(plan), neural_names(plan)[-1]], worker.process.pid)

    @property
    def running(self) -> RequestHandle | None:
        """The request that has run longest; its counters may be read at any time, its tokens only by its owner."""
        return self._conductor.first_running()

    def load(self) -> SharedLoad:
        """How many requests run and wait, and how far each has come. Costs microseconds."""
        progress = self._conductor.progress()
        running, waiting = self._conductor.counts()
        return SharedLoad(running, waiting, progress)

    def progress(self) -> tuple[int, list[StageReport]] | None:
        """The request that has run longest, by its handle's id, and what its stages have done; None between requests.

        All of them: `load`.
        """
        return next(iter(self._conductor.progress().items()), None)

    def step_s(self, num_requests: int) -> float | None:
        """Seconds of a step with a token for each of so many requests, as measured lately; None before anything was."""
        costs = self._conductor.costs
        if costs is None:
            return None
        one_by_one = self._conductor.target_facts.get("one_by_one", False)
        return num_requests * costs.seconds(1) if one_by_one else costs.seconds(num_requests)

    def load_factor(self) -> float:
        """Seconds of plain decoding's step with the requests that run now, relative to a step with one."""
        one, now = self.step_s(1), self.step_s(max(1, self.num_running))
        return now / one if one and now else 1.0

    def cache_stats(self) -> dict[str, int]:
        """Prefix cache and KV memory, as of the last step: hits, reused (tokens), evictions, sequences, preemptions,
        kv_bytes."""
        return dict(self._conductor.cache)

    def facts(self, stage: str) -> Message:
        """What a stage said when it was ready: vocab_size, max_length, exact, choice, load_s, step_ms; {} before."""
        if stage == neural_names(self.plan)[-1]:
            return dict(self._conductor.target_facts)
        return self._conductor.drafters.facts(self.plan, stage)

    def keep_loaded(self, plans: Sequence[Plan]) -> None:
        """Keep the neural drafters of these plans loaded once they are, so that a switch back costs no loading.
        Replaces what was kept before; [] keeps none."""
        kept = list(plans)
        self._mailbox.post(lambda: self._conductor.keep_loaded(kept))

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        processor: RowProcessor | None = None,
        trace: bool = False,
        output: Sequence[int] = (),
    ) -> RequestHandle:
        """Queue a request.

        Args:
            eos_token_ids: the model's own; `params.eos_token_ids` overrides them.
            processor: changes the target's logits at each verified position; runs in the engine's thread, and holds up
                all requests while it does.
            output: tokens this request was given before (by another engine, say, that has died): it goes on after
                them as if it had never stopped. Only new tokens are streamed.

        Raises:
            ConfigError: an empty prompt, a token id outside the vocabulary, or an output that is complete already.
            ContextLengthError: prompt and max_new_tokens do not fit the target's context.
            QueueFullError: as many requests as allowed wait already.
            EngineClosedError: the engine is closed.
        """
        self._mailbox.check_open()
        eos = tuple(map(int, eos_token_ids)) if params.eos_token_ids is None else params.eos_token_ids
        ids = self.check_request(prompt, params)
        given = self._checked_output(output, params, eos)
        with self._gate:
            self._check_room()
            handle = RequestHandle(next(self._numbers), ids, params, eos, processor, trace, self._cancel)
            self._conductor.admit(OpenRequest(handle, given, self._conductor.new_stats()))
        return handle

    def _checked_output(self, output: Sequence[int], params: SamplingParams, eos: Sequence[int]) -> list[int]:
        given = list(map(int, output))
        vocab_size = self._conductor.target_facts["vocab_size"]
        if any(not 0 <= token < vocab_size for token in given):
            raise ConfigError("output", "a token id out of range", f"token ids from 0 to {vocab_size - 1}")
        if len(given) >= params.max_new_tokens or (given and given[-1] in eos):
            raise ConfigError("output", f"{len(given)} tokens", "an output that has not ended")
        return given

    def _check_room(self) -> None:
        running, waiting = self._conductor.counts()
        idle_places = max(0, self.options.max_active - running)
        if waiting >= self.options.max_waiting + idle_places:
            raise QueueFullError(waiting, self._conductor.finishing.seconds_until(waiting - idle_places + 1))

    def apply(self, plan: Plan, timeout_s: float | None = None) -> None:
        """Put a plan with the same target in force; also while requests run, whose output it does not change, and which
        go on while its drafters are loaded.

        Raises:
            ConfigError: a plan that cannot be shared, or one with another target: make a new engine for it.
            ModelLoadError, UnsupportedModelError: a drafter cannot be loaded; the plan before stays in force.
            AutoPipeError: models are being loaded, and take too long.
        """
        require_shareable(plan)
        if stage_keys(plan)[-1] != stage_keys(self.plan)[-1]:
            raise ConfigError("chain", plan.target.model, f"plans with this target: {self.plan.target.model}")
        self._apply(plan, self._load_timeout_s if timeout_s is None else timeout_s)
