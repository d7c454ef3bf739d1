"""A drafter of the target's own layers in a batch computes, for each sequence, what it computes alone."""

from __future__ import annotations

import pytest
import torch

from autopipe.core import kernels
from autopipe.core.backends.shared_base import SharedBaseBackend
from autopipe.core.backends.shared_base_batch import SharedBaseBatchRunner
from tests.drafts.distilling import tiny_drafter
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_state

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")
MODEL = tiny_model(num_hidden_layers=4)
STATE = tiny_state(MODEL)
TEXTS = ([7, 40, 41, 99, 3], [250, 16, 77], [1, 2, 3, 4, 5, 6, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_drafter(tmp_path_factory.mktemp("drafters") / "chat", seed=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_each_sequence_has_the_logits_it_has_alone(folder: str, dtype: torch.dtype) -> None:
    runner = SharedBaseBatchRunner(MODEL.config, lambda: STATE, folder, dtype=dtype, threads=1, slots=4, max_length=64)
    alone = SharedBaseBackend(MODEL.config, lambda: STATE, [folder], dtype=dtype, threads=1)
    together = runner.forward([(slot, ids, len(ids)) for slot, ids in enumerate(TEXTS)]).clone()
    assert together.shape == (sum(map(len, TEXTS)), VOCAB_SIZE)
    row = 0
    for ids in TEXTS:
        alone.reset()
        assert torch.equal(together[row : row + len(ids)], alone.forward(ids))
        row += len(ids)
    assert torch.isinf(together).any(), "the head has every token: this test says less"
    for prepare in (False, True):
        if prepare:
            runner.prepare_best()
        for slot in range(len(TEXTS)):
            runner.reset(slot)
        best = runner.best([(slot, ids, len(ids)) for slot, ids in enumerate(TEXTS)])
        assert best == together.argmax(-1).tolist()
