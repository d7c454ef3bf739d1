"""Without numba the simulator gives the same results, and says once that it is slow."""

import subprocess
import sys

from autopipe.core.plan import Mode
from autopipe.envs.simulator import LatencyCurve, SimChain, SimStage, simulate

_SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
sys.modules["numba"] = None
from autopipe.core.plan import Mode
from autopipe.envs.simulator import LatencyCurve, SimChain, SimStage, simulate
chain = SimChain((SimStage(LatencyCurve({1: 0.1}), 0.8), SimStage(LatencyCurve({1: 1.0, 9: 1.5}))), Mode.ASYNC)
print(repr(simulate(chain, 300, seed=5).total_s))
"""


def test_result_does_not_depend_on_numba_and_its_lack_is_said_once() -> None:
    chain = SimChain((SimStage(LatencyCurve({1: 0.1}), 0.8), SimStage(LatencyCurve({1: 1.0, 9: 1.5}))), Mode.ASYNC)
    run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert float(run.stdout) == simulate(chain, 300, seed=5).total_s
    assert run.stderr.count("numba is not installed") == 1
