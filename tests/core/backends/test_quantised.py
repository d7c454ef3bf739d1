"""Stages with 8- and 4-bit weights: the same contract, the same exactness, another model."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from autopipe.bench.precision import measure_change
from autopipe.core import kernels
from autopipe.core.backends.conformance import check_backend
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.load import check_stage, load_backend
from autopipe.core.backends.quantised import library_for, quantisation_config, reason_missing
from autopipe.core.backends.transformers_linear import weight_bytes
from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError, UnsupportedModelError
from autopipe.core.kernels.formats import WeightFormat
from autopipe.core.plan import Dtype, Plan, StagePlan
from autopipe.core.preflight import _check_exact_target
from autopipe.core.sampling import SamplingParams
from tests.tiny import save_tiny, tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
PROMPT = list(range(30, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.INT4])
def test_the_fused_backend_keeps_its_contract(weights, tied):
    model = tiny_model("qwen3", tie_word_embeddings=tied)

    def make():
        state = tiny_state(model)
        return FusedBackend(model.config, state, dtype=torch.bfloat16, threads=1, weights=weights)

    reference = make()

    def logits(ids):
        reference.reset()
        return torch.cat([reference.forward([token]).clone() for token in ids])

    check_backend(make, logits, tolerance=1e-5)


@pytest.mark.parametrize("backend", ["fused", "transformers"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_row_has_the_same_bits_alone_and_in_a_block(folder, backend, dtype):
    stage = StagePlan.parse({"model": folder, "backend": backend, "dtype": dtype})
    loaded = load_backend(stage, threads=1)
    block = loaded.forward(PROMPT).clone()
    loaded.reset()
    alone = torch.cat([loaded.forward([token]).clone() for token in PROMPT])
    assert loaded.exact
    assert torch.equal(block, alone)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_chain_gives_what_plain_decoding_by_the_quantised_target_gives(folder, dtype):
    target = {"model": folder, "name": "target", "dtype": dtype, "threads": 1}
    drafter = {"model": folder, "name": "drafter", "dtype": "int4", "window": 4, "threads": 1}
    outputs = []
    with Engine(Plan.parse({"mode": "plain", "chain": [target]})) as engine:
        for plan in (None, {"mode": "lockstep", "chain": [{"model": "ngram"}, target]},
                     {"mode": "lockstep", "chain": [drafter, target]}):  # fmt: skip
            if plan is not None:
                engine.apply(Plan.parse(plan))
            handle = engine.submit(PROMPT, SamplingParams(max_new_tokens=40, temperature=0.8, seed=3))
            outputs.append([token for block in handle for token in block.token_ids])
    assert outputs[1:] == outputs[:1] * 2


def test_quantised_weights_are_never_chosen_by_auto(folder):
    assert check_stage(StagePlan.parse({"model": folder})).dtype == "torch.bfloat16"


@pytest.mark.parametrize(("backend", "share"), [("fused", 0.6), ("transformers", 0.8)])
def test_fewer_bits_take_less_memory(folder, backend, share):
    """transformers counts the embedding too, which keeps its 16 bits."""
    sizes = {}
    for dtype in ("bf16", "int8", "int4"):
        loaded = load_backend(StagePlan.parse({"model": folder, "backend": backend, "dtype": dtype}), threads=1)
        sizes[dtype] = loaded.cost_notes().weight_bytes
    assert sizes["int4"] < sizes["int8"] < share * sizes["bf16"]


def test_weights_that_a_library_wraps_count_as_what_is_stored():
    from torch.testing._internal.two_tensor import TwoTensor

    layer = torch.nn.Linear(8, 4, bias=False)
    wrapped = TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8))  # a weight of two tensors, as torchao's are
    layer.weight = torch.nn.Parameter(wrapped, requires_grad=False)
    assert weight_bytes(layer) == 2 * 4 * 8 * 4


def test_weights_are_quantised_beside_bf16_only():
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="bf16"):
        FusedBackend(model.config, tiny_state(model), dtype=torch.float32, weights=WeightFormat.INT8)


def test_without_kernels_and_library_the_dtype_is_refused_before_weights_load(folder, monkeypatch):
    monkeypatch.setattr(kernels, "has_kernels", lambda: False)
    monkeypatch.setattr("autopipe.core.backends.quantised.reason_missing", lambda *_: "torchao is not installed")
    with pytest.raises(ConfigError, match=r"chain\.0\.dtype.*torchao is not installed"):
        check_stage(StagePlan.parse({"model": folder, "dtype": "int8"}), "chain.0.model")


def test_the_library_goes_by_bits_and_device():
    assert library_for(Dtype.INT8, "cuda") == "torchao"
    assert library_for(Dtype.INT4, "cuda:1") == "bitsandbytes"
    assert library_for(Dtype.INT4, "cpu") is None


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason_missing(Dtype.INT8, "cuda") == "torchao is not installed: pip install torchao"


def stand_in(monkeypatch, name, *classes):
    """Have imports find a module that has these classes alone."""
    module = ModuleType(name)
    for each in classes:
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_int8_is_asked_of_torchao_for_weights_alone(monkeypatch, device):
    class Int8WeightOnlyConfig: ...

    class TorchAoConfig:
        def __init__(self, quant_type):
            self.quant_type = quant_type

    stand_in(monkeypatch, "torchao")
    stand_in(monkeypatch, "torchao.quantization", Int8WeightOnlyConfig)
    stand_in(monkeypatch, "transformers", TorchAoConfig)
    config = quantisation_config(Dtype.INT8, device)
    assert type(config) is TorchAoConfig
    assert type(config.quant_type) is Int8WeightOnlyConfig


def test_int4_on_a_gpu_is_asked_of_bitsandbytes_as_nf4_that_computes_in_bf16(monkeypatch):
    class BitsAndBytesConfig:
        def __init__(self, **options):
            self.options = options

    stand_in(monkeypatch, "transformers", BitsAndBytesConfig)
    config = quantisation_config(Dtype.INT4, "cuda:0")
    assert config.options == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }


@pytest.mark.parametrize(("dtype", "package"), [("int8", "torchao"), ("int4", "bitsandbytes")])
def test_a_stage_on_a_gpu_whose_library_is_missing_is_refused_with_what_to_install(folder, monkeypatch, dtype, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    monkeypatch.setattr("autopipe.core.backends.devices.choose_device", lambda *_: torch.device("cuda:0"))
    with pytest.raises(ConfigError, match=f"{package} is not installed: pip install {package}"):
        check_stage(StagePlan.parse({"model": folder, "dtype": dtype, "backend": "transformers"}), "chain.0.model")


def test_the_change_of_output_is_measured_against_the_same_model_in_16_bits(folder):
    change = measure_change(StagePlan.parse({"model": folder, "dtype": "int8"}), [PROMPT], threads=1, max_new_tokens=20)
    assert change.positions == len(PROMPT) + 20
    assert change.reference == "bfloat16"
    assert 0.5 < change.agreement <= 1
    assert change.kl > 0


def test_an_exact_plan_refuses_a_target_in_a_librarys_four_bits(folder):
    plan = Plan.parse({"mode": "plain", "chain": [{"model": folder, "dtype": "int4"}]})
    info = replace(check_stage(plan.target), device="cuda")
    with pytest.raises(ConfigError, match=r"chain\.0\.dtype.*exact: false"):
        _check_exact_target(plan, info)
    _check_exact_target(plan.replace(exact=False), info)
    _check_exact_target(plan, check_stage(plan.target))
