"""What travels between stages: only what is new, and sparse rows; counted against sending everything each time."""

import pytest

from autopipe.core.engine import Engine
from autopipe.core.plan import Plan
from autopipe.core.sampling import SamplingParams
from autopipe.core.stats import StageStats, report_stages
from tests.tiny import save_tiny

CLAIMED_SAVING = 0.8
"""The PipeSpec document's figure for delta-coded traffic between stages."""


def run(plan, **sampling):
    with Engine(Plan.parse(plan)) as engine:
        handle = engine.submit(list(range(20, 60)), SamplingParams(**sampling))
        return handle.outcome().stats


def emulated(**keys):
    return {"model": "emulated", "emulated": {"ms": {1: 0.2}, "agreement": keys.pop("agreement", 1)}, **keys}


def test_tokens_travel_once_and_save_what_the_document_claims():
    chain = [emulated(agreement=0.8, window=4), emulated(agreement=0.9, window=8), emulated()]
    stats = run({"mode": "async", "chain": chain}, max_new_tokens=300)
    for stage in stats.stages:
        assert stage.bytes_saved is not None
        assert stage.bytes_saved >= CLAIMED_SAVING, stage


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), vocab_size=4096))


def test_under_rejection_sampling_rows_travel_sparse(model):
    chain = [{"model": model, "name": "drafter", "window": 4}, {"model": model, "name": "target"}]
    stats = run(
        {"mode": "lockstep", "verification": "rejection", "chain": chain},
        max_new_tokens=60, temperature=1.0, top_k=40, seed=1,
    )  # fmt: skip
    drafter, target = stats.stages
    assert drafter.naive_bytes > 4096 * 4 * drafter.emitted / 2  # whole distributions would have travelled
    assert drafter.bytes_saved is not None
    assert drafter.bytes_saved >= CLAIMED_SAVING
    assert target.bytes_per_token is not None
    assert target.naive_bytes_per_token is not None
    assert target.bytes_per_token < target.naive_bytes_per_token


def test_a_stage_that_sent_nothing_has_no_figures():
    [report] = report_stages([StageStats("target")])
    assert (report.bytes_per_token, report.bytes_saved) == (None, None)
