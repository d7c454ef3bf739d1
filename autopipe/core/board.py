"""The shared memory through which stages see each other's tokens.

One anonymous shared-memory segment per engine, one slot per stage. A slot is written by its stage only and
read by anyone: it holds the stage's *sequence* (what it believes the text to be, up to where it has got) and a
few words of flow control. Neighbours compare sequences by content, so no message can be lost, doubled or read
out of order; a writer adds only the new suffix, a reader copies only what is not final yet.

The sequence is guarded by a sequence lock (odd while being written) and a checksum of its unverified part, so a
torn read is impossible even where the memory model reorders plain stores. There is no lock to die with.
The segment has no name: the kernel frees it with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from autopipe.core.verify import SparseRow

MAX_SLOTS = 16
CAPACITY = 1 << 20
"""Longest sequence in tokens. Untouched pages cost nothing."""
ROW_RING = 512
"""Positions whose draft distribution is kept: more than any window plus any verification."""
ROW_WIDTH = 1024
"""Most entries of a sparse draft distribution."""
MAX_VOCAB = 1 << 20

_HEADER_WORDS = 32
_HEADER_BYTES = 8 * _HEADER_WORDS
_TOKENS_AT = 4096
_ROW_COUNTS_AT = _TOKENS_AT + 4 * CAPACITY
_ROW_IDS_AT = _ROW_COUNTS_AT + 4 * ROW_RING
_ROW_PROBS_AT = _ROW_IDS_AT + 4 * ROW_RING * ROW_WIDTH
_LOGITS_AT = _ROW_PROBS_AT + 4 * ROW_RING * ROW_WIDTH
_SLOT_BYTES = (_LOGITS_AT + 4 * MAX_VOCAB + 4095) // 4096 * 4096
SEGMENT_BYTES = MAX_SLOTS * _SLOT_BYTES

# Header words guarded by the sequence lock.
_SEQUENCE, _REQUEST, _LENGTH, _COMMITTED, _ROLLBACKS, _STOPPED, _PUBLISHED_NS, _CHECKSUM = range(8)
PUBLISHED_BYTES = 8 * 9
"""Header bytes written by a publication: the words above, the sequence lock twice."""
# Words of their own, each a single aligned store.
_CREDIT, _WAKE_AT, _BEAT_NS, _DEADLINE_NS = range(16, 20)
# What the owner has done in a request so far: its number, then as many figures as `Progress` has fields.
_PROGRESS = 20

_MAX_READ_TRIES = 200


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A stage's sequence as read at one moment.

    Attributes:
        request: the request it belongs to.
        length: tokens in the sequence, prompt included.
        committed: positions below this are final.
        rollbacks: times the stage has rolled back (its epoch).
        stopped: the stage will add nothing until its consumer moves.
        published_ns: monotonic time of publication.
        start: position of tokens[0].
        tokens: the sequence from `start` on.
    """

    request: int
    length: int
    committed: int
    rollbacks: int
    stopped: bool
    published_ns: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a stage has done so far in a request; fields as in `StageStats`. Read while it is written, the figures
    may stem from two steps in a row."""

    forwards: int = 0
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    rollbacks: int = 0
    busy_ns: int = 0
    catch_up_ns: int = 0


def create_segment() -> int:
    """File descriptor of a new, nameless, zeroed segment for `Board`; inheritable by name of descriptor only."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("autopipe", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="autopipe-")
        os.unlink(path)
    os.ftruncate(descriptor, SEGMENT_BYTES)
    return descriptor


