"""The fused forward in torch: the fallback on CPUs without native kernels, and the mathematics of the CUDA runner.

Libraries round differently for other shapes. So every operation has a fixed shape: rows are padded to a fixed number,
and keys are met in chunks of fixed size, summed chunk by chunk. A chunk that a row does not see adds exactly 0, so
neither the number of rows nor the length of the cache can change a row's bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from autopipe.core.backends.fused_config import DecoderShape
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.fused_weights import DecoderTensors

EXACT_ROWS = 8
"""Every exact forward computes so many rows, real or padding."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts used when exactness is not asked for."""

PREFILL_ROWS = 64
CHUNK_TOKENS = 128
"""Positions per attention chunk; the cache's capacity is a multiple of it."""

_FIRST_CAPACITY = 1024


class _Layer(NamedTuple):
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


class TorchDecoder:
    """Weights, a cache of fixed capacity and one block of rows as a function of tensors only (so it can be a graph)."""

    def __init__(
        self, shape: DecoderShape, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: str, max_length: int
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._limit = max_length + -max_length % CHUNK_TOKENS
        tensors = DecoderTensors(shape, state, dtype)
        self.layers = [self._load_layer(tensors, index) for index in range(shape.num_layers)]
        self.final_norm = tensors.final_norm().to(device)
        self.embedding = tensors.embedding().to(device)
        self.head = self.embedding if shape.tied else tensors.head().to(device)
        self.capacity = 0
        self.keys: list[torch.Tensor] = []  # per layer [num_kv_heads, capacity + 1, head_dim]
        self.values: list[torch.Tensor] = []
        self.make_room(1)

    def _load_layer(self, tensors: DecoderTensors, index: int) -> _Layer:
        layer, device = tensors.layer(index), self.device
        return _Layer(
            torch.cat((layer.q, layer.k, layer.v)).to(device),
            None if layer.qkv_bias is None else torch.cat(layer.qkv_bias).to(device),
            layer.output.to(device),
            torch.cat((layer.gate, layer.up)).to(device),
            layer.down.to(device),
            layer.input_norm.to(device),
            layer.mlp_norm.to(device),
            None if layer.q_norm is None else layer.q_norm.to(device),
            None if layer.k_norm is None else layer.k_norm.to(device),
        )

    @property
    def weight_bytes(self) -> int:
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return sum(matrix.nbytes for matrix in (*matrices, self.head))

    def make_room(self, length: int) -> bool:
        """Grow the cache (by doubling) to hold `length` tokens; whether its tensors were replaced."""
        if length <= self.capacity:
            return False
        capacity = max(self.capacity, _FIRST_CAPACITY)
        while capacity < length:
            capacity *= 2
        capacity = min(capacity, self._limit)
        s = self.shape
        for kind in (self.keys, self.values):
            old = list(kind)
            kind.clear()
            for index in range(s.num_layers):
                # The extra slot takes what padding rows write.
                new = torch.zeros(s.num_kv_heads, capacity + 1, s.head_dim, dtype=self.dtype, device=self.device)
                if old:
                    new[:, : self.capacity] = old[index][:, : self.capacity]
                kind.append(new)
        self.capacity = capacity
        cos, sin = s.rope_tables(capacity)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)
        return True

    def block(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: int) -> torch.Tensor:
        """One block of rows through all layers: ids, positions, slots are int64 [rows]; fp32 [rows, hidden] back.

        Keys and values go to `slots` (`capacity` for padding rows); rows see positions up to their own among the
        first `chunks` chunks.
        """
        s, rows = self.shape, ids.shape[0]
        queries, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        residual = F.embedding(ids, self.embedding).float()
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [rows, 1, head_dim / 2]
        for index, layer in enumerate(self.layers):
            x = _rms_norm(residual, layer.input_norm, s.norm_epsilon)
            qkv = self._product(x, layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            q, k, v = torch.split(qkv, [queries, kv, kv], dim=-1)
            q = self._rotate(q.view(rows, s.num_heads, s.head_dim), layer.q_norm, cos, sin)
            k = self._rotate(k.view(rows, s.num_kv_heads, s.head_dim), layer.k_norm, cos, sin)
            v = v.view(rows, s.num_kv_heads, s.head_dim)
            self.keys[index].index_copy_(1, slots, k.transpose(0, 1).to(self.dtype))
            self.values[index].index_copy_(1, slots, v.transpose(0, 1).to(self.dtype))
            attended = self._attend(q, index, positions, chunks)
            residual = residual + self._product(attended, layer.output)
            gate, up = self._product(_rms_norm(residual, layer.mlp_norm, s.norm_epsilon), layer.gate_up).chunk(2, -1)
            residual = residual + self._product(F.silu(gate) * up, layer.down)
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab] of what `block` returned."""
        return self._product(_rms_norm(hidden, self.final_norm, self.shape.norm_epsilon), self.head)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.dtype), weight).float()

    def _rotate(self, x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if norm is not None:
            x = _rms_norm(x, norm, self.shape.norm_epsilon)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attend(self, q: torch.Tensor, layer: int, positions: torch.Tensor, chunks: int) -> torch.Tensor:
        """q [rows, heads, head_dim] over the cache; fp32 [rows, heads * head_dim]."""
        s, rows = self.shape, q.shape[0]
        group = s.num_heads // s.num_kv_heads
        # [kv_heads, group * rows, head_dim]
        q = (q * s.attention_scale).view(rows, s.num_kv_heads, group, s.head_dim).permute(1, 2, 0, 3)
        q = q.reshape(s.num_kv_heads, group * rows, s.head_dim)
        limits = positions.repeat(group)[None, :, None]
        scores = []
        for chunk in range(chunks):
            begin = chunk * CHUNK_TOKENS
            keys = self.keys[layer][:, begin : begin + CHUNK_TOKENS].float()
            hidden = torch.arange(begin, begin + CHUNK_TOKENS, device=self.device) > limits
            scores.append(torch.bmm(q, keys.transpose(1, 2)).masked_fill(hidden, -torch.inf))
        top = scores[0].amax(-1, keepdim=True)
        for chunk_scores in scores[1:]:
            top = torch.maximum(top, chunk_scores.amax(-1, keepdim=True))
        total = torch.zeros_like(top)
        out = torch.zeros_like(q)
        for chunk, chunk_scores in enumerate(scores):
            begin = chunk * CHUNK_TOKENS
            weights = torch.exp(chunk_scores - top)
            total = total + weights.sum(-1, keepdim=True)
            out = out + torch.bmm(weights, self.values[layer][:, begin : begin + CHUNK_TOKENS].float())
        out = (out / total).view(s.num_kv_heads, group, rows, s.head_dim).permute(2, 0, 1, 3)
        return out.reshape(rows, s.num_heads * s.head_dim)


class PaddedRunner(Runner):
    """Cuts calls into padded blocks of fixed row counts."""

    def __init__(self, decoder: TorchDecoder, exact: bool) -> None:
        self.exact = exact
        self.decoder = decoder
        self.weight_bytes = decoder.weight_bytes
        self.kv_bytes_per_token = decoder.shape.kv_numbers_per_token * decoder.dtype.itemsize

    def bucket(self, rows: int) -> int:
        """Rows computed for a block of `rows` of a forward (prefill pads to PREFILL_ROWS)."""
        if self.exact:
            return EXACT_ROWS
        return next((size for size in ROW_BUCKETS if size >= rows), ROW_BUCKETS[-1])

    @torch.inference_mode()
    def run(self, ids: Sequence[int], position: int, num_logits: int) -> torch.Tensor:
        prefill = num_logits < len(ids)
        self.make_room(position + len(ids))
        blocks = []
        done = 0
        while done < len(ids):
            size = PREFILL_ROWS if prefill else self.bucket(len(ids) - done)
            part = ids[done : done + size]
            start = position + done
            done += len(part)
            padding = size - len(part)
            block_ids = self._staged([*part, *[0] * padding])
            positions = self._staged([*range(start, start + len(part)), *[0] * padding])
            slots = positions.clone()
            slots[len(part) :] = self.decoder.capacity
            chunks = -(-(start + len(part)) // CHUNK_TOKENS)
            wanted = max(0, num_logits - (len(ids) - done))  # of this block's rows, its last ones
            if prefill:
                hidden = self.compute_hidden(block_ids, positions, slots, chunks)
                if wanted:
                    blocks.append(self.decoder.logits(hidden[len(part) - wanted : len(part)]).cpu())
            else:
                blocks.append(self.compute_logits(block_ids, positions, slots, chunks)[: len(part)].cpu())
        return torch.cat(blocks)

    def make_room(self, length: int) -> None:
        self.decoder.make_room(length)

    def _staged(self, numbers: list[int]) -> torch.Tensor:
        """Numbers on the host, page-locked where the device is a GPU, which then copies them by itself."""
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=str(self.decoder.device).startswith("cuda"))

    def compute_hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        device = self.decoder.device
        return self.decoder.block(
            ids.to(device, non_blocking=True),
            positions.to(device, non_blocking=True),
            slots.to(device),
            chunks,
        )

    def compute_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        """Logits of a padded block of a forward, fp32 [rows, vocab] on the device."""
        return self.decoder.logits(self.compute_hidden(ids, positions, slots, chunks))

    def close(self) -> None:
        self.decoder.layers.clear()
        self.decoder.keys.clear()
        self.decoder.values.clear()
        del self.decoder


class TorchRunner(PaddedRunner):
    """On the CPU. The number of threads is torch's, for the whole process."""

    def __init__(
        self,
        shape: DecoderShape,
        state: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        threads: int | None,
        max_length: int,
        exact: bool,
    ) -> None:
        super().__init__(TorchDecoder(shape, state, dtype, "cpu", max_length), exact)
        if threads is not None:
            self.set_threads(threads)

    @property
    def description(self) -> str:
        return "torch, padded fixed shapes" if self.exact else "torch, row buckets"

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
