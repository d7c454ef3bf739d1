"""Thread teams: many short jobs, more threads than cores, several teams, sleep between jobs."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

from autopipe.core import kernels
from autopipe.core.errors import AutoPipeError
from autopipe.core.kernels.bandwidth import StreamingRate, streaming_bytes_per_s
from autopipe.core.kernels.native import Team, matmul
from autopipe.core.kernels.packing import pack_matrix

pytestmark = pytest.mark.skipif(not kernels.has_kernels(), reason=kernels.reason_missing() or "kernels")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_jobs_in_a_row_all_finish_right(threads):
    weight = torch.randn(64, 32)
    packed, team, x = pack_matrix(weight), Team(threads), torch.randn(2, 32)
    expected = matmul(x, packed, 64, team)
    for _ in range(300):
        assert torch.equal(matmul(x, packed, 64, team), expected)


def test_teams_alternate():
    weight, x = torch.randn(64, 32), torch.randn(2, 32)
    packed, teams = pack_matrix(weight), [Team(2), Team(3)]
    expected = matmul(x, packed, 64, teams[0])
    for turn in range(50):
        assert torch.equal(matmul(x, packed, 64, teams[turn % 2]), expected)


def _cpu_s_of_half_a_second() -> float:
    process = psutil.Process()
    time.sleep(0.05)
    before_s = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    return sum(process.cpu_times()[:2]) - before_s


def test_team_sleeps_between_jobs():
    weight, x = torch.randn(64, 32), torch.randn(2, 32)
    packed, team = pack_matrix(weight), Team(4)
    matmul(x, packed, 64, team)
    assert _cpu_s_of_half_a_second() < 0.2


def test_team_kept_awake_computes_the_same_and_sleeps_afterwards():
    weight, x = torch.randn(64, 32), torch.randn(2, 32)
    packed, team = pack_matrix(weight), Team(3)
    expected = matmul(x, packed, 64, team)
    with team.awake():
        for _ in range(50):
            assert torch.equal(matmul(x, packed, 64, team), expected)
        assert any(_cpu_s_of_half_a_second() > 0.1 for _ in range(20)), "they have slept ten seconds"
    assert _cpu_s_of_half_a_second() < 0.2


def test_team_can_be_closed_while_it_is_awake():
    team = Team(3)
    with team.awake():
        before = psutil.Process().num_threads()
        team.close()
        assert psutil.Process().num_threads() == before - 2


def test_closed_team_leaves_no_thread():
    process = psutil.Process()
    before = process.num_threads()
    team = Team(6)
    assert process.num_threads() == before + 5
    team.close()
    assert process.num_threads() == before


def test_streaming_rate_is_positive_and_refuses_use_after_close():
    assert streaming_bytes_per_s(1 << 20, threads=2, repeats=3) > 0
    rate = StreamingRate(1 << 20, 1)
    rate.close()
    with pytest.raises(AutoPipeError, match="closed"):
        rate.read_once()
