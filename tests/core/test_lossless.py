"""The promise: with real models, caches and kernels, every chain says what the target says by itself, bit for bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from autopipe.core.backends.base import StageBackend
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.transformers import TransformersBackend
from autopipe.core.plan import Mode, NgramOptions, Verification, WhenShort
from tests.core.pipeline import Pipeline, chain_configs, make_pipeline
from tests.tiny import tiny_model, tiny_state

PROMPT = [5, 9, 200, 31, 7, 77, 140, 3]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@functools.cache
def _model(noise: float, dtype: str) -> torch.nn.Module:
    """The tiny target, or one whose weights are a little off: a drafter that agrees now and then."""
    model = tiny_model("llama", seed=0, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std().nan_to_num(0) * torch.randn_like(parameter))
    return model.to(DTYPES[dtype])


def make_backend(kind: str, dtype: str, noise: float = 0.0) -> StageBackend:
    model = _model(noise, dtype)
    if kind == "fused":
        return FusedBackend(model.config, tiny_state(model), dtype=DTYPES[dtype], threads=1)
    return TransformersBackend(copy.deepcopy(model), threads=1)  # it repacks the weights of what it is given


@functools.cache
def plain(kind: str, dtype: str, temperature: float, length: int = 120) -> tuple[int, ...]:
    pipeline = make_pipeline([make_backend(kind, dtype)], chain_configs(1))
    pipeline.begin(prompt=PROMPT, max_new_tokens=length, temperature=temperature, seed=3)
    return tuple(pipeline.run())


def run(pipeline: Pipeline, temperature: float = 0.0, length: int = 120) -> tuple[int, ...]:
    pipeline.begin(prompt=PROMPT, max_new_tokens=length, temperature=temperature, seed=3)
    return tuple(pipeline.run())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", [Mode.LOCKSTEP, Mode.ASYNC])
@pytest.mark.parametrize("num_drafters", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fused", "transformers"])
def test_neural_chains(kind: str, dtype: str, num_drafters: int, mode: Mode, temperature: float) -> None:
    drafters = [make_backend(kind, dtype, noise) for noise in (0.1, 0.03)[-num_drafters:]]
    backends = [*drafters, make_backend(kind, dtype)]
    for window, cap, when_short in ((1, 128, WhenShort.WAIT), (5, 3, WhenShort.STEP), (12, 128, WhenShort.WAIT)):
        configs = chain_configs(
            len(backends), mode=mode, window=window, verify_cap=cap, min_drafts=min(2, window), when_short=when_short
        )
        assert run(make_pipeline(backends, configs), temperature) == plain(kind, dtype, temperature)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fused", "transformers"])
@pytest.mark.parametrize("gate", [False, True])
def test_ngram_in_front_of_the_target_and_of_a_drafter(kind: str, dtype: str, gate: bool) -> None:
    options = NgramOptions(gate=gate)
    alone = make_pipeline([make_backend(kind, dtype)], chain_configs(1, window=9, ngram=options))
    assert run(alone) == plain(kind, dtype, 0.0)
    configs = chain_configs(2, window=6)
    chain = make_pipeline(
        [make_backend(kind, dtype, 0.03), make_backend(kind, dtype)], [configs[0].replace(ngram=options), configs[1]]
    )
    assert run(chain) == plain(kind, dtype, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fused", "transformers"])
@pytest.mark.parametrize("num_drafters", [1, 2, 3])
def test_copies_of_the_target_are_accepted_without_exception(kind: str, dtype: str, num_drafters: int) -> None:
    """A key-value entry that is off by one position would show as a rejection."""
    backends = [make_backend(kind, dtype) for _ in range(num_drafters + 1)]
    for window in range(1, 7):
        for mode in (Mode.LOCKSTEP, Mode.ASYNC):
            pipeline = make_pipeline(backends, chain_configs(num_drafters + 1, mode=mode, window=window))
            assert run(pipeline, length=200) == plain(kind, dtype, 0.0, 200)
            for stage in pipeline.stages:
                assert stage.meter.stats.accepted == stage.meter.stats.verified
            assert pipeline.stages[-1].meter.stats.accepted > 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"min_new_tokens": 30, "logit_bias": {5: 2.0, 9: -4.0}},
        {"temperature": 0.7, "repetition_penalty": 1.1, "top_p": 0.8},
    ],
    ids=lambda options: "-".join(options),
)
def test_sampling_options(options: dict[str, object]) -> None:
    def generate(backends: list[StageBackend]) -> list[int]:
        pipeline = make_pipeline(backends, chain_configs(len(backends), window=5))
        pipeline.begin(prompt=PROMPT, max_new_tokens=80, eos=[17], seed=5, **options)
        return pipeline.run()

    target, drafter = make_backend("fused", "bf16"), make_backend("fused", "bf16", 0.03)
    assert generate([drafter, target]) == generate([target])


def test_rejection_sampling_with_a_perfect_drafter_accepts_everything() -> None:
    backends = [make_backend("fused", "fp32") for _ in range(3)]
    pipeline = make_pipeline(backends, chain_configs(3, window=4))
    pipeline.begin(prompt=PROMPT, max_new_tokens=60, temperature=1.0, rule=Verification.REJECTION)
    assert len(pipeline.run()) == 60
    assert all(stage.meter.stats.accepted == stage.meter.stats.verified for stage in pipeline.stages)
