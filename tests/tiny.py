"""Tiny causal language models and a tokenizer, built in code: no test needs a download.

Weights are drawn large (standard deviation 0.3), so that logits differ clearly and greedy text does not stand still.
The output head has more rows than the tokenizer has tokens, as padded vocabularies do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

VOCAB_SIZE = 320
TOKENIZER_SIZE = 259
EOS_ID = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": EOS_ID,
    "pad_token_id": 258,
}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_SHAPE},
    "mistral": {**_SHAPE, "sliding_window": None},
    "mistral_sliding": {**_SHAPE, "sliding_window": 16},
    "qwen2": {**_SHAPE},
    "qwen3": {**_SHAPE, "head_dim": 32},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "initializer_range": 0.3,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
    },
    "mamba": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "initializer_range": 0.3,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": 258,
    },
}
KINDS = tuple(_KINDS)


def tiny_config(kind: str = "llama", **overrides: Any) -> PreTrainedConfig:
    """The config of a tiny model of one of `KINDS`; keyword arguments replace its values."""
    return AutoConfig.for_model(kind.partition("_")[0], **{**_KINDS[kind], **overrides})


def tiny_model(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A tiny model with reproducible random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides))
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and kind != "mamba":
                torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype).eval()


def tiny_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict of a model, tied tensors once, as a safetensors file would hold it."""
    tied = set(model.all_tied_weights_keys)
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}


def tiny_tokenizer(*, extra_tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0 to 255 are bytes, then <s>, </s>, <pad>; decodes any text back exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )
    if extra_tokens:
        fast.add_tokens(list(extra_tokens))
    return fast


def save_tiny(
    folder: Path, kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a tiny model and the tokenizer as a Hugging Face folder; return the folder."""
    tiny_model(kind, seed=seed, dtype=dtype, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
