"""KV entries that travel when layers move: only those that are not there yet."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import ConfigError
from autopipe.core.placement import KvLedger, MovableCache


def test_a_first_move_sends_everything_and_a_move_back_only_what_was_added():
    ledger = KvLedger(["cuda:0", "cuda:0"])
    ledger.appended(100)
    assert ledger.move(0, "cuda:1") == range(0, 100)
    ledger.appended(130)
    assert ledger.move(0, "cuda:0") == range(100, 130)


def test_what_was_rolled_back_is_sent_again():
    ledger = KvLedger(["a"])
    ledger.appended(50)
    ledger.move(0, "b")
    ledger.move(0, "a")
    ledger.rolled_back(40)
    ledger.appended(60)
    assert ledger.move(0, "b") == range(40, 60)


def test_a_layer_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="0 to 0"):
        KvLedger(["a"]).move(1, "b")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["append", "roll", "move"]), st.integers(0, 5), st.integers(0, 2)), max_size=40)
)
def test_a_moved_cache_holds_what_an_unmoved_one_holds(steps):
    """Devices are stood in for by the CPU under two names: what is checked is which entries are copied."""
    generator = torch.Generator().manual_seed(0)
    moving = MovableCache(["cpu", "cpu:0", "cpu"], 2, 4, 256, torch.float32)
    reference = MovableCache(["cpu"] * 3, 2, 4, 256, torch.float32)
    for action, amount, layer in steps:
        if action == "append" and amount and moving.length + amount <= 256:
            new = [tuple(torch.randn(2, 2, amount, 4, generator=generator)) for _ in range(3)]
            moving.append(new)
            reference.append(new)
        elif action == "roll":
            length = max(0, moving.length - amount)
            moving.rollback(length)
            reference.rollback(length)
        elif action == "move":
            moving.move(layer, ["cpu", "cpu:0", "cpu:0"][amount % 3])
    for layer in range(3):
        for ours, theirs in zip(moving.layer(layer), reference.layer(layer), strict=True):
            assert torch.equal(ours, theirs)


def test_bytes_are_counted_and_compared_with_sending_all():
    cache = MovableCache(["cpu"], 2, 4, 64, torch.bfloat16)
    cache.append([(torch.zeros(2, 10, 4), torch.zeros(2, 10, 4))])
    per_position = 2 * 2 * 4 * 2
    assert cache.move(0, "meta") == 10 * per_position
    assert cache.move(0, "cpu") == 0
    assert cache.bytes_moved == 10 * per_position
    assert cache.bytes_if_whole == 2 * 10 * per_position