class Board:
    """All slots of one engine, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, SEGMENT_BYTES)

    def slot(self, index: int) -> Slot:
        return Slot(self._map, index)


class Slot:
    """One stage's part of the board. `publish`, `clear` and the setters are for its owner alone."""

    def __init__(self, segment: mmap.mmap, index: int) -> None:
        base = index * _SLOT_BYTES
        self.index = index
        self._words = memoryview(segment)[base : base + _HEADER_BYTES].cast("q")
        self._tokens = np.frombuffer(segment, np.int32, CAPACITY, base + _TOKENS_AT)
        self._row_counts = np.frombuffer(segment, np.int32, ROW_RING, base + _ROW_COUNTS_AT)
        self._row_ids = np.frombuffer(segment, np.int32, ROW_RING * ROW_WIDTH, base + _ROW_IDS_AT).reshape(
            ROW_RING, ROW_WIDTH
        )
        self._row_probs = np.frombuffer(segment, np.float32, ROW_RING * ROW_WIDTH, base + _ROW_PROBS_AT).reshape(
            ROW_RING, ROW_WIDTH
        )
        self._logits = np.frombuffer(segment, np.float32, MAX_VOCAB, base + _LOGITS_AT)

    def publish(
        self,
        request: int,
        start: int,
        tokens: Sequence[int],
        *,
        committed: int,
        rollbacks: int,
        stopped: bool,
        rows: Sequence[SparseRow | None] = (),
    ) -> int:
        """Replace the sequence from position `start` on by `tokens`; return the bytes written.

        `rows[i]` is the distribution that tokens[i] was drawn from; None for a token that was adopted.
        """
        words = self._words
        length = start + len(tokens)
        words[_SEQUENCE] += 1
        if tokens:
            self._tokens[start:length] = tokens
        written = 4 * len(tokens) + PUBLISHED_BYTES
        for position, row in enumerate(rows, start):
            if row is None:
                self._row_counts[position % ROW_RING] = 0
            else:
                place, count = position % ROW_RING, len(row.ids)
                self._row_counts[place] = count
                self._row_ids[place, :count] = row.ids
                self._row_probs[place, :count] = row.probs
                written += 4 + 8 * count
        words[_REQUEST] = request
        words[_LENGTH] = length
        words[_COMMITTED] = committed
        words[_ROLLBACKS] = rollbacks
        words[_STOPPED] = int(stopped)
        words[_PUBLISHED_NS] = time.monotonic_ns()
        words[_CHECKSUM] = self._checksum(request, committed, length)
        words[_SEQUENCE] += 1
        return written

    def read(self, request: int, since: int) -> Snapshot | None:
        """The sequence from position `since` on; None when the slot holds another request or is being written.

        A writer that died in the middle of writing never blocks a reader: it gets None.
        """
        words = self._words
        for _ in range(_MAX_READ_TRIES):
            before = words[_SEQUENCE]
            if before & 1 == 0:
                if words[_REQUEST] != request:
                    return None
                length, committed = words[_LENGTH], words[_COMMITTED]
                rollbacks, stopped, published = words[_ROLLBACKS], words[_STOPPED], words[_PUBLISHED_NS]
                tokens = self._tokens[since : max(length, since)].tolist()
                checksum = self._checksum(request, committed, length)
                if words[_SEQUENCE] == before and words[_CHECKSUM] == checksum:
                    return Snapshot(request, length, committed, rollbacks, bool(stopped), published, since, tokens)
            time.sleep(0)
        return None

    def read_rows(self, request: int, start: int, expected: Sequence[int]) -> list[SparseRow] | None:
        """Distributions of the tokens at `start`..

        None if the sequence no longer reads `expected` there, or the slot's stage has not drawn all of these itself.
        """
        words = self._words
        for _ in range(_MAX_READ_TRIES):
            before = words[_SEQUENCE]
            if before & 1 == 0:
                if words[_REQUEST] != request or words[_LENGTH] < start + len(expected):
                    return None
                same = self._tokens[start : start + len(expected)].tolist() == list(expected)
                rows = [self._copy_row(position) for position in range(start, start + len(expected))]
                if words[_SEQUENCE] == before:
                    return rows if same and all(len(row.ids) for row in rows) else None
            time.sleep(0)
        return None

    def forget_rows(self) -> None:
        """Mark every distribution as absent."""
        self._row_counts[:] = 0

    def _copy_row(self, position: int) -> SparseRow:
        place = position % ROW_RING
        count = int(self._row_counts[place])
        return SparseRow(self._row_ids[place, :count].copy(), self._row_probs[place, :count].copy())

    def _checksum(self, request: int, committed: int, length: int) -> int:
        return zlib.crc32(self._tokens[committed:length].tobytes(), (request ^ length) & 0xFFFFFFFF)

    def write_progress(self, request: int, progress: Progress) -> None:
        """Say what has been done so far in `request`."""
        self._words[_PROGRESS] = 0
        for index, field in enumerate(fields(progress), _PROGRESS + 1):
            self._words[index] = getattr(progress, field.name)
        self._words[_PROGRESS] = request

    def read_progress(self, request: int) -> Progress | None:
        """What the owner has done in `request`; None when it has not said."""
        if self._words[_PROGRESS] != request:
            return None
        return Progress(*(self._words[_PROGRESS + 1 + index] for index in range(len(fields(Progress)))))

    def clear(self) -> None:
        """Forget what a former owner left, whatever state it died in."""
        for index in range(_HEADER_WORDS):
            if index != _SEQUENCE:
                self._words[index] = 0
        self._words[_SEQUENCE] = (self._words[_SEQUENCE] | 1) + 1

    @property
    def ring(self) -> npt.NDArray[np.int32]:
        """The tokens' memory, int32 [CAPACITY]."""
        return self._tokens

    def logits(self, vocab_size: int) -> npt.NDArray[np.float32]:
        """Scratch of one row, float32 [vocab_size], shared by the target and the parent."""
        return self._logits[:vocab_size]

    @property
    def credit(self) -> int:
        """Length up to which this stage lets its producer draft; 0: pause."""
        return self._words[_CREDIT]

    @credit.setter
    def credit(self, value: int) -> None:
        self._words[_CREDIT] = value

    @property
    def wake_at(self) -> int:
        """Length of the producer's sequence from which on this stage wants to be woken."""
        return self._words[_WAKE_AT]

    @wake_at.setter
    def wake_at(self, value: int) -> None:
        self._words[_WAKE_AT] = value

    @property
    def beat_ns(self) -> int:
        """Monotonic time of the worker's last sign of life."""
        return self._words[_BEAT_NS]

    @beat_ns.setter
    def beat_ns(self, value: int) -> None:
        self._words[_BEAT_NS] = value

    @property
    def deadline_ns(self) -> int:
        """Monotonic time by which the step under way should be done; 0: no step under way."""
        return self._words[_DEADLINE_NS]

    @deadline_ns.setter
    def deadline_ns(self, value: int) -> None:
        self._words[_DEADLINE_NS] = value
