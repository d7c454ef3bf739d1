"""Counter-based randomness: a pure function of (seed, position, token id), the same in every stage and process.

Gumbel noise makes `argmax(log prob + noise)` a sample (Gumbel-max trick); as the noise does not depend on who asks,
or when, every stage that sees the same logits picks the same token. All bits come from SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014): a key from seed and position, then one output per
token id.

The exponential variate behind the noise is -log1p(-v) with v in (0, 1) of full float32 precision near 0 (down to
2**-48), so the largest of 10**5 noises is not quantised. Logarithms are explicit float32 operations, so that numpy
and the C++ kernel (`kernels/noise.cpp`) agree bit for bit on any machine.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from autopipe.core.kernels import library

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIFORM_DOMAIN = 0x5851F42D4C957F2D
"""Keeps the uniforms of rejection sampling apart from the Gumbel noise under the same seed."""

_F = np.float32
_LN_2 = _F(0.693147182464599609375)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_ATANH_SERIES = (_F(1 / 9), _F(1 / 7), _F(1 / 5), _F(1 / 3))
_LARGEST_BELOW_1 = _F(1 - 2**-24)


class Purpose(IntEnum):
    """What a uniform of `uniform` is used for; each purpose has its own."""

    ACCEPT = 0
    RECOVER = 1
    DRAW = 2


def _mix(bits: int) -> int:
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK
    return bits ^ (bits >> 31)


def row_key(seed: int, position: int) -> int:
    """Key of the noise of one position (64 bits)."""
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)


def uniform(seed: int, stage: int, position: int, purpose: Purpose) -> float:
    """A float64 in [0, 1) for one decision of rejection sampling."""
    bits = _mix(seed ^ _UNIFORM_DOMAIN)
    for part in (stage, position, int(purpose)):
        bits = _mix(bits + (part + 1) * _GAMMA)
    return (bits >> 11) * 2.0**-53


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.integer[Any]]) -> Float32Array:
    """Gumbel(0, 1) noise of some tokens at an absolute position, float32 [n] for token_ids [n]."""
    kernels = _kernels()
    if kernels is None:
        return gumbel_reference(seed, position, token_ids)
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    out = np.empty(len(ids), dtype=np.float32)
    kernels.autopipe_gumbel(row_key(seed, position), ids.ctypes.data, len(ids), out.ctypes.data)
    return out


def gumbel_argmax(scores: Float32Array, seed: int, position: int) -> int:
    """argmax of scores + noise over token ids 0 to n - 1, the lowest id of equals; scores [n], float32, no NaN."""
    kernels = _kernels()
    if kernels is None:
        return int(np.argmax(scores + gumbel_reference(seed, position, np.arange(len(scores)))))
    scores = np.ascontiguousarray(scores, dtype=np.float32)
    return int(kernels.autopipe_gumbel_argmax(row_key(seed, position), scores.ctypes.data, len(scores)))


def gumbel_reference(seed: int, position: int, token_ids: npt.NDArray[np.integer[Any]]) -> Float32Array:
    """`gumbel` in numpy: the definition that the kernel must reproduce."""
    key = np.uint64(row_key(seed, position))
    return _gumbel_from_bits(_mix_array(token_ids.astype(np.uint64) * np.uint64(_GAMMA) + key))


def _mix_array(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each element, in place."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(_MIX_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(_MIX_2)
    bits ^= bits >> np.uint64(31)
    return bits


def _gumbel_from_bits(bits: npt.NDArray[np.uint64]) -> Float32Array:
    """-log(-log1p(-v)), v = high 24 bits / 2**24 + (the next 23 bits + 1/2) / 2**47; every float32 step is explicit."""
    high = (bits >> np.uint64(40)).astype(np.float32)
    low = ((bits >> np.uint64(17)) & np.uint64(0x7FFFFF)).astype(np.float32)
    v = high * _F(2**-24) + (low * _F(2) + _F(1)) * _F(2**-48)
    v = np.minimum(v, _LARGEST_BELOW_1)
    exponent, fraction = _split(_F(1) - v)
    fraction = np.where(exponent == 0, -v, fraction)  # 1 - v is rounded, -v is not
    exponential = -(exponent * _LN_2 + _log1p(fraction))
    exponent, fraction = _split(exponential)
    return np.asarray(-(exponent * _LN_2 + _log1p(fraction)), dtype=np.float32)


def _split(x: Float32Array) -> tuple[Float32Array, Float32Array]:
    """(e, f) with x = 2**e * (1 + f) and 1 + f in [sqrt(1/2), sqrt(2))."""
    bits = x.view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    mantissa = (bits - (exponent << np.int32(23))).view(np.float32)
    return exponent.astype(np.float32), mantissa - _F(1)


def _log1p(f: Float32Array) -> Float32Array:
    """log(1 + f) = 2 atanh(f / (2 + f)) by its series; |f| < 0.415, relative error below 2e-7."""
    s = f / (_F(2) + f)
    z = s * s
    series = np.full_like(z, _ATANH_SERIES[0])
    for coefficient in _ATANH_SERIES[1:]:
        series = series * z + coefficient
    s = s + s
    return np.asarray(s + s * (z * series), dtype=np.float32)


@functools.cache
def _kernels() -> ctypes.CDLL | None:
    """The C++ kernels, or None where they are missing or do not reproduce numpy on this machine."""
    loaded = library()
    if loaded is None or not hasattr(loaded, "autopipe_gumbel"):
        logger.warning("sampling noise comes from numpy (2 ms instead of 0.1 for 49k tokens): no compiled kernel")
        return None
    loaded.autopipe_gumbel.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    loaded.autopipe_gumbel.restype = None
    loaded.autopipe_gumbel_argmax.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64]
    loaded.autopipe_gumbel_argmax.restype = ctypes.c_int64
    ids = np.arange(4099)
    out = np.empty(len(ids), dtype=np.float32)
    loaded.autopipe_gumbel(row_key(1, 2), ids.ctypes.data, len(ids), out.ctypes.data)
    if not np.array_equal(out, gumbel_reference(1, 2, ids)):
        logger.warning("sampling noise comes from numpy: the compiled kernel gives other bits on this machine")
        return None
    return loaded
