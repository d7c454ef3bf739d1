"""The table that comes with AutoPipe."""

from __future__ import annotations

import re

import pytest

from autopipe.bench.prompts import humaneval_problems
from autopipe.core.errors import TokenizerMismatchError
from autopipe.core.models import load_tokenizer, resolve, tokenizer_fingerprint
from autopipe.core.ngram import CALIBRATION_KEY
from autopipe.core.ngram_shipped import SHIPPED_TABLES, TOKENIZER_KEY, table_path
from autopipe.core.ngram_table import NgramTable
from autopipe.core.plan import Plan
from autopipe.core.preflight import check_plan
from autopipe.drafts.overlap import NUM_WORDS
from autopipe.plans import DEFAULT_PLAN_PATH
from tests.tiny import tiny_tokenizer

MAX_BYTES = 8 << 20


@pytest.mark.parametrize("name", SHIPPED_TABLES)
def test_it_is_small_and_learned_from_enough_answers(name: str) -> None:
    table = NgramTable.load(name)

    assert table_path(name).stat().st_size < MAX_BYTES
    assert int(table.metadata["answer_tokens"]) >= 300_000
    assert CALIBRATION_KEY in table.metadata


def test_the_default_plan_uses_it() -> None:
    plan = Plan.load(DEFAULT_PLAN_PATH)

    assert plan.chain[0].ngram_options().table == plan.target.model


@pytest.mark.real_model
def test_its_tokenizer_is_that_of_its_target() -> None:
    tokenizer = load_tokenizer(resolve("smollm2-135m"))

    assert NgramTable.load("smollm2-135m").metadata[TOKENIZER_KEY] == tokenizer_fingerprint(tokenizer)


def test_a_target_with_another_tokenizer_is_refused() -> None:
    target = {"model": "emulated", "emulated": {"ms": {1: 1}, "vocab_size": 60_000}}
    plan = Plan.parse({"chain": [{"model": "ngram", "ngram": {"table": "smollm2-135m"}}, target]})

    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        check_plan(plan)


def test_fingerprints_tell_tokenizers_apart() -> None:
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tiny_tokenizer())
    assert tokenizer_fingerprint(tiny_tokenizer()) != tokenizer_fingerprint(tiny_tokenizer(extra_tokens=("more",)))


@pytest.mark.real_model
def test_it_can_recite_no_benchmark_prompt() -> None:
    """Text that was trained on would be foreseen by the longest contexts, token after token, for ten words and more."""
    table, tokenizer = NgramTable.load("smollm2-135m"), load_tokenizer(resolve("smollm2-135m"))

    def foreseen(ids: list[int], position: int) -> bool:
        found = table.match(ids[position - table.max_order : position])
        return found is not None and found.order == table.max_order and found.token_id == ids[position]

    for problem in humaneval_problems():
        ids = tokenizer(problem["prompt"] + problem["canonical_solution"])["input_ids"]
        start = table.max_order
        for position in range(table.max_order, len(ids)):
            if not foreseen(ids, position):
                start = position + 1
            recited = re.findall("[a-z]{2,}", tokenizer.decode(ids[start : position + 1]).lower())
            assert len(recited) < NUM_WORDS, (problem["task_id"], recited)
