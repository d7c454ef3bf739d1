"""Answers of the target to training prompts, many sequences at a time, with its distributions as it goes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopipe.drafts.batch import BatchForward
from autopipe.drafts.choosing import sample, top_logprobs
from autopipe.drafts.made_prompts import MadePrompt
from autopipe.drafts.mix import PromptMix
from autopipe.drafts.overlap import OverlapFilter
from autopipe.drafts.prompt import TrainingPrompt
from autopipe.drafts.store import AnswerStore

MAX_PROMPT_TOKENS = 512
_PREFILL_TOKENS = 256
"""Prompt tokens begun in one forward, so that the sequences under way are not held up for long."""
_SAMPLED_ONE_IN = 4


class Sampling(NamedTuple):
    """How tokens are chosen: among the 64 most probable, to the share `top_p`; temperature 0: the first."""

    name: str
    temperature: float
    top_p: float


GREEDY = Sampling("greedy", 0.0, 1.0)
SAMPLED = Sampling("sampled", 0.8, 0.95)
MAKING = Sampling("made", 1.0, 0.95)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence under way: an answer, or a prompt being made."""

    job: TrainingPrompt | MadePrompt
    sampling: Sampling
    ids: list[int]
    prompt_length: int
    max_tokens: int
    chooser: random.Random
    started: bool = False
    top_ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    top_logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - self.prompt_length


@dataclass(slots=True)
class Progress:
    """What a run has done so far.

    Attributes:
        num_tokens: answer tokens kept, those of earlier runs included.
        num_answers: likewise.
        made: prompts made; useless: made, but not fit for use.
        duplicates, overlaps, too_long: prompts or answers dropped, by reason.
        computed_tokens: rows of forwards in this run, prompts and prompts under way included.
    """

    num_tokens: int = 0
    num_answers: int = 0
    made: int = 0
    useless: int = 0
    duplicates: int = 0
    overlaps: int = 0
    too_long: int = 0
    computed_tokens: int = 0


