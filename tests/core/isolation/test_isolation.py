"""NUMA, MPS, streams and pinned rings: done where the platform has them, else a reason in words."""

import numpy as np
import pytest
import torch

from autopipe.core.board import Board, create_segment
from autopipe.core.chain import bound_cores
from autopipe.core.engine import Engine
from autopipe.core.errors import ConfigError
from autopipe.core.isolation import bind_memory, cores_of, isolate, mps_environment, mps_missing, numa_nodes
from autopipe.core.isolation.cuda import pin, use_stream
from autopipe.core.isolation.numa import parse_cpu_list
from autopipe.core.plan import Plan, StagePlan, StreamPriority
from autopipe.core.preflight import inspect_plan
from autopipe.core.sampling import SamplingParams

EMULATED = {"model": "emulated", "emulated": {"ms": {1: 0.1}}}
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
with_numa = pytest.mark.skipif(not numa_nodes(), reason="this system has no NUMA nodes")


def stage(**keys):
    return StagePlan.parse({**EMULATED, **keys})


def test_a_cpu_list_is_ranges_and_numbers():
    assert parse_cpu_list("0-2,8\n") == (0, 1, 2, 8)
    assert parse_cpu_list("") == ()


def test_nodes_come_from_the_system_s_folders(tmp_path):
    for node, cores in ((0, "0-1"), (1, "2-3")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    assert numa_nodes(tmp_path) == {0: (0, 1), 1: (2, 3)}
    assert numa_nodes(tmp_path / "nothing") == {}


@with_numa
def test_a_node_that_is_not_there_gives_a_reason_and_changes_nothing():
    assert "there are nodes" in (bind_memory(1023) or "")


@with_numa
def test_memory_is_bound_to_a_node_or_the_system_s_refusal_is_given():
    node = next(iter(numa_nodes()))
    reason = bind_memory(node)
    assert reason is None or "not permitted" in reason


@with_numa
def test_a_stage_on_a_node_is_bound_to_its_cores_unless_it_names_some():
    node = next(iter(numa_nodes()))
    assert bound_cores(stage(numa=node)) == cores_of(node)
    assert bound_cores(stage(numa=node, cores=[0])) == (0,)
    assert bound_cores(stage()) is None


@with_numa
def test_a_plan_with_a_node_that_is_not_there_fails_before_anything_starts():
    plan = Plan.parse({"chain": [{**EMULATED, "numa": 1023}]})
    with pytest.raises(ConfigError, match=r"chain\.0\.numa"):
        inspect_plan(plan)


@pytest.mark.parametrize("percent", [0, 101])
def test_an_mps_percentage_out_of_range_names_the_key(percent):
    with pytest.raises(ConfigError, match=r"cuda\.mps_percent"):
        stage(cuda={"mps_percent": percent})


def test_a_percentage_goes_into_the_environment_of_the_stage_s_process():
    assert mps_environment(30) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert mps_environment(None) == {}


def test_without_the_mps_daemon_the_reason_says_how_to_start_it(tmp_path):
    assert "nvidia-cuda-mps-control" in (mps_missing({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) or "")
    (tmp_path / "control").touch()
    assert mps_missing({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}) is None


@without_cuda
def test_a_stream_priority_on_a_cpu_gives_a_reason():
    assert "no effect on cpu" in (use_stream("cpu", StreamPriority.HIGH) or "")


class FakeRuntime:
    def __init__(self, code):
        self.code, self.calls = code, []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append((address, size, flags))
        return self.code


def test_whole_pages_around_a_ring_are_pinned():
    ring, runtime = np.zeros(10_000, np.int32)[7:], FakeRuntime(0)
    assert pin(ring, runtime) is None
    [(address, size, _)] = runtime.calls
    assert address % 4096 == size % 4096 == 0
    assert address <= ring.ctypes.data
    assert address + size >= ring.ctypes.data + ring.nbytes


def test_a_refused_pin_gives_the_error_s_number():
    assert "error 712" in (pin(np.zeros(8, np.int32), FakeRuntime(712)) or "")


@without_cuda
def test_every_option_that_has_no_effect_here_is_reported():
    board = Board(create_segment())
    options = {"stream_priority": "high", "mps_percent": 50, "pinned": True}
    reasons = isolate(stage(cuda=options), board.slot(0))
    assert len(reasons) == 3


def test_a_stage_that_asks_for_nothing_has_nothing_to_report():
    assert isolate(stage(), Board(create_segment()).slot(0)) == []


@without_cuda
def test_each_request_s_stats_show_what_isolation_was_not_to_be_had():
    plan = Plan.parse({"mode": "plain", "chain": [{**EMULATED, "cuda": {"pinned": True}}]})
    with Engine(plan) as engine:
        for _ in range(2):
            handle = engine.submit([1, 2], SamplingParams(max_new_tokens=3))
            assert any("not pinned" in text for text in handle.outcome().stats.fallbacks)


@with_numa
def test_binding_to_a_node_does_not_change_the_output():
    def output(**keys):
        plan = Plan.parse({"mode": "plain", "chain": [{**EMULATED, **keys}]})
        with Engine(plan) as engine:
            handle = engine.submit([1, 2], SamplingParams(max_new_tokens=8))
            return [token for block in handle for token in block.token_ids]

    assert output(numa=next(iter(numa_nodes()))) == output()
