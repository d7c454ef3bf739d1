"""What each drafter of a chain is worth, with full information: one teacher-forced pass says where it agrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopipe.core.plan import Mode, Plan, StagePlan
from autopipe.profile import Profile, simulate_plan
from autopipe.profile.sim import find_stage

WINDOWS = (1, 2, 3, 4, 6, 8, 11)
NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class DrafterScore:
    """One drafter against the target's output.

    Attributes:
        agreement: share of positions at which its pick is the target's token, by kind and `all`.
        acceptance_length: tokens per verification when it always drafts a full window, by window.
        cost_s: seconds for one token, alone on the threads of lockstep.
        relative_cost: the same in plain steps of the target.
    """

    name: str
    agreement: dict[str, float]
    acceptance_length: dict[int, float]
    cost_s: float
    relative_cost: float


@dataclass(frozen=True, slots=True)
class ChainScore:
    """One chain in the simulator. `speedup` is over plain decoding, prefill included."""

    plan: Plan
    speedup: float
    acceptance_length: float

    @property
    def words(self) -> str:
        """`ngram(11) -> small(4) -> big, lockstep`."""
        names = self.plan.names()
        stages = [f"{name}({stage.window})" for name, stage in zip(names, self.plan.drafters, strict=False)]
        return " -> ".join([*stages, names[-1]]) + f", {self.plan.mode.value}"


@dataclass(frozen=True, slots=True)
class Score:
    """Everything `autopipe drafts score` says.

    Attributes:
        pairs: for two drafters, the share of positions at which both pick the same token, right or wrong.
        chains: best first; plain decoding is among them.
    """

    drafters: list[DrafterScore]
    pairs: dict[tuple[str, str], float]
    chains: list[ChainScore]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "drafters": [
                {
                    "name": each.name,
                    "agreement": each.agreement,
                    "acceptance_length": {str(window): value for window, value in each.acceptance_length.items()},
                    "cost_ms": 1e3 * each.cost_s,
                    "relative_cost": each.relative_cost,
                }
                for each in self.drafters
            ],
            "pairs": [{"drafters": list(names), "same_pick": rate} for names, rate in self.pairs.items()],
            "chains": [
                {
                    "chain": each.words,
                    "speedup": each.speedup,
                    "acceptance_length": each.acceptance_length,
                    "plan": each.plan.model_dump(mode="json", exclude_defaults=True),
                }
                for each in self.chains
            ],
        }


def score(profile: Profile, plan: Plan) -> Score:
    """Read a profile of the plan's stages.

    Args:
        plan: its drafters are scored, and the chains that can be made of them compared.

    Raises:
        ConfigError: a stage of the plan is not in the profile.
    """
    bits = agreement_bits(profile, plan)
    return Score(
        [_drafter(profile, name, texts) for name, texts in bits.items()],
        {names: _same_pick(profile, bits, *names) for names in itertools.combinations(bits, 2)},
        _chains(profile, plan),
    )


def agreement_bits(profile: Profile, plan: Plan) -> dict[str, list[list[bool]]]:
    """By drafter and prompt, at which positions after the first it picks the target's token.

    An n-gram drafter without a proposal does not agree.
    """
    found: dict[str, list[list[bool]]] = {}
    for stage in plan.drafters:
        if stage.is_ngram:
            found[NGRAM] = [[right > 0 for right in offer.right[1:]] for offer in profile.ngram.prompts]
            continue
        name = find_stage(profile, stage, "chain").name
        table = next(each for each in profile.agreement if each.drafter == name)
        found[name] = [[bit == "1" for bit in text[1:]] for text in table.agrees]
    return found


def acceptance_length(texts: Sequence[Sequence[bool]], window: int) -> float:
    """Tokens per verification of a drafter that always drafts `window` tokens, from where it agrees; 1 for no text."""
    tokens = steps = 0
    for text in texts:
        position = 0
        while position < len(text):
            run = 0
            while run < window and position + run < len(text) - 1 and text[position + run]:
                run += 1
            position += run + 1
            tokens += run + 1
            steps += 1
    return tokens / steps if steps else 1.0


def _drafter(profile: Profile, name: str, texts: list[list[bool]]) -> DrafterScore:
    threads = max(profile.settings.threads)
    step_s = _step_s(profile, profile.target.name, threads)
    cost_s = profile.ngram.draft_s if name == NGRAM else _step_s(profile, name, threads)
    kinds = {"all": texts}
    for kind in profile.kinds:
        kinds[kind] = [text for text, prompt in zip(texts, profile.prompts, strict=True) if prompt.kind == kind]
    return DrafterScore(
        name,
        {kind: _mean(itertools.chain.from_iterable(chosen)) for kind, chosen in kinds.items()},
        {window: _acceptance(profile, name, texts, window) for window in WINDOWS},
        cost_s,
        cost_s / step_s,
    )


def _acceptance(profile: Profile, name: str, texts: list[list[bool]], window: int) -> float:
    """An n-gram's later drafts differ from what it would say after the right tokens: its own runs count."""
    if name != NGRAM:
        return acceptance_length(texts, window)
    tokens = steps = 0
    for offer in profile.ngram.prompts:
        position, length = 1, len(offer.right)
        while position < length:
            emitted = min(offer.right[position], window, length - position - 1) + 1
            position += emitted
            tokens += emitted
            steps += 1
    return tokens / steps if steps else 1.0


