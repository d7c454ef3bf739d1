"""What can be found out about a plan before any weights load."""

from __future__ import annotations

from typing import Any

from autopipe.core.errors import ConfigError, TokenizerMismatchError
from autopipe.core.plan import Plan


def check_plan(plan: Plan) -> tuple[int, ...]:
    """Check every stage of a plan; return the target's eos token ids.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: a stage's model cannot be had or cannot serve.
        TokenizerMismatchError: a drafter has another tokenizer than the target.
    """
    if plan.target.is_emulated:
        _check_emulated(plan)
        return ()
    table = plan.chain[0].ngram_options().table if plan.chain[0].is_ngram else None
    num_table_tokens = _check_table(table) if table else 0
    from autopipe.core.backends.load import check_stage
    from autopipe.core.models import load_tokenizer, require_same_tokenizer, resolve

    infos = {
        index: check_stage(stage, f"chain.{index}.model")
        for index, stage in enumerate(plan.chain)
        if not stage.is_ngram
    }
    last = len(plan.chain) - 1
    others = {i: s for i, s in enumerate(plan.drafters) if i in infos and s.model != plan.target.model}
    if others:
        target = load_tokenizer(resolve(plan.target.model, f"chain.{last}.model"))
        for index, stage in others.items():
            drafter = load_tokenizer(resolve(stage.model, f"chain.{index}.model"))
            require_same_tokenizer(target, drafter, plan.target.model, stage.model)
    if num_table_tokens > infos[last].vocab_size:
        raise TokenizerMismatchError(
            f"the n-gram table {table!r} has tokens up to {num_table_tokens - 1}, the target "
            f"{plan.target.model!r} only {infos[last].vocab_size}: it was learned with another tokenizer"
        )
    return tuple(infos[last].eos_token_ids)


def _check_table(path: str) -> int:
    """Tokens that an n-gram table must be able to name. Raises what `NgramTable.load` raises."""
    from autopipe.core.ngram_table import NgramTable

    return NgramTable.load(path).max_token_id + 1


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
