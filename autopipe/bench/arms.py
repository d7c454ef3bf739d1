"""Arms of a bench: one interface over AutoPipe's modes and other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import AutoPipeError
from autopipe.core.plan import Plan, Verification
from autopipe.core.sampling import SamplingParams

if TYPE_CHECKING:
    from autopipe.api import AutoPipe


class ArmMissingError(AutoPipeError):
    """An arm cannot run here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ArmOutput:
    """Output tokens (eos included, as the model gave it) and tokens per forward of the target, if known."""

    token_ids: tuple[int, ...]
    acceptance_length: float | None = None


class Arm(ABC):
    """Continues token ids. `prepare` loads, once; `generate` is what the clock runs over."""

    name: str
    draws_own_noise: bool
    """Whether sampled output need not equal plain decoding's: the arm draws its own random numbers."""

    def prepare(self) -> None:  # noqa: B027 - optional hook
        """Load what is needed.

        Raises:
            ArmMissingError: a library or model is not there.
        """

    @abstractmethod
    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        """Continue `ids`."""

    def close(self) -> None:  # noqa: B027 - optional hook
        """Free everything."""


class EnginePool:
    """Engines by the models they hold: plans that differ in mode and windows only share one."""

    def __init__(self, open_pipe: Callable[[Plan], AutoPipe]) -> None:
        self._open_pipe = open_pipe
        self._pipes: dict[str, AutoPipe] = {}
        self._applied: dict[str, Plan] = {}

    def engine(self, plan: Plan) -> AutoPipe:
        """An engine on which `plan` is in force; loads its models at the first call for them."""
        key = repr([stage.identity() for stage in plan.chain]) + repr(plan.exact)
        if key not in self._pipes:
            self._pipes[key] = self._open_pipe(plan)
        elif self._applied[key] != plan:
            self._pipes[key].apply(plan)
        self._applied[key] = plan
        return self._pipes[key]

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()


class PipelineArm(Arm):
    """AutoPipe under one plan."""

    def __init__(self, name: str, plan: Plan, pool: EnginePool) -> None:
        self.name = name
        self.draws_own_noise = plan.verification is Verification.REJECTION
        self.plan = plan
        self._pool = pool

    def prepare(self) -> None:
        self.engine()

    def engine(self) -> AutoPipe:
        """The engine, with this arm's plan applied."""
        return self._pool.engine(self.plan)

    def generate(self, ids: Sequence[int], sampling: SamplingParams) -> ArmOutput:
        options: dict[str, Any] = sampling.model_dump(exclude_unset=True)
        result = self.engine().generate(input_ids=list(ids), **options)
        return ArmOutput(tuple(result.token_ids), result.stats.acceptance_length)

    def gap(self, ids: Sequence[int]) -> float | None:
        """Difference of the two best logits after `ids`: the same as that of their log-probabilities."""
        result = self.engine().generate(input_ids=list(ids), max_new_tokens=1, num_logprobs=2)
        if not result.logprobs:
            return None
        entry: Any = result.logprobs[0]
        top = entry["top"] if isinstance(entry, Mapping) else entry.top
        best, second = (float(logprob) for _, logprob in top)
        return best - second
