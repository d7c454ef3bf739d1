"""What `autopipe simulate` and `autopipe simulate fit` do, without the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopipe.core.plan import Mode, Plan
from autopipe.envs.simulator.fit import fit_traces
from autopipe.envs.simulator.from_plan import chain_from_plan
from autopipe.envs.simulator.model import SimRequest, SimStage
from autopipe.envs.simulator.run import simulate


def simulate_command(
    plan: Plan,
    measured: Mapping[str, SimStage] | None = None,
    *,
    contention: Mapping[tuple[str, str], float] | None = None,
    num_requests: int = 1,
    prompt_tokens: int = 64,
    output_tokens: int = 512,
    seed: int = 0,
    overhead_s: float = 0.0,
    wrong_equal: float = 0.0,
    requests: Sequence[SimRequest] | None = None,
) -> dict[str, Any]:
    """Simulate a plan, and plain decoding of the same requests; arguments as for `chain_from_plan`.

    Args:
        requests: instead of `num_requests` equal ones of `prompt_tokens` and `output_tokens`.

    Returns:
        JSON-ready: {plan: {tokens, total_s, ttft_s, ms_per_token, acceptance_length, stages: [...]}, plain:
        the same, speedup, seed}.

    Raises:
        ConfigError: the plan needs measurements that are missing, or a count below 1.
    """
    chain = chain_from_plan(
        plan,
        measured,
        contention=contention,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        overhead_s=overhead_s,
        wrong_equal=wrong_equal,
    )
    requests = list(requests) if requests is not None else [SimRequest(output_tokens, prompt_tokens)] * num_requests
    pipeline = simulate(chain, requests, seed=seed)
    plain = simulate(replace(chain, mode=Mode.PLAIN), requests, seed=seed)
    return {
        "plan": pipeline.as_dict(),
        "plain": plain.as_dict(),
        "speedup": plain.total_s / pipeline.total_s,
        "seed": seed,
    }


def fit_command(traces: str | Path, fit_on: Sequence[str] = (), predict: Sequence[str] = ()) -> dict[str, Any]:
    """Fit and predict published runs; see `fit_traces` for filters, the result and what is raised."""
    return fit_traces(traces, fit_on, predict).as_dict()
