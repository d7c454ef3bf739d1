"""Closed formulas of speculative decoding, in tokens per step and, with measured step times, in tokens per
second.

Symbols: `acceptance` (a): chance that a draft is accepted, independent between positions; `window` (g):
drafts per verification; `forward_s(n)`: measured seconds of a forward of n tokens. The formulas count tokens
per *step*; only divided by the measured time of a step do they compare configurations.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), by the numbers of its equations; McDanel et al. 2025, PipeSpec
(arXiv 2505.01572), by theorem and by what a formula is called there, since its text was not at hand when this was
written and the numbers of its equations could not be checked; the user's document on AutoPipe for
`document_throughput`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopipe.core.errors import ConfigError

ForwardTime = Callable[[int], float]


def expected_tokens(acceptance: float, window: int) -> float:
    """Tokens per verification of `window` drafts: (1 - a^(g+1)) / (1 - a) (Leviathan et al., equation 1).

    The verifier's own token is included: 1 with a = 0, g + 1 with a = 1.

    Raises:
        ConfigError: acceptance outside 0 .. 1, or a negative window.
    """
    _check(acceptance, window)
    return float(sum(acceptance**drafts for drafts in range(window + 1)))


def pipeline_fill(acceptance: float, window: int) -> float:
    """PipeSpec's rho = a / (1 - a^(g+1) + a): share of steps in which the verifier finds drafts waiting.

    The paper calls it the steady-state verification probability (of M_i, with the acceptance of M_i-1 by M_i). It
    is that of a chain of two states: with drafts waiting, they wait again unless one of g + 1 is rejected (chance
    1 - a^(g+1)); without, they wait at the next step with chance a.

    Raises:
        ConfigError: as `expected_tokens`.
    """
    _check(acceptance, window)
    return acceptance / (1 - acceptance ** (window + 1) + acceptance) if acceptance else 0.0


def pipelined_tokens(acceptance: float, window: int) -> float:
    """PipeSpec's tokens per step: (1 - rho) + rho (1 - a^(g+1)) / (1 - a).

    The paper's expected tokens per decoding step of a stage, and for the target the PipeSpec(P) of its Theorem 1,
    which says that it is above 1 for any a > 0: one token in the steps that find no drafts, `expected_tokens` in
    the others. It is also the speed-up over plain decoding where a verification takes as long as a step of one token.

    Raises:
        ConfigError: as `expected_tokens`.
    """
    rho = pipeline_fill(acceptance, window)
    return (1 - rho) + rho * expected_tokens(acceptance, window)


def synchronous_tokens(acceptance: float, window: int, speed_ratio: float) -> float:
    """Tokens per step of the target when it waits for its drafts: (1 - a^(g+1)) / ((1 - a) (g / c + 1)).

    PipeSpec's SD(P), the synchronous pair it compares itself with; Leviathan et al., theorem 3.8, with cost
    coefficient 1/c. It is also the speed-up over plain decoding where t(n) is constant.

    Args:
        speed_ratio: c, steps of the drafter in the time of one of the target.

    Raises:
        ConfigError: as `expected_tokens`, or a ratio that is not positive.
    """
    if not speed_ratio > 0:
        raise ConfigError("speed_ratio", speed_ratio, "above 0")
    return expected_tokens(acceptance, window) / (window / speed_ratio + 1)


def plain_tokens_per_s(target: ForwardTime) -> float:
    """Tokens per second of plain decoding."""
    return 1 / target(1)


def lockstep_tokens_per_s(acceptance: float, window: int, drafter: ForwardTime, target: ForwardTime) -> float:
    """Tokens per second of one drafter in turns with the target: `expected_tokens` per round.

    A round takes g draft steps and a forward of g + 1 tokens. After full acceptance (chance a^g) the
    drafter's cache lacks its last draft, so its next step takes two tokens.

    Raises:
        ConfigError: acceptance outside 0 .. 1, or a window below 1.
    """
    _check(acceptance, window, least_window=1)
    full = acceptance**window
    first_step_s = full * drafter(2) + (1 - full) * drafter(1)
    round_s = first_step_s + (window - 1) * drafter(1) + target(window + 1)
    return expected_tokens(acceptance, window) / round_s


def pipelined_tokens_per_s(acceptance: float, window: int, drafter: ForwardTime, target: ForwardTime) -> float:
    """Tokens per second of `pipelined_tokens`, with a step as long as its slower side.

    A step that finds drafts takes the longer of verifying and drafting as many; one that finds none takes
    target(1). The simulator knows better: it follows what is lost at each rollback.

    Raises:
        ConfigError: acceptance outside 0 .. 1, or a window below 1.
    """
    _check(acceptance, window, least_window=1)
    rho = pipeline_fill(acceptance, window)
    step_s = rho * max(target(window + 1), window * drafter(1)) + (1 - rho) * target(1)
    return pipelined_tokens(acceptance, window) / step_s


def synchronous_speedup(acceptance: float, window: int, drafter: ForwardTime, target: ForwardTime) -> float:
    """`lockstep_tokens_per_s` over plain decoding.

    With t(n) constant it is `synchronous_tokens`.
    """
    return lockstep_tokens_per_s(acceptance, window, drafter, target) / plain_tokens_per_s(target)


def pipelined_speedup(acceptance: float, window: int, drafter: ForwardTime, target: ForwardTime) -> float:
    """`pipelined_tokens_per_s` over plain decoding."""
    return pipelined_tokens_per_s(acceptance, window, drafter, target) / plain_tokens_per_s(target)


def document_throughput(acceptances: Sequence[float], token_times_s: Sequence[float]) -> float:
    """The user's document: tau = prod(a_i) / t_k + (1 - prod(a_i)) min_i(1 / t_i), in tokens per second.

    Degenerate, kept for reference: t_k is the target's time, the target is the slowest stage, so min(1/t_i) =
    1/t_k and tau = 1/t_k whatever the acceptances are. Use the simulator.

    Args:
        acceptances: of each adjacent pair, k - 1 of them.
        token_times_s: seconds per token of each stage, the target's last.

    Raises:
        ConfigError: lengths that do not fit, a time that is not positive, or acceptance outside 0 .. 1.
    """
    if len(token_times_s) != len(acceptances) + 1:
        raise ConfigError("token_times_s", list(token_times_s), f"{len(acceptances) + 1} of them")
    if any(not seconds > 0 for seconds in token_times_s):
        raise ConfigError("token_times_s", list(token_times_s), "positive seconds")
    product = 1.0
    for acceptance in acceptances:
        _check(acceptance, 1)
        product *= acceptance
    return product / token_times_s[-1] + (1 - product) * min(1 / seconds for seconds in token_times_s)


def _check(acceptance: float, window: int, least_window: int = 0) -> None:
    if not 0 <= acceptance <= 1:
        raise ConfigError("acceptance", acceptance, "0 to 1")
    if window < least_window:
        raise ConfigError("window", window, f"at least {least_window}")
