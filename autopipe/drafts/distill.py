"""Trains a shared-base drafter on answers of the target: resumable, with a learning curve."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.models import load_config, load_state, load_tokenizer, resolve, tokenizer_fingerprint
from autopipe.core.models.loading import eos_token_ids
from autopipe.core.models.shared_base import DrafterInfo, save_drafter_info, weights_fingerprint
from autopipe.drafts.distill_beginning import Beginning
from autopipe.drafts.distill_checkpoint import load_checkpoint, save_checkpoint
from autopipe.drafts.distill_curve import agreement, write_csv, write_picture
from autopipe.drafts.distill_data import AnswerPool, Feed, Trimmer, frequent_tokens, heldout_sample
from autopipe.drafts.distill_lens import lens_head
from autopipe.drafts.distill_loss import head_loss
from autopipe.drafts.distill_optimizer import Optimizer, schedule
from autopipe.drafts.distill_options import DistillOptions, check_options
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import read_header

_log = logging.getLogger(__name__)

_SAVE_EVERY_S = 300.0
_MICRO_TOKENS = 2048
"""Tokens of one forward: enough for full speed, few enough for the cache."""


@dataclass
class Progress:
    """Where a training stands; handed to `Distiller.run`'s caller after every step.

    Attributes:
        loss: cross-entropy per answer token in the last step, nats.
        tokens_per_s: in this run, evaluations and checkpoints left out.
        curve: rows of the learning curve so far.
    """

    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    tokens_per_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Distiller:
    """A training in a folder: checkpoints/, curve.csv, curve.png and drafter/, the drafter as it stands.

    Args:
        target: as in a plan.
        answers: folder made by `autopipe drafts answers`.
        out: folder of the training; one with checkpoints goes on.

    Raises:
        ConfigError: folders, options or answers that do not fit each other.
        UnsupportedModelError: the target is not of the `fused` backend's family.
    """

    def __init__(self, target: str, answers: Path, out: Path, options: DistillOptions) -> None:
        self.options, self.out = options, out
        source = resolve(target, "--target")
        config = load_config(source)
        check_options(options, config)
        header = read_header(answers, "--answers")
        tokenizer = tokenizer_fingerprint(load_tokenizer(source))
        if header.get("tokenizer") not in (None, tokenizer):
            raise ConfigError("--answers", str(answers), f"answers of {target} (these are of {header.get('target')!r})")
        state = load_state(source)
        self._pool = AnswerPool(answers, "train", kinds=options.kinds, max_length=options.max_length)
        heldout = AnswerPool(answers, "heldout", kinds=options.kinds, max_length=options.max_length)
        self._heldout = heldout_sample(heldout.answers, options.heldout_tokens)
        saved = load_checkpoint(out / "checkpoints")
        if saved is not None:
            different = [k for k, v in options.fixed().items() if saved[1]["options"].get(k) != v]
            if different:
                names = ", ".join(different).replace("begin_from", "--from")
                allowed = f"a folder begun with the same {names}, or a new one"
                raise ConfigError("--out", str(out), allowed)
        vocab_size = int(config.vocab_size)
        beginning = None if saved is not None or options.begin_from is None else Beginning.read(options.begin_from)
        self._before: Mapping[str, Any] | None = None
        if saved is not None:
            head_ids, self._before = saved[0].pop("head_ids").long(), saved[1].get("before")
        elif beginning is not None:
            head_ids, self._before = beginning.require(options, config, state), beginning.training
        else:
            ends = eos_token_ids(source)
            head_ids = torch.from_numpy(frequent_tokens(self._pool.answers, options.head, vocab_size, ends))
        self.student = Student(
            config,
            state,
            layers=options.layers,
            head_ids=head_ids,
            rank=options.rank,
            alpha=options.alpha or float(options.rank),
            train_head=options.train_head,
            seed=options.seed,
            base_name=target,
        )
        self._info = DrafterInfo(
            target, weights_fingerprint(state), tokenizer, options.layers, vocab_size, len(head_ids)
        )
        self._trimmer = Trimmer(head_ids.numpy(), vocab_size, options.sharpness)
        self._feed = Feed(self._pool, min(_MICRO_TOKENS, options.batch_tokens), options.seed)
        if beginning is not None:
            self.student.load(beginning.folder)
        elif saved is None and options.start_from_lens:
            lens_head(self.student, config, state, self._pool.answers)
        self._optimizer = Optimizer(self.student, options.optimizer)
        self.progress = Progress()
        if saved is not None:
            self._restore(*saved)

    @property
    def heldout_coverage(self) -> float:
        """Share of held-out positions whose most probable token has a row in the trimmed head."""
        best = torch.cat([self._trimmer.batch([answer]).best for answer in self._heldout])
        return float((best >= 0).float().mean())

    def run(self, on_step: Callable[[Progress], None] | None = None) -> Progress:
        """Train until `options.tokens`. An interruption loses what came after the last checkpoint, minutes at most.

        Args:
            on_step: called after every step.

        Raises:
            ConfigError: another process is training in this folder.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.out / ".lock", timeout=0):
                self._train(on_step or (lambda progress: None))
        except Timeout:
            raise ConfigError("--out", str(self.out), "a folder in which no other process is training") from None
        return self.progress

    def _train(self, on_step: Callable[[Progress], None]) -> None:
        progress, options = self.progress, self.options
        if not progress.curve:
            self._evaluate()
            self._checkpoint()
        begun_at, busy_s, saved_at = progress.trained_tokens, 0.0, time.monotonic()
        while progress.trained_tokens < options.tokens:
            started = time.perf_counter()
            self._step()
            took = time.perf_counter() - started
            busy_s += took
            progress.seconds += took
            progress.tokens_per_s = (progress.trained_tokens - begun_at) / busy_s
            done = progress.trained_tokens >= options.tokens
            if done or progress.trained_tokens >= progress.curve[-1]["trained_tokens"] + options.evaluate_every:
                self._evaluate()
                saved_at = -math.inf
            if time.monotonic() - saved_at > _SAVE_EVERY_S:
                self._checkpoint()
                saved_at = time.monotonic()
            on_step(progress)
        self.export()

    def _step(self) -> None:
        progress, options = self.progress, self.options
        weights = self.student.step_weights()
        tokens = 0
        positions = loss = 0.0
        while tokens < options.batch_tokens:
            batch = self._trimmer.batch(self._feed.next())
            hidden = weights.hidden(batch.ids, batch.lengths, batch.rows)
            summed = head_loss(hidden, weights.head, batch.token_ids, batch.target_probs, batch.kept_probability)
            torch.autograd.backward([summed])
            loss += float(summed.detach())
            positions += float(batch.kept_probability.sum())
            tokens += len(batch.ids)
        weights.backward(max(positions, 1.0))
        factor = schedule(progress.trained_tokens, options.tokens, options.cooldown, progress.step)
        self._optimizer.step(options.learning_rate * factor, options.head_learning_rate * factor)
        progress.step += 1
        progress.trained_tokens += tokens
        progress.loss = loss / max(positions, 1.0)

    def _evaluate(self) -> None:
        progress = self.progress
        scores = agreement(self.student, self._heldout, self._trimmer)
        row = {
            "step": progress.step,
            "trained_tokens": progress.trained_tokens,
            "answer_pool_tokens": self._pool.num_tokens,
            "seconds": progress.seconds,
            "tokens_per_s": progress.tokens_per_s,
            "loss": progress.loss,
            **{f"agreement_{kind}": share for kind, share in scores.items()},
        }
        progress.curve.append(row)

    def _checkpoint(self) -> None:
        progress = self.progress
        tensors: dict[str, torch.Tensor] = dict(self.student.named_parameters())
        tensors |= self._optimizer.tensors()
        tensors["head_ids"] = self.student.head_ids.int()
        state = {
            "options": self.options.fixed(),
            "before": self._before,
            "step": progress.step,
            "trained_tokens": progress.trained_tokens,
            "seconds": progress.seconds,
            "curve": progress.curve,
            "feed": {
                "epoch": self._feed.epoch,
                "position": self._feed.position,
                "num_shards": self._feed.num_shards,
            },
        }
        save_checkpoint(self.out / "checkpoints", progress.step, tensors, state)
        self.export()

    def _restore(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.student.named_parameters():
                parameter.copy_(tensors[name])
        self._optimizer.restore(tensors)
        self._feed.restore(**state["feed"])
        self.progress = Progress(
            step=state["step"],
            trained_tokens=state["trained_tokens"],
            seconds=state["seconds"],
            curve=state["curve"],
        )

    def export(self) -> Path:
        """Write the drafter as it stands to `out`/drafter, with the learning curve beside it; returns that folder."""
        final, temporary, old = (self.out / name for name in ("drafter", ".drafter-new", ".drafter-old"))
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        self.student.save(temporary)
        last = self.progress.curve[-1] if self.progress.curve else {}
        notes: dict[str, Any] = {"options": self.options.model_dump(mode="json"), "result": last}
        if self._before is not None:
            notes["before"] = self._before
        save_drafter_info(temporary, self._info, self.student.head_ids.int(), notes)
        for file in temporary.iterdir():
            file.chmod(0o644)
        if final.exists():
            os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
        if self.progress.curve:
            write_csv(self.out / "curve.csv", self.progress.curve)
            try:
                write_picture(self.out / "curve.png", self.progress.curve)
            except AutoPipeError as error:
                _log.info("no picture of the learning curve: %s", error)
        return final
