"""A layer's packed matrices in a file that every process maps: a target and its drafters then read the same memory.

The file lies in AutoPipe's cache under the digest of the weights it was packed from, so whoever has these weights has
this file, and nothing else is ever taken for them. Its own digest is checked when it is mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_weights import LayerTensors
from autopipe.core.backends.packed_arena import Arena
from autopipe.core.backends.packed_matrices import LayerMatrices, MatrixPacker
from autopipe.core.errors import ModelLoadError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.kernels.loader import ABI_VERSION
from autopipe.core.models.cache import cache_dir, make_once

FOLDER = "packed-layers"
_WEIGHTS, _DIGEST = "weights.bin", "sha256"


@dataclass(frozen=True, eq=False)
class MappedLayer:
    """A layer's matrices in read-only memory that lives as long as this."""

    matrices: LayerMatrices
    memory: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


_mapped: WeakValueDictionary[str, MappedLayer] = WeakValueDictionary()
_mapping = threading.Lock()


def map_layer(shape: DecoderShape, dtype: torch.dtype, tensors: LayerTensors) -> MappedLayer:
    """Map a layer's file, once in this process; it is written first where it is missing or damaged.

    Args:
        tensors: of the layer, in `dtype`, bf16 or fp32.

    Raises:
        ModelLoadError: the cache cannot be written or read.
    """
    digest = _digest_of(tensors)
    with _mapping:
        layer = _mapped.get(digest)
        if layer is None:
            layer = _mapped[digest] = _map(shape, dtype, tensors, cache_dir() / FOLDER / digest)
    return layer


def _map(shape: DecoderShape, dtype: torch.dtype, tensors: LayerTensors, entry: Path) -> MappedLayer:
    arena = Arena()
    packer = MatrixPacker(arena, shape, dtype, WeightFormat.of(dtype))
    offsets, num_bytes = packer.layer_matrices(tensors), arena.num_bytes
    found: list[npt.NDArray[np.uint8]] = []

    def build(folder: Path) -> None:
        memory = arena.allocate()
        packer.layer_matrices(tensors)
        packed = memory.tensor(0, (num_bytes,), torch.uint8).numpy().data
        (folder / _WEIGHTS).write_bytes(packed)
        (folder / _DIGEST).write_text(hashlib.sha256(packed).hexdigest())
        memory.close()

    def is_damaged(entry: Path) -> bool:
        memory = _open(entry, num_bytes)
        if memory is not None:
            found.append(memory)
        return memory is None

    make_once(entry, build, is_damaged)
    if not found and is_damaged(entry):
        raise ModelLoadError(f"{entry} does not keep what is written to it; set AUTOPIPE_CACHE")
    memory = found[-1]
    return MappedLayer(LayerMatrices(*(int(memory.ctypes.data) + offset for offset in offsets)), memory)


def _open(entry: Path, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """The mapped file; None if it is not what was written. Raises OSError where that cannot be said."""
    try:
        with (entry / _WEIGHTS).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        expected = (entry / _DIGEST).read_text()
    except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # few file systems have huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    return memory if memory.nbytes == num_bytes and hashlib.sha256(mapped).hexdigest() == expected else None


def _digest_of(tensors: LayerTensors) -> str:
    matrices = (tensors.q, tensors.k, tensors.v, tensors.output, tensors.gate, tensors.up, tensors.down)
    digest = hashlib.sha256(f"{ABI_VERSION} {[(m.dtype, tuple(m.shape)) for m in matrices]}".encode())
    for matrix in matrices:
        digest.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
