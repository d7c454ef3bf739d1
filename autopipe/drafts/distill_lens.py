"""A good head to start from: the target's, after a linear map from the kept layers' output to the target's last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopipe.core.backends.fused_config import shape_of
from autopipe.core.backends.fused_weights import DecoderTensors
from autopipe.drafts.distill_blocks import Block, hidden_states, rms_norm
from autopipe.drafts.distill_data import grouped
from autopipe.drafts.distill_student import Student
from autopipe.drafts.store import Answer

_TOKENS = 20_000
_RIDGE = 1e-3


@torch.no_grad()
def lens_head(student: Student, config: Any, state: Mapping[str, torch.Tensor], answers: Sequence[Answer]) -> None:
    """Replace the student's trained head W by W M, where M maps its normalised hidden states to the target's.

    M is fitted by least squares, with a small ridge, on the first 20,000 tokens of the answers (the "tuned lens" of
    arXiv 2303.08112, without its bias, fitted in closed form).
    """
    shape = shape_of(config)
    teacher, final_norm = teacher_blocks(config, state)
    weights = student.step_weights()
    size = shape.hidden
    inputs, products = torch.zeros(size, size), torch.zeros(size, size)
    seen = 0
    for group in grouped(answers, 2048):
        ids = torch.cat([torch.from_numpy(answer.token_ids.astype("int64")) for answer in group])
        lengths = tuple(len(answer.token_ids) for answer in group)
        own = weights.hidden(ids, lengths, torch.arange(len(ids)))
        theirs = hidden_states(shape, teacher, student.embed(ids), lengths)
        theirs = rms_norm(theirs, final_norm, shape.norm_epsilon)
        inputs += own.t() @ own
        products += own.t() @ theirs
        seen += len(ids)
        if seen >= _TOKENS:
            break
    ridge = _RIDGE * inputs.diagonal().mean() * torch.eye(size)
    mapped = torch.linalg.solve(inputs + ridge, products)  # theirs ~ own @ mapped
    for head in student.parameters().head:
        head.copy_(head @ mapped.t())


def teacher_blocks(config: Any, state: Mapping[str, torch.Tensor]) -> tuple[list[Block], torch.Tensor]:
    """The whole target's layers and final norm in fp32."""
    tensors = DecoderTensors(shape_of(config), state, torch.float32)
    blocks = []
    for index in range(shape_of(config).num_layers):
        layer = tensors.layer(index)
        blocks.append(
            Block(
                qkv=torch.cat((layer.q, layer.k, layer.v)),
                output=layer.output,
                gate_up=torch.cat((layer.gate, layer.up)),
                down=layer.down,
                input_norm=layer.input_norm,
                mlp_norm=layer.mlp_norm,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                qkv_bias=None if layer.qkv_bias is None else torch.cat(layer.qkv_bias),
            )
        )
    return blocks, tensors.final_norm()
