"""Slots and prefixes where memory is short."""

from __future__ import annotations

import pytest

from autopipe.core.backends.emulated_batch import EmulatedBatchRunner
from autopipe.core.errors import KVMemoryError
from autopipe.core.shared.slots import SlotKeeper
from tests.core.shared.neural_scenes import EMULATED_VOCAB, SLOTS, prompt_of, spec
from tests.core.shared.requests import request


class NoCopies(EmulatedBatchRunner):
    def _copy_prefix(self, source: int, destination: int, length: int) -> None:
        raise KVMemoryError("no room for a copy")


def test_a_prefix_that_cannot_be_copied_leaves_a_slot_that_is_known_to_be_empty() -> None:
    runner = NoCopies(spec(), SLOTS)
    slots = SlotKeeper(runner, 8)
    first, second = (request(n, prompt_of(0, 40), vocab=EMULATED_VOCAB) for n in range(2))
    for each, length in ((first, 40), (second, 16)):
        assert slots.admit(each)
        runner.forward([(each.slot, each.tokens[:length], 0)])
        each.cached = length
    with pytest.raises(KVMemoryError):
        slots.reuse(second, [first, second])
    assert second.cached == runner.length(second.slot) == 0


def test_of_those_that_are_parked_the_last_is_given_up_and_never_the_one_that_comes() -> None:
    slots = SlotKeeper(EmulatedBatchRunner(spec(), SLOTS), 0)
    requests = [request(n, prompt_of(n, 40), vocab=EMULATED_VOCAB) for n in range(3)]
    for each in requests:
        assert slots.admit(each)
        each.cached = 7
        slots.park(each)
    comes = requests[2]
    assert slots.evict(besides=comes)
    assert [slots.num_parked(each) for each in requests] == [7, 0, 7]
    assert slots.evict(besides=comes)
    assert not slots.evict(besides=comes)
    assert slots.admit(comes)
    assert comes.cached == 7
