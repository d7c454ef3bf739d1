"""TransformersBackend: the contract on several architectures, exactness, refusals, adapters."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autopipe.core.backends.conformance import CHECKS, Subject
from autopipe.core.backends.transformers import Layout, TransformersBackend
from autopipe.core.backends.transformers_cache import unfit_reason
from autopipe.core.backends.transformers_layout import KEY_BLOCK
from autopipe.core.errors import UnsupportedModelError
from autopipe.core.kernels import has_kernels
from autopipe.core.models import DEFAULT_MODEL
from autopipe.core.plan import Dtype
from tests.tiny import tiny_config, tiny_model

ARCHITECTURES = ("llama", "mistral_sliding", "qwen2", "qwen3", "gpt2")


def reference_of(model: Any) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits of a whole sequence by the model itself, without a cache, with transformers' own attention."""
    model.set_attn_implementation("sdpa")

    def logits(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    return logits


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("kernels", [True, False])
def test_meets_the_contract(kernels: bool, kind: str, check: str) -> None:
    backend = TransformersBackend(own(tiny_model(kind)), kernels=kernels)
    assert backend.layout is (Layout.ROWS if kernels and has_kernels() else Layout.PADDED)
    CHECKS[check](Subject(lambda: backend, reference_of(tiny_model(kind)), tolerance=2e-3))


@pytest.mark.parametrize("check", CHECKS)
def test_meets_the_contract_when_not_exact(check: str) -> None:
    backend = TransformersBackend(own(tiny_model()), exact=False, check=False)
    CHECKS[check](Subject(lambda: backend, reference_of(tiny_model()), tolerance=2e-3))


@pytest.mark.parametrize("check", CHECKS)
def test_meets_the_contract_one_token_at_a_time(check: str) -> None:
    backend = TransformersBackend(own(tiny_model()), check=False)
    backend.layout = Layout.SINGLE
    CHECKS[check](Subject(lambda: backend, reference_of(tiny_model()), tolerance=2e-3))


@pytest.mark.parametrize("check", CHECKS)
def test_meets_the_contract_in_a_context_of_twenty_tokens(check: str) -> None:
    backend = TransformersBackend(own(tiny_model("gpt2", n_positions=20)))
    CHECKS[check](Subject(lambda: backend, reference_of(tiny_model("gpt2", n_positions=20)), tolerance=2e-3))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mistral_sliding"])
def test_is_exact_across_blocks_of_keys(kind: str, dtype: torch.dtype, kernels: bool) -> None:
    backend = TransformersBackend(own(tiny_model(kind, dtype=dtype)), kernels=kernels)
    ids = [(31 * index) % backend.vocab_size for index in range(2 * KEY_BLOCK + 20)]
    backend.prefill(ids[:5])
    alone = torch.cat([backend.forward([token]) for token in ids[5:]])
    for sizes in ([len(ids) - 5], [3, 70, 20, 40, 9, 100]):
        backend.reset()
        backend.prefill(ids[:5])
        starts = [5 + sum(sizes[:index]) for index in range(len(sizes))]
        parts = [backend.forward(ids[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        assert torch.equal(torch.cat(parts), alone[: sum(sizes)])


@pytest.mark.skipif(not has_kernels(), reason="for the layout on our kernels")
def test_tokens_of_several_blocks_take_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TransformersBackend(own(tiny_model()))
    backend.prefill(list(range(KEY_BLOCK - 4)))
    original, widths = backend.model.forward, list[int]()

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        widths.append(input_ids.shape[1])
        return original(input_ids, **options)

    monkeypatch.setattr(backend.model, "forward", forward)
    backend.forward(list(range(20)))
    assert widths == [20]


@pytest.mark.parametrize("kernels", [True, False])
def test_is_exact_where_a_model_changes_to_its_long_rotary_factors(kernels: bool) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 70,
    }
    model = tiny_model(
        max_position_embeddings=300, original_max_position_embeddings=70, rope_parameters=rope, head_dim=16
    )
    backend = TransformersBackend(own(model), kernels=kernels)
    ids = [(31 * index) % backend.vocab_size for index in range(100)]
    backend.prefill(ids[:40])
    alone = torch.cat([backend.forward([token]) for token in ids[40:]])
    backend.rollback(40)
    assert torch.equal(backend.forward(ids[40:]), alone)
    backend.rollback(62)
    assert torch.equal(backend.forward(ids[62:75]), alone[22:35])


@pytest.mark.skipif(not has_kernels(), reason="without our kernels, results depend on torch's threads")
def test_results_do_not_depend_on_threads() -> None:
    backend = TransformersBackend(own(tiny_model()), threads=1)
    rows = []
    for threads in (1, 2, 3):
        backend.set_threads(threads)
        backend.reset()
        rows.append(torch.cat([backend.prefill(list(range(40)))[None], backend.forward(list(range(50)))]))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_more_rows_than_the_attention_pads_to_are_exact() -> None:
    backend = TransformersBackend(own(tiny_model(dtype=torch.bfloat16)), rows=20, kernels=False)
    ids = [(31 * index) % backend.vocab_size for index in range(150)]
    alone = torch.cat([backend.forward([token]) for token in ids])
    backend.reset()
    assert torch.equal(backend.forward(ids), alone)


def test_attention_of_the_stepwise_kind_is_exact_and_right() -> None:
    options = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 16,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **options)).eval()
    model.set_attn_implementation("eager")
    ids = list(range(60))
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    backend = TransformersBackend(own(model))
    backend.prefill(ids[:5])
    alone = torch.cat([backend.forward([token]) for token in ids[5:]])
    torch.testing.assert_close(alone, expected[5:], atol=2e-3, rtol=1e-3)
    backend.rollback(5)
    assert torch.equal(backend.forward(ids[5:]), alone)


def test_slides_its_window_after_a_rollback_past_it() -> None:
    model = own(tiny_model("mistral_sliding"))
    backend = TransformersBackend(model)
    reference = reference_of(tiny_model("mistral_sliding"))
    ids = list(range(60))
    backend.prefill(ids)
    backend.rollback(25)
    torch.testing.assert_close(backend.forward(ids[25:]), reference(ids)[25:], atol=2e-3, rtol=0)


def test_greedy_text_is_that_of_generate() -> None:
    backend = TransformersBackend(own(tiny_model()))
    prompt = [1, 2, 3, 4, 5]
    expected = tiny_model().generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    ids = [int(backend.prefill(prompt).argmax())]
    while len(ids) < 40:
        ids.append(int(backend.forward(ids[-1:])[0].argmax()))
    assert ids == expected[0, 5:].tolist()


def test_returned_logits_may_be_changed_in_place() -> None:
    backend = TransformersBackend(own(tiny_model()))
    backend.prefill([1, 2]).add_(1)
    backend.forward([3]).mul_(2)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("mamba", {}),
        ("recurrent_gemma", {"num_hidden_layers": 3}),
        ("qwen3_next", {"num_hidden_layers": 4}),
    ],
)
def test_recurrent_state_is_refused_with_the_reason(model_type: str, options: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **options)
    assert unfit_reason(config) is not None or model_class(config)._is_stateful


