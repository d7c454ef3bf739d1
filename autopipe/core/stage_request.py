"""One request as a stage sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopipe.core.errors import AutoPipeError
from autopipe.core.picker import Picker
from autopipe.core.plan import Verification
from autopipe.core.verify import SparseRow


class RequestFailedError(Exception):
    """No token could be chosen: this request is at fault (or its options are), not the stage."""

    def __init__(self, error: AutoPipeError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class StageRequest:
    """One request as a stage sees it.

    Attributes:
        tokens: the stage's sequence, prompt included.
        end: length of the sequence at which max_new_tokens is reached.
        committed: positions below this are final as far as this stage knows.
        producer_committed: the same, as far as its producer knew when last heard.
        changed_from: the sequence changed from this position on since it was last published.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    end: int
    eos_token_ids: frozenset[int]
    verification: Verification
    picker: Picker
    committed: int
    producer_committed: int
    changed_from: int
    ngram_unchanged: int = 0
    rows: dict[int, SparseRow] = field(default_factory=dict)
    published_stopped: bool = False
    started_ns: int = 0
    idle_since_ns: int = 0
    ready_ns: int = 0
