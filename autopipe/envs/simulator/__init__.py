"""Discrete-event simulator of the engine, and of the systems whose runs were published."""

from autopipe.envs.simulator.agreement import draw_picks
from autopipe.envs.simulator.authors import PairResult, PairTimes, simulate_async_pair, simulate_sync_pair
from autopipe.envs.simulator.commands import fit_command, simulate_command
from autopipe.envs.simulator.fit import FitReport, Prediction, fit_traces
from autopipe.envs.simulator.from_plan import chain_from_plan, emulated_agreement
from autopipe.envs.simulator.model import LatencyCurve, LocalDrafts, SimChain, SimRequest, SimStage
from autopipe.envs.simulator.run import SimResult, SimRun, StageResult, simulate

__all__ = [
    "FitReport",
    "LatencyCurve",
    "LocalDrafts",
    "PairResult",
    "PairTimes",
    "Prediction",
    "SimChain",
    "SimRequest",
    "SimResult",
    "SimRun",
    "SimStage",
    "StageResult",
    "chain_from_plan",
    "draw_picks",
    "emulated_agreement",
    "fit_command",
    "fit_traces",
    "simulate",
    "simulate_async_pair",
    "simulate_command",
    "simulate_sync_pair",
]