def test_a_recurrent_model_is_refused_at_load() -> None:
    with pytest.raises(UnsupportedModelError, match=r"running state.*cannot be rolled back"):
        TransformersBackend(tiny_model("mamba"))


def test_a_model_that_keeps_state_outside_its_cache_is_refused() -> None:
    model = own(tiny_model())
    original, seen = model.forward, []

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        output = original(input_ids, **options)
        seen.append(0)
        output.logits = output.logits + len(seen)
        return output

    model.forward = forward
    with pytest.raises(UnsupportedModelError, match="after rolling back"):
        TransformersBackend(model, exact=False)


def test_a_mixture_of_experts_runs_exactly(caplog: pytest.LogCaptureFixture) -> None:
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = own(AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval())
    with caplog.at_level(logging.WARNING):
        backend = TransformersBackend(model)
    assert backend.layout is Layout.SINGLE
    assert "one token per forward, since its 4 experts" in caplog.text
    ids = [(31 * index) % 320 for index in range(80)]
    backend.prefill(ids[:5])
    alone = torch.cat([backend.forward([token]) for token in ids[5:]])
    backend.reset()
    backend.prefill(ids[:5])
    assert torch.equal(torch.cat([backend.forward(ids[5:40]), backend.forward(ids[40:])]), alone)


