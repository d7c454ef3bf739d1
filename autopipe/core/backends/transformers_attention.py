"""Attention for transformers models whose shapes AutoPipe chooses; transformers knows it as `autopipe`.

It is torch's scaled_dot_product_attention with two changes. Query heads that share a key-value head are laid
side by side as rows, so that no key is copied (transformers repeats them). And the mask is always written out when
a forward is padded, so that the same kernel serves every forward.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "autopipe"
QUERY_ROWS = 8
"""Masked queries are padded to a multiple of this, so that up to as many take the same shape."""


class Block(NamedTuple):
    """Successive queries of a forward that attend by themselves, to the first `keys` keys.

    Attributes:
        member, start: where several sequences are stacked: whose queries they are, and the position of the first.
    """

    queries: int
    keys: int
    member: int = 0
    start: int = 0


class _Scoring(NamedTuple):
    """How scores are made of products: the arguments of `attend` of these names."""

    scaling: float | None
    softcap: float | None
    s_aux: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.s_aux is None


class _Forward(threading.local):
    blocks: Sequence[Block] = ()
    stacked: bool = False
    keys: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


_forward = _Forward()


@contextmanager
def attending_in(blocks: Sequence[Block], *, stacked: bool = False) -> Generator[None]:
    """Let forwards of this thread attend block by block, so that a query's arithmetic is that of its block alone.

    Args:
        stacked: the blocks are of several sequences, whose keys are told by `remember_keys`.
    """
    _forward.blocks, _forward.stacked = blocks, stacked
    try:
        yield
    finally:
        _forward.blocks, _forward.stacked, _forward.keys = (), False, ()


def remember_keys(keys: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Keys and values of each stacked sequence, for the attention that follows."""
    _forward.keys = keys


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of n queries over the cache.

    Args:
        query: [1, heads, n, head_dim].
        key, value: [1, key-value heads, keys, head_dim].
        attention_mask: additive [1, 1, n, keys]; None: plain causal, the last query seeing all keys.
        scaling: of the scores; None: head_dim ** -0.5.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        s_aux: attention sinks, [heads] (gpt-oss).
        position_bias: added to the scores, [1, heads, n, keys].

    Returns:
        [1, n, heads, head_dim], and None for the weights.
    """
    blocks, scoring = _forward.blocks, _Scoring(scaling, softcap, s_aux)
    if not _forward.stacked and (len(blocks) <= 1 or attention_mask is None):
        return _attend(query, key, value, attention_mask, position_bias, scoring), None
    outputs, start = [], 0
    for num_queries, num_keys, member, _ in blocks:
        own, seen = slice(start, start + num_queries), slice(num_keys)
        if _forward.stacked:
            key, value = _forward.keys[member]
        mask = None if attention_mask is None else attention_mask[:, :, own, seen]
        bias = None if position_bias is None else position_bias[:, :, own, seen]
        outputs.append(_attend(query[:, :, own], key[:, :, seen], value[:, :, seen], mask, bias, scoring))
        start += num_queries
    return torch.cat(outputs, dim=1), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    scoring: _Scoring,
) -> torch.Tensor:
    """One block; [1, n, heads, head_dim]."""
    _, heads, num_queries, head_dim = query.shape
    groups, scaling = heads // key.shape[1], scoring.scaling
    if attention_mask is not None and num_queries % QUERY_ROWS:
        padding = (0, 0, 0, -num_queries % QUERY_ROWS)
        if position_bias is not None:
            position_bias = functional.pad(position_bias, padding)
        padded = functional.pad(query, padding), key, value, functional.pad(attention_mask, padding)
        return _attend(*padded, position_bias, scoring)[:, :num_queries]
    if not scoring.is_plain or position_bias is not None:
        return _attend_step_by_step(query, key, value, attention_mask, position_bias, scoring)
    causal = attention_mask is None and num_queries > 1
    if groups > 1 and not causal:
        rows = query.reshape(1, key.shape[1], groups * num_queries, head_dim)
        mask: torch.Tensor | None = None
        if attention_mask is not None:
            num_keys = attention_mask.shape[-1]
            mask = attention_mask[:, :, None].expand(1, 1, groups, num_queries, num_keys)
            mask = mask.reshape(1, 1, groups * num_queries, num_keys)
        output = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
        output = output.reshape(1, heads, num_queries, value.shape[-1])
    else:
        output = functional.scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
    return output.transpose(1, 2).contiguous()


def _attend_step_by_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    scoring: _Scoring,
) -> torch.Tensor:
    """The variants that scaled_dot_product_attention lacks. Softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    num_queries, num_keys = query.shape[2], key.shape[2]
    scaling, softcap, s_aux = scoring
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scale  # [1, heads, n, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    elif num_queries > 1:
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(hidden.triu(1 + num_keys - num_queries), float("-inf"))
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(1, scores.shape[1], num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys].to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def additive_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> torch.Tensor | None:
    """transformers' mask as additive [1, 1, n, keys]; None only where the keys end with the last query.

    Where sequences are stacked, each block's rows are those of its own sequence.
    """
    if _forward.stacked:
        blocks, most = _forward.blocks, max(block.keys for block in _forward.blocks)
        _forward.stacked = False
        rows = [
            additive_mask(batch_size, block.queries, most, block.start, kv_offset, dtype, **kwargs) for block in blocks
        ]
        _forward.stacked = True
        return torch.cat([row for row in rows if row is not None], dim=2)
    ends_together = q_offset + q_length == kv_offset + kv_length
    kwargs["allow_is_causal_skip"] = kwargs.get("allow_is_causal_skip", True) and ends_together
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        dtype=dtype,
        **kwargs,
    )
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, additive_mask)
