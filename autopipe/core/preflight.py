"""What can be found out about a plan before any weights load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopipe.core.affinity import allowed_cores
from autopipe.core.errors import ConfigError, TokenizerMismatchError
from autopipe.core.isolation import numa_nodes
from autopipe.core.ngram_shipped import TOKENIZER_KEY
from autopipe.core.plan import FEWER_BITS, Plan

if TYPE_CHECKING:
    from autopipe.core.backends.load import StageInfo
    from autopipe.core.ngram_table import NgramTable

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
    options = plan.chain[0].ngram_options() if plan.chain[0].is_ngram else None
    table = _load_table(options.table) if options is not None and options.table else None
    from autopipe.core.backends.load import check_stage

    infos = {
        index: check_stage(stage, f"chain.{index}.model", progress=progress)
        for index, stage in enumerate(plan.chain)
        if not stage.is_ngram
    }
    if not plan.target.is_emulated:
        _check_target_is_whole(plan)
        _check_tokenizers(plan, infos)
    target = infos[len(plan.chain) - 1]
    _check_exact_target(plan, target)
    if options is not None and table is not None:
        _check_table(table, str(options.table), plan, target.vocab_size)
    return PlanInfo(tuple(target.eos_token_ids), target.vocab_size, target.max_length)


def _check_cores(plan: Plan) -> None:
    """Where the platform does not say which cores are ours, any pass here; the stage then says it is not bound."""
    usable = allowed_cores()
    nodes = numa_nodes()
    for index, stage in enumerate(plan.chain):
        if stage.cores is not None and usable is not None and not usable.issuperset(stage.cores):
            allowed = f"of the cores this process may use: {', '.join(map(str, sorted(usable)))}"
            raise ConfigError(f"chain.{index}.cores", list(stage.cores), allowed)
        if stage.numa is not None and nodes and stage.numa not in nodes:
            raise ConfigError(f"chain.{index}.numa", stage.numa, f"a NUMA node: {', '.join(map(str, nodes))}")


def _load_table(path: str) -> NgramTable:
    from autopipe.core.ngram_table import NgramTable

    try:
        return NgramTable.load(path)
    except ConfigError as error:
        raise ConfigError("chain.0.ngram.table", error.value, error.allowed) from None


def _check_table(table: NgramTable, name: str, plan: Plan, vocab_size: int) -> None:
    """A table must name tokens of the target's tokenizer: by fingerprint if it has one, by the largest id always."""
    if table.max_token_id >= vocab_size:
        raise TokenizerMismatchError(
            f"the n-gram table {name!r} has tokens up to {table.max_token_id}, the target "
            f"{plan.target.model!r} only {vocab_size}: it was learned with another tokenizer"
        )
    learned_with = table.metadata.get(TOKENIZER_KEY)
    if learned_with is None:
        return
    found = _fingerprint(plan.target.model, plan.target.trust_remote_code, plan.target.is_emulated)
    if learned_with != found:
        raise TokenizerMismatchError(
            f"the n-gram table {name!r} was learned with another tokenizer ({learned_with}) than that of the target "
            f"{plan.target.model!r} ({found}); make one with `autopipe drafts answers` and `autopipe drafts ngram`"
        )


@functools.lru_cache(maxsize=8)
def _fingerprint(model: str, trust_remote_code: bool, emulated: bool) -> str:
    from autopipe.core.models import load_tokenizer, resolve, tokenizer_fingerprint

    if emulated:
        return tokenizer_fingerprint(toy_tokenizer())
    return tokenizer_fingerprint(load_tokenizer(resolve(model), trust_remote_code=trust_remote_code))


def _check_target_is_whole(plan: Plan) -> None:
    """A drafter that shares the target's base has lost layers and most of the output head."""
    from autopipe.core.backends.load import is_drafter

    if is_drafter(plan.target):
        key = f"chain.{len(plan.chain) - 1}.adapter"
        raise ConfigError(key, plan.target.adapter, "no drafter: the last stage of a chain is a whole model")


def _check_exact_target(plan: Plan, info: StageInfo) -> None:
    """A target whose rows may round differently in a block and alone cannot give plain decoding's output."""
    from autopipe.core.backends.quantised import is_exact
    from autopipe.core.kernels import has_kernels

    by_library = plan.target.dtype in FEWER_BITS and not (info.device == "cpu" and has_kernels())
    if plan.exact and by_library and not is_exact(plan.target.dtype):
        allowed = "int8, bf16 or fp32 for a target on a GPU; or `exact: false`: its 4-bit library does not round alike"
        raise ConfigError(f"chain.{len(plan.chain) - 1}.dtype", plan.target.dtype.value, allowed)


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
