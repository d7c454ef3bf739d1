"""The padded torch fallback, and the CUDA runner's mathematics and shapes computed without graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from autopipe.core.backends import fused
from autopipe.core.backends.conformance import CHECKS, Subject
from autopipe.core.backends.fused import FusedBackend
from autopipe.core.backends.fused_config import shape_of
from autopipe.core.backends.fused_cuda import CudaRunner
from autopipe.core.backends.fused_runner import Runner
from autopipe.core.backends.fused_torch import EXACT_ROWS, PaddedRunner, TorchDecoder, TorchRunner
from tests.tiny import tiny_model, tiny_state

KINDS = ("llama", "qwen2", "qwen3")


def make_runner(which: str, dtype: torch.dtype, exact: bool = True, kind: str = "llama") -> Runner:
    model = tiny_model(kind, dtype=dtype, max_position_embeddings=2048)
    shape, state = shape_of(model.config), tiny_state(model)
    if which == "torch":
        return TorchRunner(shape, state, dtype, None, 2048, exact)
    return CudaRunner(shape, state, dtype, "cpu", 2048, exact, graphs=False)


def token_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "has_kernels", lambda: False)
    monkeypatch.setattr(fused, "reason_missing", lambda: "no compiler in this test")


@pytest.mark.parametrize("which", ["torch", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_grouping_does_not_change_bits(which, dtype, kind):
    runner = make_runner(which, dtype, kind=kind)
    text = token_ids(300)
    runner.run(text[:99], 0, 1)
    alone = torch.cat([runner.run([token], 99 + i, 1) for i, token in enumerate(text[99:])])
    for size in (2, 3, 7, 8, 20):
        done = 99
        while done < len(text):
            part = text[done : done + size]
            rows = runner.run(part, done, len(part))
            assert torch.equal(rows, alone[done - 99 : done - 99 + len(part)]), (size, done)
            done += len(part)


@pytest.mark.parametrize("which", ["torch", "cuda"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_equals_transformers(which, exact, kind):
    runner = make_runner(which, torch.float32, exact, kind)
    text = token_ids(150)
    model = tiny_model(kind, max_position_embeddings=2048)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    prefill = runner.run(text[:100], 0, 1)
    rows = runner.run(text[100:], 100, 50)
    logits = torch.cat([prefill, rows])
    assert (logits - expected[99:]).abs().max() <= 1e-4 * expected.abs().max()


def test_cache_growth_keeps_what_it_holds():
    runner = make_runner("torch", torch.float32)
    text = token_ids(1100)
    runner.run(text[:1000], 0, 1)
    grown = runner.run(text[1000:], 1000, 100)[-1].clone()
    fresh = make_runner("torch", torch.float32)
    fresh.decoder.make_room(1100)
    fresh.run(text[:1000], 0, 1)
    assert torch.equal(fresh.run(text[1000:], 1000, 100)[-1], grown)


def test_exact_uses_one_row_count_and_inexact_the_next_bucket():
    exact, loose = make_runner("cuda", torch.float32), make_runner("cuda", torch.float32, exact=False)
    assert isinstance(exact, PaddedRunner)
    assert isinstance(loose, PaddedRunner)
    assert {exact.bucket(rows) for rows in (1, 5, 8, 30)} == {EXACT_ROWS}
    assert [loose.bucket(rows) for rows in (1, 3, 9, 200)] == [1, 4, 16, 64]


def test_chunk_buckets_are_powers_of_two_within_the_cache():
    runner = make_runner("cuda", torch.float32)
    assert isinstance(runner, CudaRunner)
    assert [runner.chunk_bucket(chunks) for chunks in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]


def test_padding_rows_write_nothing_that_is_read():
    model = tiny_model()
    decoder = TorchDecoder(shape_of(model.config), tiny_state(model), torch.float32, "cpu", 512)
    ids = torch.zeros(8, dtype=torch.int64)
    decoder.block(ids, ids, torch.full((8,), decoder.capacity), 1)
    assert not any(keys[:, : decoder.capacity].any() for keys in decoder.keys)


@pytest.mark.parametrize("check", CHECKS)
def test_fallback_keeps_the_contract(check, no_kernels):
    model = tiny_model()

    def reference(ids: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(ids)])).logits[0]

    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    CHECKS[check](Subject(lambda: backend, reference, 1e-3))


def test_fallback_is_logged_with_the_reason(no_kernels, caplog):
    model = tiny_model()
    with caplog.at_level(logging.WARNING):
        backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    assert "no compiler in this test" in caplog.text
    assert backend.exact
    assert "torch" in backend.cost_notes().notes


class NoCapture(CudaRunner):
    """Graphs are asked for, and the first capture fails as it does where the driver is too old."""

    attempts = 0

    def _capture(self, rows: int, chunks: int) -> Any:
        self.attempts += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_without_a_graph_it_goes_on_operation_by_operation_and_says_so(caplog):
    model, text = tiny_model(), token_ids(30)
    shape, state = shape_of(model.config), tiny_state(model)
    runner = NoCapture(shape, state, torch.float32, "cpu", 2048, True, graphs=True)
    eager = CudaRunner(shape, state, torch.float32, "cpu", 2048, True, graphs=False)
    with caplog.at_level(logging.WARNING):
        for each in (runner, eager):
            each.run(text[:20], 0, 1)
        rows = [runner.run([token], position, 1).clone() for position, token in enumerate(text[20:], 20)]
    assert torch.equal(torch.cat(rows), eager.run(text[20:], 20, 10))
    assert runner.attempts == 1
    assert runner.shortfalls == ("no CUDA graphs: operation not permitted when stream is capturing",)
    assert caplog.text.count("no CUDA graphs") == 1
    assert eager.shortfalls == ()


def test_the_backend_passes_on_what_its_runner_could_not_do(no_kernels: Any) -> None:
    model = tiny_model()
    backend = FusedBackend(model.config, tiny_state(model), dtype=torch.float32)
    assert backend.shortfalls == ()
    backend._runner.shortfalls = ("no CUDA graphs: none",)
    assert backend.shortfalls == ("no CUDA graphs: none",)