def test_a_model_that_cannot_be_padded_runs_one_token_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    model = own(tiny_model())
    original = model.forward

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        output = original(input_ids, **options)
        output.logits = output.logits + input_ids.float().mean()  # rows see each other
        return output

    model.forward = forward
    with caplog.at_level(logging.WARNING):
        backend = TransformersBackend(model)
    assert backend.layout is Layout.SINGLE
    assert "rows are not independent" in backend.choice_reason
    assert backend.choice_reason in caplog.text


def test_a_failing_forward_leaves_the_cache_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TransformersBackend(own(tiny_model()), rows=4, kernels=False)
    backend.prefill([1, 2, 3])
    expected = backend.forward([4, 5, 6, 7, 8])
    backend.rollback(3)
    original, calls = backend.model.forward, []

    def forward(*args: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == 2:
            raise MemoryError
        return original(*args, **options)

    monkeypatch.setattr(backend.model, "forward", forward)
    with pytest.raises(MemoryError):
        backend.forward([9, 10, 11, 12, 13])
    assert backend.length == 3
    monkeypatch.undo()
    assert torch.equal(backend.forward([4, 5, 6, 7, 8]), expected)


def test_dropout_is_off_and_nothing_needs_a_gradient() -> None:
    model = own(tiny_model("gpt2", resid_pdrop=0.5)).train()
    backend = TransformersBackend(model)
    assert not backend.model.training
    assert not any(parameter.requires_grad for parameter in backend.model.parameters())


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
def test_the_default_model_is_exact_over_200_tokens(dtype: Dtype) -> None:
    backend = TransformersBackend(DEFAULT_MODEL, dtype=dtype, device="cpu")
    assert backend.layout is (Layout.ROWS if has_kernels() else Layout.PADDED)
    draw = random.Random(0)
    ids = [draw.randrange(backend.vocab_size) for _ in range(240)]
    backend.prefill(ids[:40])
    alone = torch.cat([backend.forward([token]) for token in ids[40:]])
    backend.rollback(40)
    rows: list[torch.Tensor] = []
    while len(rows) < 200:
        backend.set_threads(draw.randint(1, 2) if has_kernels() else 1)
        right = ids[40 + len(rows) : 40 + len(rows) + draw.randint(1, 20)]
        wrong = [draw.randrange(backend.vocab_size) for _ in range(draw.randint(0, 3))]
        rows += list(backend.forward([*right, *wrong])[: len(right)])
        backend.rollback(40 + len(rows))
    assert torch.equal(torch.stack(rows), alone)


def own(model: Any) -> Any:
    """The model with AutoPipe's attention, as loading gives it."""
    from autopipe.core.backends.transformers_loading import use_own_attention

    use_own_attention(model)
    return model


def model_class(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def test_tiny_configs_fit_except_the_recurrent_one() -> None:
    assert {kind for kind in (*ARCHITECTURES, "mamba") if unfit_reason(tiny_config(kind))} == {"mamba"}


@pytest.mark.skipif(not has_kernels(), reason="only rows on our kernels vary in number")
@pytest.mark.parametrize(("width", "layout"), [(128, Layout.ROWS), (136, Layout.PADDED), (130, Layout.SINGLE)])
def test_rows_whose_numbers_torch_cannot_compute_in_whole_vectors_are_not_computed_in_any_number(
    width: int, layout: Layout
) -> None:
    """What is left over at a tensor's end is rounded otherwise by functions such as SiLU."""
    model = tiny_model("llama", intermediate_size=width)
    model.set_attn_implementation("autopipe")
    backend = TransformersBackend(model, threads=1)
    assert backend.layout is layout
    assert (str(width) in backend.choice_reason) == (layout is not Layout.ROWS)
