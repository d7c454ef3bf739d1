"""The drafter in training: PEFT's parameters on the truncated base, and a fast forward over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from autopipe.core.backends.fused_config import DecoderShape, reason_unfit, shape_of
from autopipe.core.errors import AutoPipeError, ModelLoadError, UnsupportedModelError
from autopipe.core.models.shared_base import MODULES, truncated_base
from autopipe.drafts.distill_blocks import Block, hidden_states, rms_norm

_NORMS = ("model.norm", "input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class StudentParameters:
    """Trainable parameters by what they are, for the optimizer."""

    down: list[torch.nn.Parameter]
    """LoRA's A, [rank, inputs]."""
    up: list[torch.nn.Parameter]
    """LoRA's B, [outputs, rank], zero at the start."""
    head: list[torch.nn.Parameter]
    """The output head in full, or nothing where it is adapted by LoRA too."""
    norms: list[torch.nn.Parameter]


class Student:
    """Layers of the target with LoRA (arXiv 2106.09685) on all their matrices, trained norms and a trimmed head.

    A step computes W + scale * B A once (`StepWeights`) and uses it for all its batches, so that the rank costs
    nothing per token.

    Args:
        config, state: of the target.
        layers: layers of the target to keep, in this order.
        head_ids: token id of every row of the output head, int64 [head].
        rank, alpha: of LoRA; scale is alpha / rank.
        train_head: train the head's rows in full; else LoRA adapts them like the other matrices.
        seed: of LoRA's A.

    Raises:
        UnsupportedModelError: the target is not of the family the `fused` backend runs.
        AutoPipeError: peft is not installed.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, torch.Tensor],
        *,
        layers: Sequence[int],
        head_ids: torch.Tensor,
        rank: int,
        alpha: float,
        train_head: bool = True,
        seed: int = 0,
        base_name: str = "",
    ) -> None:
        reason = reason_unfit(config)
        if reason is not None:
            raise UnsupportedModelError(f"drafters of this target cannot be distilled: {reason}")
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise AutoPipeError("distilling needs peft: pip install 'autopipe-llm[drafts]'") from None

        self.layers, self.head_ids, self._train_head = tuple(layers), head_ids, train_head
        base = truncated_base(config, state, layers, head_ids)
        base.name_or_path = base_name  # PEFT writes it into the adapter's config
        self.shape: DecoderShape = shape_of(base.config)
        matrices = [matrix for names in MODULES.values() for matrix in names]
        lora = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            target_modules=matrices if train_head else [*matrices, "lm_head"],
            modules_to_save=[*_NORMS, "lm_head"] if train_head else list(_NORMS),
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.peft: Any = get_peft_model(base, lora)
        self.peft.eval()
        self._model = self.peft.get_base_model()
        self._embedding: torch.Tensor = self._model.model.embed_tokens.weight

    def parameters(self) -> StudentParameters:
        named = dict(self.named_parameters())
        norms = [parameter for name, parameter in named.items() if ".modules_to_save." in name and "norm." in name]
        return StudentParameters(
            down=[parameter for name, parameter in named.items() if ".lora_A." in name],
            up=[parameter for name, parameter in named.items() if ".lora_B." in name],
            head=[parameter for name, parameter in named.items() if "lm_head.modules_to_save." in name],
            norms=norms,
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trainable parameters by PEFT's names, in a fixed order."""
        return ((name, p) for name, p in self.peft.named_parameters() if p.requires_grad)

    def blocks(self) -> list[Block]:
        """The adapted layers; gradients flow to the parameters."""
        return [_block(layer) for layer in self._model.model.layers]

    def head(self) -> torch.Tensor:
        """The adapted output head, [head, hidden]."""
        head = self._model.lm_head
        return _saved_weight(head) if self._train_head else _merged(head)

    def final_norm(self) -> torch.Tensor:
        return _saved_weight(self._model.model.norm)

    def step_weights(self) -> StepWeights:
        return StepWeights(self)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._embedding)

    def load(self, folder: Path) -> None:
        """Take over the parameters of an adapter that `save` wrote.

        Raises:
            ModelLoadError: it has not just these parameters.
        """
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        tensors = load_file(folder / "adapter_model.safetensors")
        own = {name.replace(".default", "").replace(".modules_to_save", "") for name, _ in self.named_parameters()}
        if own != tensors.keys():
            different = ", ".join(sorted(own ^ tensors.keys())[:3])
            raise ModelLoadError(f"{folder}: its adapter has other tensors than this drafter: {different}")
        set_peft_model_state_dict(self.peft, tensors)

    def save(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors, in bf16, as PEFT does."""
        tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in self.named_parameters()}
        self.peft.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty form for a model card


class StepWeights:
    """The adapted weights of one step, cut off from the parameters until `backward` carries the gradients over."""

    def __init__(self, student: Student) -> None:
        self._student = student
        self._leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._blocks = [self._cut_block(block) for block in student.blocks()]
        self.head = self._cut(student.head())
        self._norm = self._cut(student.final_norm())

    def _cut_block(self, block: Block) -> Block:
        cut: dict[str, Any] = {name: t if t is None else self._cut(t) for name, t in vars(block).items()}
        return Block(**cut)

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self._leaves.append((tensor, leaf))
        return leaf

    def hidden(self, ids: torch.Tensor, lengths: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
        """Normalised hidden states of some rows, fp32 [len(rows), hidden], ready for the head.

        Args:
            ids: token ids of all sequences, one after another, int64 [n].
            lengths: tokens of each sequence.
            rows: which of the n are wanted, int64.
        """
        shape = self._student.shape
        x = hidden_states(shape, self._blocks, self._student.embed(ids), lengths)[rows]
        return rms_norm(x, self._norm, shape.norm_epsilon)

    def backward(self, divisor: float) -> None:
        """Give the parameters their gradients: those of the leaves, divided, through W + scale * B A."""
        pairs = [(tensor, leaf.grad / divisor) for tensor, leaf in self._leaves if leaf.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [projection.base_layer.bias for projection in projections]
    return Block(
        qkv=torch.cat([_merged(projection) for projection in projections]),
        output=_merged(attention.o_proj),
        gate_up=torch.cat([_merged(mlp.gate_proj), _merged(mlp.up_proj)]),
        down=_merged(mlp.down_proj),
        input_norm=_saved_weight(layer.input_layernorm),
        mlp_norm=_saved_weight(layer.post_attention_layernorm),
        q_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        qkv_bias=None if biases[0] is None else torch.cat(biases).detach(),
    )


def _merged(linear: Any) -> torch.Tensor:
    """W + scale * B A of one of PEFT's LoRA layers."""
    base: torch.Tensor = linear.base_layer.weight
    up, down = linear.lora_B["default"].weight, linear.lora_A["default"].weight
    return torch.addmm(base.detach(), up, down, alpha=linear.scaling["default"])


def _saved_weight(module: Any) -> torch.Tensor:
    """The trained weight of a module that PEFT saves in full."""
    weight: torch.Tensor = module.modules_to_save["default"].weight
    return weight
