"""What can be found out about a plan before any weights load."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopipe.core.errors import ConfigError, TokenizerMismatchError
from autopipe.core.plan import Plan

if TYPE_CHECKING:
    from autopipe.core.backends.load import StageInfo

Progress = Callable[[str], None]
"""Called with a line of text when something slow begins."""


@dataclass(frozen=True, slots=True)
class PlanInfo:
    """What is known of a plan's target before its weights load.

    Attributes:
        eos_token_ids: ids that end its text.
        vocab_size: rows of its output head.
        max_length: its context in tokens, prompt and output together; None: its config does not say.
    """

    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_length: int | None


def check_plan(plan: Plan, *, progress: Progress | None = None) -> tuple[int, ...]:
    """Check every stage of a plan; return the target's eos token ids. Raises what `inspect_plan` raises."""
    return inspect_plan(plan, progress=progress).eos_token_ids


def inspect_plan(plan: Plan, *, progress: Progress | None = None) -> PlanInfo:
    """Check every stage of a plan; return what is known of its target.

    Models that are not on disk are downloaded here, and GGUF files converted, once.

    Args:
        progress: told when a download or a conversion begins.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: a stage's model cannot be had or cannot serve.
        TokenizerMismatchError: a drafter has another tokenizer than the target.
    """
    _check_cores(plan)
    if plan.target.is_emulated:
        _check_emulated(plan)
    table = plan.chain[0].ngram_options().table if plan.chain[0].is_ngram else None
    num_table_tokens = _check_table(table) if table else 0
    from autopipe.core.backends.load import check_stage

    infos = {
        index: check_stage(stage, f"chain.{index}.model", progress=progress)
        for index, stage in enumerate(plan.chain)
        if not stage.is_ngram
    }
    if not plan.target.is_emulated:
        _check_tokenizers(plan, infos)
    target = infos[len(plan.chain) - 1]
    if num_table_tokens > target.vocab_size:
        raise TokenizerMismatchError(
            f"the n-gram table {table!r} has tokens up to {num_table_tokens - 1}, the target "
            f"{plan.target.model!r} only {target.vocab_size}: it was learned with another tokenizer"
        )
    return PlanInfo(tuple(target.eos_token_ids), target.vocab_size, target.max_length)


def _check_cores(plan: Plan) -> None:
    usable = os.sched_getaffinity(0)
    for index, stage in enumerate(plan.chain):
        if stage.cores is not None and not usable.issuperset(stage.cores):
            allowed = f"of the cores this process may use: {', '.join(map(str, sorted(usable)))}"
            raise ConfigError(f"chain.{index}.cores", list(stage.cores), allowed)


def _check_table(path: str) -> int:
    """Tokens that an n-gram table must be able to name. Raises what `NgramTable.load` raises."""
    from autopipe.core.ngram_table import NgramTable

    try:
        return NgramTable.load(path).max_token_id + 1
    except ConfigError as error:
        raise ConfigError("chain.0.ngram.table", error.value, error.allowed) from None


def _check_tokenizers(plan: Plan, infos: dict[int, StageInfo]) -> None:
    from autopipe.core.models import load_tokenizer, require_same_tokenizer, resolve

    others = {i: s for i, s in enumerate(plan.drafters) if i in infos and s.model != plan.target.model}
    if not others:
        return
    target = load_tokenizer(resolve(plan.target.model, f"chain.{len(plan.chain) - 1}.model"))
    for index, stage in others.items():
        drafter = load_tokenizer(resolve(stage.model, f"chain.{index}.model"))
        require_same_tokenizer(target, drafter, plan.target.model, stage.model)


def _check_emulated(plan: Plan) -> None:
    sizes = {stage.emulated.vocab_size for stage in plan.chain if stage.emulated is not None}
    seeds = {stage.emulated.seed for stage in plan.chain if stage.emulated is not None}
    if len(sizes) > 1:
        raise ConfigError("emulated.vocab_size", sorted(sizes), "the same in every stage of a chain")
    if len(seeds) > 1:
        raise ConfigError("emulated.seed", sorted(seeds), "the same in every stage of a chain")


def toy_tokenizer() -> Any:
    """The tokenizer of emulated chains: one token per byte, 256 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
