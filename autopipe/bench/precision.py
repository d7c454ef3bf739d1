"""What fewer bits change: a quantised target against the same model in 16 (or 32) bits, position by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autopipe.core.plan import Dtype, StagePlan

if TYPE_CHECKING:
    import torch

    from autopipe.core.backends.base import StageBackend

MAX_PROMPTS = 8
MAX_OUTPUT = 64
_ROWS = 64

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OutputChange:
    """Both models read the same texts: prompts, each with the reference's greedy continuation.

    Attributes:
        dtype: of the quantised model.
        reference: dtype of the other: what `auto` chooses.
        positions: compared.
        agreement: share of positions at which both pick the same token.
        perplexity, reference_perplexity: of these texts.
        kl: mean divergence of the quantised distribution from the reference's, in nats.
    """

    dtype: str
    reference: str
    positions: int
    agreement: float
    perplexity: float
    reference_perplexity: float
    kl: float

    @property
    def perplexity_change(self) -> float:
        """0.01: the perplexity is 1% higher."""
        return self.perplexity / self.reference_perplexity - 1

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity_change": self.perplexity_change}

    def sentence(self) -> str:
        return (
            f"{self.dtype} target: picks the same token as {self.reference} at {self.agreement:.1%} of "
            f"{self.positions} positions; perplexity {self.perplexity:.3f} against {self.reference_perplexity:.3f} "
            f"({self.perplexity_change:+.2%}); divergence {self.kl:.4f} nats"
        )


def measure_change(
    target: StagePlan,
    prompts: Sequence[Sequence[int]],
    *,
    threads: int | None = None,
    max_new_tokens: int = MAX_OUTPUT,
    advance: Advance = lambda what: None,
) -> OutputChange:
    """Load the target as it is and in `auto`, one after the other, and compare them on the first few prompts.

    Args:
        target: with a quantised dtype.
        prompts: token ids; `MAX_PROMPTS` of them are used.
        max_new_tokens: of the reference's continuation; `MAX_OUTPUT` at most.

    Raises:
        AutoPipeError: as `load_backend`.
    """
    import torch

    from autopipe.core.backends.load import check_stage, load_backend

    reference_stage = target.replace(dtype=Dtype.AUTO)
    advance(f"{target.model}: the reference")
    reference = load_backend(reference_stage, threads=threads)
    count = min(max_new_tokens, MAX_OUTPUT)
    texts = [_continued(reference, list(ids), count) for ids in prompts[:MAX_PROMPTS]]
    expected = [_rows(reference, text) for text in texts]
    reference.close()
    advance(f"{target.model}: {target.dtype.value}")
    quantised = load_backend(target, threads=threads)
    same = positions = 0
    loss = reference_loss = divergence = 0.0
    for text, wanted in zip(texts, expected, strict=True):
        found = _rows(quantised, text)
        following = torch.tensor(text[1:])[:, None]
        log_wanted, log_found = wanted.log_softmax(-1), found.log_softmax(-1)
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        positions += len(text)
        reference_loss -= float(log_wanted[:-1].gather(1, following).sum())
        loss -= float(log_found[:-1].gather(1, following).sum())
        divergence += float((log_wanted.exp() * (log_wanted - log_found)).sum())
    quantised.close()
    predicted = positions - len(texts)
    return OutputChange(
        dtype=target.dtype.value,
        reference=check_stage(reference_stage).dtype.removeprefix("torch."),
        positions=positions,
        agreement=same / positions,
        perplexity=math.exp(loss / predicted),
        reference_perplexity=math.exp(reference_loss / predicted),
        kl=divergence / positions,
    )


def _continued(backend: StageBackend, ids: list[int], count: int) -> list[int]:
    """A prompt (at least 2 tokens of text in all) and its greedy continuation."""
    room = backend.max_length - len(ids)
    backend.reset()
    row = backend.prefill(ids)
    text = list(ids)
    for _ in range(max(1, min(count, room))):
        text.append(int(row.argmax()))
        if len(text) >= backend.max_length:
            break
        row = backend.forward(text[-1:])[0]
    return text


def _rows(backend: StageBackend, text: Sequence[int]) -> torch.Tensor:
    """Logits after every token of a text, fp32 [n, vocab]."""
    import torch

    backend.reset()
    return torch.cat([backend.forward(text[start : start + _ROWS]).clone() for start in range(0, len(text), _ROWS)])
