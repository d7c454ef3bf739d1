"""How long a forward takes where it was not measured: a roofline, by memory bandwidth, arithmetic and launches.

A forward of few tokens reads every weight once and multiplies it once per token, so it takes the longer of
weights / bandwidth and 2 x weights x tokens / (operations a second) (Williams et al., CACM 52(4), 2009). Peaks are not
reached: `MEMORY_SHARE` and `COMPUTE_SHARE` say how much of them. On a GPU, a layer also costs launches: little with
CUDA graphs (the `fused` backend), 0.7 ms without: the PipeSpec authors' published runs took 11.4 ms for 16 layers and
22.5 ms for 32, whatever the layers' size. Launches overlap with computing, so the slower of the two counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.core.placement.hardware import Curve, Device, Hardware, LinkSpec
from autopipe.core.placement.memory import head_bytes, kv_bytes_per_token, layer_bytes
from autopipe.core.placement.sizes import ModelSizes, published_name
from autopipe.core.plan import FEWER_BITS, BackendName, Dtype

MEMORY_SHARE = 0.8
COMPUTE_SHARE = 0.5
EAGER_LAYER_S = 0.7e-3
GRAPH_LAYER_S = 15e-6
CPU_LAYER_S = 20e-6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_UNPACK_SHARE = 0.35
"""Of bandwidth reached while 4-bit weights are unpacked, and of arithmetic: each number costs several instructions."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a stage on one device. The first part has the embedding; for the head see `head_index`."""

    device: Device
    num_layers: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of a forward by its number of tokens. `estimated`: by the roofline, not measured; `source` says."""

    seconds: dict[int, float]
    estimated: bool
    source: str
    interpolate: bool = True

    def of(self, num_tokens: int) -> float:
        """Seconds of a forward of so many tokens: of the largest point not above it."""
        below = [tokens for tokens in self.seconds if tokens <= num_tokens] or [min(self.seconds)]
        return self.seconds[max(below)]


def stage_latency(
    sizes: ModelSizes,
    dtype: Dtype,
    backend: BackendName,
    parts: Sequence[Part],
    hardware: Hardware,
    *,
    context: int,
) -> Latency:
    """The published or profiled curve of a stage if the hardware has one for it, else the roofline."""
    curve = find_curve(hardware.curves, sizes.name, dtype)
    if curve is not None:
        return Latency({n: ms / 1e3 for n, ms in curve.ms.items()}, False, curve.source, curve.interpolate)
    # What the fused backend cannot do (several devices, quantised weights on a GPU) runs without graphs.
    graphs = backend is not BackendName.TRANSFORMERS and len(parts) == 1 and dtype not in FEWER_BITS
    head = parts[head_index(sizes, len(parts))]
    hops = len(parts) - 1 + (head is not parts[-1])
    seconds = {
        rows: sum(part_seconds(sizes, dtype, part, rows, context, graphs, part is head) for part in parts)
        + hops * hop_seconds(hardware.link, sizes, rows)
        for rows in ROWS
    }
    return Latency(seconds, True, "estimated from memory bandwidth and arithmetic")


def head_index(sizes: ModelSizes, num_parts: int) -> int:
    """The part that has the output head: the last one, or the embedding's where both are one matrix."""
    return 0 if sizes.tied else num_parts - 1


def find_curve(curves: Sequence[Curve], model: str, dtype: Dtype) -> Curve | None:
    """The measured curve of a model in this dtype; one for `auto` serves the 16-bit dtypes."""
    for curve in curves:
        loose = curve.dtype is Dtype.AUTO and dtype in (Dtype.BF16, Dtype.FP16)
        if published_name(curve.model) == published_name(model) and (curve.dtype is dtype or loose):
            return curve
    return None


def part_seconds(
    sizes: ModelSizes, dtype: Dtype, part: Part, rows: int, context: int, graphs: bool, has_head: bool
) -> float:
    """Seconds that a part of a stage takes for `rows` tokens behind `context` tokens in the cache."""
    spec = part.device.spec
    head = head_bytes(sizes, dtype, on_cpu=spec.is_cpu) if has_head else 0
    read = part.num_layers * layer_bytes(sizes, dtype, on_cpu=spec.is_cpu) + head
    read += context * kv_bytes_per_token(sizes, dtype, part.num_layers)
    numbers = part.num_layers * sizes.matrix_parameters_per_layer + (sizes.embedding_parameters if has_head else 0)
    share = _UNPACK_SHARE if dtype is Dtype.INT4 and not spec.is_cpu else 1.0
    memory_s = read / (share * MEMORY_SHARE * spec.gb_per_s * 1e9)
    flops = spec.tflops.get(Dtype.BF16) or max(spec.tflops.values())
    compute_s = 2 * numbers * rows / (share * COMPUTE_SHARE * flops * 1e12)
    layer_s = CPU_LAYER_S if spec.is_cpu else GRAPH_LAYER_S if graphs else EAGER_LAYER_S
    return max(memory_s, compute_s, part.num_layers * layer_s)


def hop_seconds(link: LinkSpec, sizes: ModelSizes, rows: int) -> float:
    """Seconds to hand the hidden states of `rows` tokens to the next device."""
    return 1e-6 * link.latency_us + 2 * sizes.hidden * rows / (link.gb_per_s * 1e9)