def _step_s(profile: Profile, name: str, threads: int) -> float:
    """Seconds of a forward of one token, at the shortest context measured."""
    stage = next(each for each in profile.stages if each.name == name)
    curves = min(stage.curves, key=lambda curves: abs(curves.threads - threads))
    return min((point.context, point.seconds) for point in curves.verify if point.tokens == 1)[1]


def _mean(values: Iterator[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _same_pick(profile: Profile, bits: dict[str, list[list[bool]]], first: str, second: str) -> float:
    """Share of equal picks: both right, and the share of both wrong with the same token (0 where not measured)."""
    table = next((each for each in profile.agreement if each.drafter == first), None)
    wrong_equal = table.wrong_equal.get(second, 0.0) if table else 0.0
    both_right = both_wrong = total = 0
    for one, other in zip(bits[first], bits[second], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            both_right += mine and theirs
            both_wrong += not (mine or theirs)
            total += 1
    return (both_right + wrong_equal * both_wrong) / total if total else 0.0


def _chains(profile: Profile, plan: Plan) -> list[ChainScore]:
    scores = []
    for candidate in candidate_plans(plan):
        result = simulate_plan(profile, candidate)
        scores.append(ChainScore(candidate, result["speedup"], result["plan"]["acceptance_length"]))
    return sorted(scores, key=lambda each: -each.speedup)


def candidate_plans(plan: Plan) -> Iterator[Plan]:
    """Plain decoding, and every chain of one or two of the plan's drafters, in their order, with several windows."""
    yield plan.replace(chain=[plan.target.model_dump()], mode=Mode.PLAIN.value)
    for count in (1, 2):
        for drafters in itertools.combinations(plan.drafters, count):
            neural = [stage for stage in drafters if not stage.is_ngram]
            for windows in itertools.product(*(_windows(stage) for stage in drafters)):
                stages = [
                    {**stage.model_dump(), "window": window, "min_drafts": 1}
                    for stage, window in zip(drafters, windows, strict=True)
                ]
                for mode in (Mode.LOCKSTEP, Mode.ASYNC) if neural else (Mode.LOCKSTEP,):
                    yield plan.replace(chain=[*stages, plan.target.model_dump()], mode=mode.value)


def _windows(stage: StagePlan) -> tuple[int, ...]:
    return (WINDOWS[-1],) if stage.is_ngram else (2, 4, 6)