class AnswerGenerator:
    """Fills a store with answers.

    Each prompt is answered greedily, every fourth also sampled (temperature 0.8, top_p 0.95). Prompts and answers
    that share a long run of words with a protected text are dropped, and so are prompts seen before.

    Args:
        batch: the target.
        tokenizer: the target's.
        eos_token_ids: ids that end the target's text.
        store: receives the answers.
        mix: where prompts come from.
        protected: texts never to be trained on.
        seen: digests of prompts there are answers to.
        max_new_tokens: longest answer.
        seed: of everything sampled.
    """

    def __init__(
        self,
        batch: BatchForward,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        store: AnswerStore,
        mix: PromptMix,
        protected: OverlapFilter,
        *,
        seen: set[str] | None = None,
        max_new_tokens: int = 200,
        seed: int = 0,
    ) -> None:
        self._batch, self._tokenizer, self._store, self._mix = batch, tokenizer, store, mix
        self._eos = frozenset(eos_token_ids)
        self._protected = protected
        self._seen = set() if seen is None else seen
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._queue: list[_Sequence] = []
        self._slots: list[_Sequence | None] = [None] * batch.slots
        self._cached: list[list[int]] = [[] for _ in range(batch.slots)]
        self.progress = Progress()

    def run(self, num_tokens: int, report: Callable[[Progress], None] = lambda progress: None) -> None:
        """Go on until there are so many answer tokens, or no prompts are left; `report` is called every step."""
        try:
            while self.progress.num_tokens < num_tokens:
                work = self._schedule()
                if not work:
                    break
                self._step(work)
                report(self.progress)
        finally:
            self._store.flush()

    def _schedule(self) -> list[tuple[int, list[int], int]]:
        """What the next forward computes: one token of each sequence under way, prompts of some new ones."""
        work = []
        room = _PREFILL_TOKENS
        for slot, sequence in enumerate(self._slots):
            if sequence is None and room > 0:
                sequence = self._slots[slot] = self._next_sequence(self._cached[slot])
            if sequence is None:
                continue
            if sequence.started:
                work.append((slot, sequence.ids[-1:], 1))
            elif room > 0:
                sequence.started = True
                kept = min(_shared(self._cached[slot], sequence.ids), len(sequence.ids) - 1)
                self._batch.rollback(slot, kept)
                room -= len(sequence.ids) - kept
                work.append((slot, sequence.ids[kept:], 1))
        return work

    def _step(self, work: Sequence[tuple[int, list[int], int]]) -> None:
        logits = self._batch.forward(work)  # [slots, vocab]
        self.progress.computed_tokens += sum(len(ids) for _, ids, _ in work)
        token_ids, logprobs = top_logprobs(logits)
        for row, (slot, _, _) in enumerate(work):
            sequence = self._slots[slot]
            if sequence is None:
                continue
            token = sample(token_ids[row], logprobs[row], *sequence.sampling[1:], sequence.chooser)
            sequence.ids.append(token)
            if isinstance(sequence.job, TrainingPrompt):
                sequence.top_ids.append(token_ids[row])
                sequence.top_logprobs.append(logprobs[row])
            if self._ended(sequence, token):
                self._slots[slot] = None
                self._cached[slot] = sequence.ids[:-1]
                self._finish(sequence, token in self._eos)

    def _ended(self, sequence: _Sequence, token: int) -> bool:
        if token in self._eos or sequence.num_tokens >= sequence.max_tokens:
            return True
        if len(sequence.ids) >= self._batch.max_length:
            return True
        return isinstance(sequence.job, MadePrompt) and sequence.job.ends(self._text(sequence))

    def _text(self, sequence: _Sequence) -> str:
        """The new text of a sequence, without an end token."""
        new = sequence.ids[sequence.prompt_length :]
        if new and new[-1] in self._eos:
            new = new[:-1]
        return str(self._tokenizer.decode(new))

    def _finish(self, sequence: _Sequence, ended: bool) -> None:
        text = self._text(sequence)
        if isinstance(sequence.job, TrainingPrompt):
            self._keep(sequence, sequence.job, text, ended)
            return
        self._mix.count(sequence.job.kind, -self._max_new_tokens)
        made = sequence.job.finish(text, ended)
        if isinstance(made, MadePrompt):
            self._queue.append(self._making(made))
        elif made is None:
            self.progress.useless += 1
        else:
            self.progress.made += 1
            self._queue.extend(self._answers_to(made))

    def _keep(self, sequence: _Sequence, prompt: TrainingPrompt, text: str, ended: bool) -> None:
        self._mix.count(prompt.kind, -self._max_new_tokens)
        if self._protected.overlaps(f"{prompt.content} {text}"):
            self.progress.overlaps += 1
            return
        name, temperature, top_p = sequence.sampling
        meta = {
            "key": f"{prompt.key}/{name}",
            "kind": prompt.kind,
            "form": prompt.form,
            "source": prompt.source,
            "split": prompt.split,
            "sampling": name,
            "temperature": temperature,
            "top_p": top_p,
            "finish_reason": "stop" if ended else "length",
            "digest": prompt.digest,
            **({"prompt": prompt.text} if prompt.text is not None else {"messages": prompt.turns}),
        }
        self._store.add(
            meta, sequence.ids, sequence.prompt_length, np.stack(sequence.top_ids), np.stack(sequence.top_logprobs)
        )
        self.progress.num_tokens += sequence.num_tokens
        self.progress.num_answers += 1
        self._mix.count(prompt.kind, sequence.num_tokens)

    def _next_sequence(self, cached: list[int]) -> _Sequence | None:
        """The next one for a slot that holds `cached`: of those waiting, the one that shares most with it."""
        while not self._queue:
            job = self._mix.next()
            if job is None:
                return None
            self._queue.extend([self._making(job)] if isinstance(job, MadePrompt) else self._answers_to(job))
        chosen = max(self._queue, key=lambda sequence: _shared(cached, sequence.ids))
        self._queue.remove(chosen)
        return chosen

    def _making(self, job: MadePrompt) -> _Sequence:
        ids = self._tokenizer(job.prefix, add_special_tokens=False)["input_ids"]
        chooser = random.Random(f"{self._seed} {job.key} {len(ids)}")
        self._mix.count(job.kind, self._max_new_tokens)
        return _Sequence(job, MAKING, list(ids), len(ids), job.max_tokens, chooser)

    def _answers_to(self, prompt: TrainingPrompt) -> list[_Sequence]:
        """The answers wanted to a prompt; none to one that must not, or need not, be used."""
        if prompt.digest in self._seen:
            self.progress.duplicates += 1
            return []
        if self._protected.overlaps(prompt.content):
            self.progress.overlaps += 1
            return []
        ids = self._encode(prompt)
        if not ids or len(ids) > min(MAX_PROMPT_TOKENS, self._batch.max_length - self._max_new_tokens):
            self.progress.too_long += 1
            return []
        self._seen.add(prompt.digest)
        both = int(prompt.digest, 16) % _SAMPLED_ONE_IN == 0
        answers = []
        for sampling in (GREEDY, SAMPLED) if both else (GREEDY,):
            chooser = random.Random(f"{self._seed} {prompt.key} {sampling.name}")
            self._mix.count(prompt.kind, self._max_new_tokens)
            answers.append(_Sequence(prompt, sampling, list(ids), len(ids), self._max_new_tokens, chooser))
        return answers

    def _encode(self, prompt: TrainingPrompt) -> list[int]:
        """Token ids as `AutoPipe.encode` makes them."""
        if prompt.text is not None:
            return list(self._tokenizer(prompt.text)["input_ids"])
        text = self._tokenizer.apply_chat_template(prompt.turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
