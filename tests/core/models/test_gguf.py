"""GGUF files become Hugging Face folders in the cache, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from autopipe.core.errors import ModelLoadError
from autopipe.core.models import eos_token_ids, load_config, load_state, load_tokenizer, local_folder, resolve
from autopipe.core.models.gguf import converted_folder, is_converted
from tests.tiny import CHAT_TEMPLATE, tiny_config, tiny_model, tiny_state, tiny_tokenizer

gguf = pytest.importorskip("gguf")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, kind: str = "F32") -> None:
    """The tiny Llama as a GGUF file, matrices in F32 or Q8_0."""
    config, state, tokenizer = tiny_config(), tiny_state(tiny_model()), tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))]
    tokens += ["ab", *(f"<unused{index}>" for index in range(config.vocab_size - len(tokens) - 1))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index >= 256 else 1 for index in range(len(tokens))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in state.items():
        short = name.removesuffix(".weight")
        if short.startswith("model.layers."):
            _, _, index, part = short.split(".", 3)
            short = f"blk.{index}.{_NAMES[part]}"
        else:
            short = _NAMES[short]
        values = interleaved(name, tensor).numpy().astype(np.float32)
        if kind == "Q8_0" and values.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{short}.weight", gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{short}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """GGUF's Llama pairs neighbouring rows for rotation where transformers pairs the two halves of a head."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_weights_survive_the_conversion(file: Path, empty_cache: Path) -> None:
    state, expected = load_state(resolve(str(file))), tiny_state(tiny_model())
    assert state.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], msg=name)


def test_quantised_weights_become_bf16(tmp_path: Path, empty_cache: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    state = load_state(resolve(str(tmp_path / "tiny.gguf")))
    expected = tiny_state(tiny_model())
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    for name in expected:
        torch.testing.assert_close(state[name].float(), expected[name], atol=0.02, rtol=0.02, msg=name)


def test_the_tokenizers_eos_and_template_come_along(file: Path, empty_cache: Path) -> None:
    source = resolve(str(file))
    assert eos_token_ids(source) == (258,)
    tokenizer = load_tokenizer(source)
    assert (tokenizer.eos_token_id, tokenizer.chat_template) == (258, CHAT_TEMPLATE)
    assert load_config(source).eos_token_id == 258


def test_conversion_is_announced_and_done_once(file: Path, empty_cache: Path) -> None:
    messages: list[str] = []
    assert not is_converted(file)
    folders = {local_folder(resolve(str(file)), progress=messages.append) for _ in range(2)}
    assert is_converted(file)
    assert len(folders) == 1
    assert len(messages) == 1
    assert "converting tiny.gguf" in messages[0]


def test_another_file_of_that_name_is_converted_anew(file: Path, empty_cache: Path) -> None:
    first = converted_folder(file)
    write_gguf(file, "Q8_0")
    assert converted_folder(file) != first


def test_a_file_that_is_not_gguf_is_an_error_and_leaves_nothing(tmp_path: Path, empty_cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all" * 100)
    with pytest.raises(ModelLoadError, match=r"bad\.gguf cannot be read"):
        converted_folder(tmp_path / "bad.gguf")
    assert not [path for path in (empty_cache / "models").iterdir() if path.is_dir()]
