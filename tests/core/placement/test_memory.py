"""The memory model against what is measured."""

import pytest
import torch

from autopipe.core.backends.fused import FusedBackend
from autopipe.core.kernels import has_kernels
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.placement import load_hardware, memory_use, sizes_from_config, sizes_of
from autopipe.core.placement.memory import kv_bytes_per_token, streamed_bytes, weight_bytes
from autopipe.core.plan import Dtype, StagePlan
from autopipe.profile.process import StageProcess
from tests.tiny import tiny_model, tiny_state

TOLERANCE = 0.15
"""Of the whole of a worker's memory, as docs/hardware.md says."""
COMPUTED = {
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.INT8: torch.bfloat16,
    Dtype.INT4: torch.bfloat16,
}
QUANTISED = {Dtype.INT8: WeightFormat.INT8, Dtype.INT4: WeightFormat.INT4}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", list(COMPUTED))
def test_weights_and_cache_are_what_the_backend_reports(dtype, tied):
    if dtype in QUANTISED and not has_kernels():
        pytest.skip("only the native kernels quantise here")
    model = tiny_model("llama", tie_word_embeddings=tied)
    sizes = sizes_from_config(model.config.to_dict(), "tiny")
    weights = QUANTISED.get(dtype)
    backend = FusedBackend(model.config, tiny_state(model), dtype=COMPUTED[dtype], threads=1, weights=weights)
    notes = backend.cost_notes()
    backend.close()
    assert notes.kv_bytes_per_token == pytest.approx(kv_bytes_per_token(sizes, dtype), rel=0.01)
    assert notes.weight_bytes == pytest.approx(streamed_bytes(sizes, dtype, on_cpu=True), rel=0.01)


@pytest.mark.real_model
@pytest.mark.skipif(not has_kernels(), reason="the figures are of the native kernels")
@pytest.mark.parametrize("dtype", list(COMPUTED))
def test_a_workers_memory_is_predicted_within_the_tolerance(dtype):
    sizes, cpu = sizes_of("smollm2-135m"), load_hardware("cpu").devices[0]
    predicted = memory_use(sizes, dtype, cpu, context=256)
    process = StageProcess("target", 1)
    try:
        process.load(StagePlan.parse({"model": "smollm2-135m", "dtype": dtype.value}), exact=True, threads=1)
        process.ask("prefill", context=0, tokens=[64], repeats=1)
        measured = process.ask("memory")
    finally:
        process.close()
    whole = measured["pss_bytes"] or measured["rss_bytes"]
    assert measured["weight_bytes"] == pytest.approx(streamed_bytes(sizes, dtype, on_cpu=True), rel=0.01)
    assert predicted.total == pytest.approx(whole, rel=TOLERANCE)


def test_quantised_weights_count_their_scales():
    sizes = sizes_of("llama-3.1-70b")
    assert weight_bytes(sizes, Dtype.INT4, on_cpu=False) / 1e9 == pytest.approx(42.7, abs=0.2)
    assert weight_bytes(sizes, Dtype.INT8, on_cpu=True) < weight_bytes(sizes, Dtype.BF16, on_cpu=True) * 0.56
