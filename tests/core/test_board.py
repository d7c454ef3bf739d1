from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from autopipe.core.board import Board, Slot, create_segment
from autopipe.core.verify import SparseRow


@pytest.fixture
def board() -> Board:
    descriptor = create_segment()
    board = Board(descriptor)
    os.close(descriptor)
    return board


def publish(slot: Slot, start: int, tokens: list[int], *, request: int = 1, committed: int = 0) -> None:
    slot.publish(request, start, tokens, committed=committed, rollbacks=0, stopped=False)


def test_reader_gets_the_suffix_it_asks_for(board: Board) -> None:
    publish(board.slot(0), 3, [7, 8, 9], committed=3)
    snapshot = board.slot(0).read(1, since=4)
    assert snapshot is not None
    assert (snapshot.start, snapshot.tokens, snapshot.length, snapshot.committed) == (4, [8, 9], 6, 3)


def test_publishing_from_an_earlier_position_replaces_what_followed(board: Board) -> None:
    slot = board.slot(0)
    publish(slot, 0, [1, 2, 3, 4])
    publish(slot, 2, [9])
    snapshot = slot.read(1, since=0)
    assert snapshot is not None
    assert snapshot.tokens == [1, 2, 9]


def test_another_request_reads_as_nothing(board: Board) -> None:
    publish(board.slot(0), 0, [1], request=1)
    assert board.slot(0).read(2, since=0) is None


def test_slots_do_not_overlap(board: Board) -> None:
    publish(board.slot(0), 0, [1])
    publish(board.slot(1), 0, [2])
    first, second = board.slot(0).read(1, 0), board.slot(1).read(1, 0)
    assert first is not None
    assert second is not None
    assert (first.tokens, second.tokens) == ([1], [2])


def test_a_writer_that_died_while_writing_does_not_block_readers(board: Board) -> None:
    slot = board.slot(0)
    publish(slot, 0, [1, 2])
    slot._words[0] += 1  # the sequence lock, left odd
    assert slot.read(1, 0) is None


def test_clear_makes_a_slot_usable_again_whatever_state_its_owner_died_in(board: Board) -> None:
    slot = board.slot(0)
    slot._words[0] += 1
    slot.credit = 5
    slot.clear()
    publish(slot, 0, [4])
    snapshot = slot.read(1, 0)
    assert snapshot is not None
    assert snapshot.tokens == [4]
    assert slot.credit == 0


def test_rows_travel_with_their_tokens_and_not_without(board: Board) -> None:
    slot = board.slot(0)
    row = SparseRow(np.array([3, 5], np.int32), np.array([0.25, 0.75], np.float32))
    slot.publish(1, 2, [5], committed=2, rollbacks=0, stopped=False, rows=[row])
    rows = slot.read_rows(1, 2, [5])
    assert rows is not None
    assert rows[0].ids.tolist() == [3, 5]
    assert rows[0].probs.tolist() == [0.25, 0.75]
    assert slot.read_rows(1, 2, [6]) is None


def test_no_torn_read_under_a_writer_that_never_rests(board: Board) -> None:
    """Every published sequence is n times the number n: a mixture of two would show."""
    slot, enough = board.slot(0), threading.Event()

    def write() -> None:
        number = 0
        while not enough.is_set():
            number += 1
            publish(slot, 0, [number] * (number % 17 + 1))

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while len(seen) < 200:
        snapshot = board.slot(0).read(1, 0)
        if snapshot is not None and snapshot.tokens:
            number = snapshot.tokens[0]
            seen.add(number)
            if snapshot.tokens != [number] * (number % 17 + 1):
                enough.set()
                raise AssertionError(f"a torn read: {snapshot.tokens}")
    enough.set()
    thread.join()


def test_another_process_sees_what_is_published(board: Board) -> None:
    descriptor = create_segment()
    ours = Board(descriptor)
    publish(ours.slot(3), 0, [11, 12, 13])
    script = f"from autopipe.core.board import Board\nprint(Board({descriptor}).slot(3).read(1, 0).tokens)"
    seen = subprocess.run(
        [sys.executable, "-c", script], pass_fds=[descriptor], capture_output=True, text=True, check=True
    )
    os.close(descriptor)
    assert seen.stdout.strip() == "[11, 12, 13]"
