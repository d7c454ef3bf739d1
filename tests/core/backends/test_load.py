"""From a plan's stage to its backend: choice, reasons, refusals."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from autopipe.core.backends.emulated import EmulatedBackend
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.load import check_stage, load_backend
from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from autopipe.core.models import DEFAULT_MODEL
from autopipe.core.plan import BackendName, StagePlan
from tests.tiny import EOS_ID, VOCAB_SIZE, save_tiny, tiny_config


def stage(**options: object) -> StagePlan:
    return StagePlan.parse({"device": "cpu", **options})


def test_info_tells_what_is_known_before_loading(tiny_bf16_folder: Path) -> None:
    info = check_stage(stage(model=str(tiny_bf16_folder)), "chain.0.model")
    assert (info.vocab_size, info.max_length, info.eos_token_ids) == (VOCAB_SIZE, 512, (EOS_ID,))
    assert (info.backend, info.dtype, info.device) == (BackendName.FUSED, "torch.bfloat16", "cpu")
    assert "llama fits" in info.reason


def test_auto_takes_transformers_where_fused_cannot_and_says_why(tmp_path: Path) -> None:
    info = check_stage(stage(model=str(save_tiny(tmp_path, "gpt2"))))
    assert info.backend is BackendName.TRANSFORMERS
    assert "gpt2" in info.reason


def test_a_fallback_is_logged_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = load_backend(stage(model=str(save_tiny(tmp_path, "gpt2"))))
    assert isinstance(backend, TransformersBackend)
    assert "gpt2" in backend.choice_reason
    assert backend.choice_reason in caplog.text


def test_fp16_on_a_cpu_takes_transformers(tiny_folder: Path) -> None:
    info = check_stage(stage(model=str(tiny_folder), dtype="fp16"))
    assert (info.backend, info.dtype) == (BackendName.TRANSFORMERS, "torch.float16")


def test_asking_for_fused_where_it_cannot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"chain.1.model.*fused.*gpt2"):
        check_stage(stage(model=str(save_tiny(tmp_path, "gpt2")), backend="fused"), "chain.1.model")


def test_a_recurrent_model_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="running state"):
        check_stage(stage(model=str(save_tiny(tmp_path, "mamba"))))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        check_stage(stage(model=str(tmp_path)))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"chain.0.model.*no model.safetensors"):
        check_stage(stage(model=str(tmp_path)), "chain.0.model")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_names_the_key(tiny_folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"chain.0.device: '{device}'"):
        check_stage(stage(model=str(tiny_folder), device=device), "chain.0.model")


def test_an_adapter_that_is_not_there_names_the_key(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"chain.0.adapter: '/nowhere'"):
        check_stage(stage(model=str(tiny_folder), adapter="/nowhere"), "chain.0.model")


def test_an_ngram_is_not_loaded() -> None:
    with pytest.raises(ConfigError, match="ngram"):
        load_backend(StagePlan(model="ngram"))


def test_an_emulated_stage_needs_no_model() -> None:
    plan = StagePlan.parse({"model": "emulated", "emulated": {"ms": {1: 0}, "vocab_size": 64}})
    assert check_stage(plan).vocab_size == 64
    assert isinstance(load_backend(plan), EmulatedBackend)


def test_fused_and_transformers_agree_in_fp32(tiny_folder: Path) -> None:
    backends = [load_backend(stage(model=str(tiny_folder), backend=name)) for name in ("fused", "transformers")]
    assert isinstance(backends[0], FusedBackend)
    ids = list(range(30))
    first, second = (backend.forward(ids) for backend in backends)
    torch.testing.assert_close(first, second, atol=2e-3, rtol=1e-3)


def test_a_backend_is_called_as_the_stage(tiny_folder: Path) -> None:
    backend = load_backend(stage(model=str(tiny_folder), name="small", backend="transformers"))
    assert backend.name == "small"


def test_exact_false_is_passed_on(tiny_folder: Path) -> None:
    assert not load_backend(stage(model=str(tiny_folder), backend="transformers"), exact=False).exact


@pytest.mark.real_model
def test_the_default_model_runs_fused_in_bf16() -> None:
    info = check_stage(stage(model=DEFAULT_MODEL))
    assert (info.backend, info.dtype, info.eos_token_ids) == (BackendName.FUSED, "torch.bfloat16", (2,))
