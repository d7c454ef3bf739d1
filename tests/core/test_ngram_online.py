"""What the n-gram drafter learns from earlier requests."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from autopipe.core.engine import Engine
from autopipe.core.errors import AutoPipeError, ConfigError
from autopipe.core.ngram import NgramDrafter
from autopipe.core.ngram_online import BYTES_PER_ENTRY, OnlineNgrams
from autopipe.core.ngram_table import NgramTable, context_keys
from autopipe.core.plan import NgramOptions, Plan
from autopipe.core.sampling import SamplingParams

ONLINE = NgramOptions(online=True, online_entries=2000)


def match(online: OnlineNgrams, text: list[int]):
    return online.match_keys(context_keys(text, 5))


def learned(tokens: list[int], max_entries: int = 1000) -> OnlineNgrams:
    online = OnlineNgrams(max_entries)
    online.learn(tokens, 0, len(tokens))
    return online


def serve(drafter: NgramDrafter, prompt: list[int], output: list[int]) -> float:
    """One request, a token a step; share of tokens that the first draft foresaw."""
    drafter.reset()
    drafter.sync(prompt, 0)
    hits = 0
    for length in range(len(output)):
        hits += drafter.draft(1).token_ids == output[length : length + 1]
        drafter.sync(prompt + output[: length + 1], len(prompt) + length)
    return hits / len(output)


def test_a_successor_is_found_by_the_longest_context() -> None:
    online = learned([1, 2, 3, 9, 2, 4])

    assert match(online, [1, 2]).token_id == 3
    assert match(online, [7, 2]).token_id == 3 or match(online, [7, 2]).token_id == 4
    assert match(online, [9, 2]).token_id == 4
    assert match(online, [5]) is None


def test_the_majority_is_kept() -> None:
    found = match(learned([1, 2, 1, 2, 1, 3, 1, 2]), [7, 1])

    assert (found.token_id, found.occurrences) == (2, 4)


def test_a_change_of_habit_replaces_the_old_one() -> None:
    assert match(learned([1, 2] * 3 + [1, 3] * 9), [8, 1]).token_id == 3


def test_many_occurrences_stay_in_a_byte() -> None:
    found = match(learned([1, 2] * 2000), [1])

    assert found.occurrences <= 255
    assert found.share > 240


def test_memory_is_bounded_and_the_oldest_context_goes_first() -> None:
    online = OnlineNgrams(500)
    online.learn([1, 2], 0, 2)
    noise = random.Random(0).sample(range(10, 40_000), 2000)
    online.learn(noise, 0, len(noise))

    assert len(online) == 500
    assert match(online, [1]) is None
    assert match(online, noise[:-1]).token_id == noise[-1]


def test_an_entry_takes_no_more_memory_than_stated() -> None:
    noise = random.Random(0).sample(range(10, 40_000), 5000)
    tracemalloc.start()
    try:
        online = learned(noise, 20_000)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / len(online) < BYTES_PER_ENTRY


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="online_entries"):
        OnlineNgrams(0)


def test_what_was_learned_is_saved_as_a_table(tmp_path: Path) -> None:
    online = learned([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 5])
    online.save(tmp_path / "t.safetensors")
    table = NgramTable.load(tmp_path / "t.safetensors")

    assert len(table) == len(online)
    for text in ([1, 2, 3], [2], [9, 9, 3], [4, 1, 2]):
        assert table.match(text) == match(online, text)


def test_nothing_learned_is_an_empty_table(tmp_path: Path) -> None:
    OnlineNgrams(10).save(tmp_path / "t.safetensors")

    assert len(NgramTable.load(tmp_path / "t.safetensors")) == 0


def test_hits_grow_with_use() -> None:
    chooser = random.Random(1)
    habits = [[chooser.randrange(1000) for _ in range(40)] for _ in range(3)]
    drafter = NgramDrafter(ONLINE)
    rates = [serve(drafter, [2000 + number], habits[number % 3]) for number in range(9)]

    assert max(rates[:3]) < 0.1
    assert min(rates[3:]) > 0.9


def test_prompts_teach_nothing() -> None:
    drafter = NgramDrafter(ONLINE)
    serve(drafter, [1, 2, 3, 4, 5], [6, 7, 8])

    assert drafter.online is not None
    assert match(drafter.online, [2, 3]) is None


def test_it_learns_nothing_unless_asked() -> None:
    drafter = NgramDrafter(NgramOptions())
    serve(drafter, [1], [2, 3, 4])

    assert drafter.online is None
    assert serve(drafter, [1], [2, 3, 4]) == 0


def test_rolled_back_tokens_are_not_learned() -> None:
    drafter = NgramDrafter(ONLINE)
    drafter.sync([1], 0)
    drafter.sync([1, 2, 3], 1)
    drafter.sync([1, 2, 9, 8], 2)
    drafter.reset()

    assert match(drafter.online, [1, 2]).token_id == 9


def test_drafters_may_share_what_they_learn() -> None:
    first = NgramDrafter(ONLINE)
    serve(first, [1], [2, 3, 4, 5])
    first.reset()

    assert serve(NgramDrafter(ONLINE, online=first.online), [1], [2, 3, 4, 5]) > 0.7


# -- in the engine ------------------------------------------------------------------------------------------


def emulated_plan(online: bool) -> Plan:
    """Ungated: the gate weighs drafts by measured time, and what is learned must not depend on that."""
    target = {"model": "emulated", "emulated": {"ms": {1: 0.2}, "vocab_size": 200, "seed": 5}}
    return Plan.parse({"chain": [{"model": "ngram", "window": 4, "ngram": {"online": online, "gate": False}}, target]})


def test_output_never_changes_and_the_same_request_again_needs_fewer_forwards(tmp_path: Path) -> None:
    outputs, forwards = {}, {}
    for online in (False, True):
        with Engine(emulated_plan(online)) as engine:
            for number in range(5):
                handle = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=60))
                tokens = [token for block in handle for token in block.token_ids]
                outputs[online, number] = tokens
                forwards[online, number] = handle.outcome().stats.stages[-1].forwards
            if online:
                assert engine.save_ngrams(tmp_path / "t.safetensors") > 50
            else:
                with pytest.raises(AutoPipeError, match="online"):
                    engine.save_ngrams(tmp_path / "none.safetensors")
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1
    assert forwards[True, 4] < 0.7 * forwards[True, 0]
    assert NgramTable.load(tmp_path / "t.safetensors").max_token_id < 200


# -- in a plan ----------------------------------------------------------------------------------------------


def test_a_plan_may_be_told_to_learn_and_not_to() -> None:
    plan = Plan.parse({"chain": [{"model": "ngram", "window": 5}, {"model": "big"}]})
    learning = plan.learning_online(True)

    assert learning.chain[0].ngram_options().online
    assert learning.chain[0].window == 5
    assert learning.learning_online(False).chain[0].ngram_options() == plan.chain[0].ngram_options()


def test_a_plan_without_an_ngram_drafter_has_nothing_to_learn_with() -> None:
    plan = Plan.parse({"chain": [{"model": "big"}]})

    assert plan.learning_online(True) == plan
