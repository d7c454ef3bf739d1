"""The first phase: a profile of target and drafters, measured once and kept by what it depends on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from autopipe import __version__
from autopipe.bench.workload import spread
from autopipe.core.errors import ConfigError
from autopipe.core.models.cache import cache_dir
from autopipe.core.plan import MAX_STAGES, Plan, StagePlan
from autopipe.profile import Profile, ProfilePrompt, profile_plan
from autopipe.profile.identity import describe_machine, digest, model_digest

Advance = Callable[[str, float], None]
_QUICK_BELOW_S = 150.0
"""With less time than that, fewer points are measured."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: prompts, and points of the latency curves."""

    name: str
    prompts: int
    repeats: int
    contexts: tuple[int, ...]
    verify_tokens: tuple[int, ...]


FULL = Effort("full", 16, 4, (64, 384), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
QUICK = Effort("quick", 6, 2, (128,), (1, 2, 4, 8, 16, 32))


class ProfileTimeError(Exception):
    """The profile's share of the budget was over before the profile was whole; what was measured is kept."""


def cached_profile(
    target: StagePlan,
    drafters: Sequence[StagePlan],
    prompts: Sequence[ProfilePrompt],
    *,
    base: Plan,
    workload: Sequence[str],
    eos_token_ids: Sequence[int],
    max_new_tokens: int,
    budget_s: float,
    deadline_s: float,
    fresh: bool = False,
    folder: Path | None = None,
    advance: Advance = lambda label, share: None,
) -> Profile:
    """The profile of these stages on these prompts, from the cache if it was measured before.

    More drafters than a chain holds are measured in several chains, all with the target.

    Args:
        base: whose `exact` counts.
        workload: how the prompts were chosen, for the record.
        budget_s: with little time, less is measured.
        deadline_s: on the clock of `time.monotonic`.
        fresh: measure anew.
        folder: where profiles are kept; None: in AutoPipe's cache.

    Raises:
        ProfileTimeError: time is up. AutoPipeError: a stage cannot be loaded, or fails.
    """
    folder = folder or cache_dir() / "profiles"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("AUTOPIPE_CACHE", str(folder), f"a folder that can be written ({error})") from None
    effort = QUICK if budget_s < _QUICK_BELOW_S else FULL
    parts = chains(target, drafters, base)
    found: list[Profile] = []
    for place, plan in enumerate(parts):
        key = _key(plan, prompts, max_new_tokens)

        def told(label: str, share: float, done: int = place) -> None:
            if time.monotonic() > deadline_s and label != "done":
                raise ProfileTimeError
            advance(label, (done + share) / len(parts))

        def measure(plan: Plan = plan, key: str = key) -> Profile:
            return profile_plan(
                plan,
                spread(prompts, effort.prompts),
                folder / f"{key}-{effort.name}.json",
                prompt_sets=tuple(workload),
                eos_token_ids=eos_token_ids,
                contexts=effort.contexts,
                verify_tokens=effort.verify_tokens,
                repeats=effort.repeats,
                max_new_tokens=max_new_tokens,
                resume=not fresh,
                advance=told,
            )

        with _alone(folder / f".{key}.lock", deadline_s):
            found.append((None if fresh else _known(folder, key, effort)) or measure())
    return merge(found)


@contextmanager
def _alone(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold a file lock: of two calls that want the same profile one measures, and the other takes what it has found.

    Raises:
        ProfileTimeError: the other one was not done in time.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if math.isinf(deadline_s) else max(0.0, deadline_s - time.monotonic()))
    except Timeout:
        raise ProfileTimeError from None
    try:
        yield
    finally:
        lock.release()


def chains(target: StagePlan, drafters: Sequence[StagePlan], base: Plan) -> list[Plan]:
    """Plans that together have every drafter in front of the target."""
    room = MAX_STAGES - 1
    groups = [drafters[start : start + room] for start in range(0, len(drafters), room)] or [[]]
    return [Plan.parse({"exact": base.exact, "chain": [*group, target]}) for group in groups]


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile out of several with the same target and prompts.

    Figures of the target and the engine are the first one's. How two drafters of different profiles slow each other
    down was not measured, and counts as not at all.
    """
    first = profiles[0]
    if len(profiles) == 1:
        return first
    target = first.target.name
    drafters = [stage for each in profiles for stage in each.stages if stage.name != each.target.name]
    whole = [*drafters, first.target]
    engine = first.engine
    for each in profiles[1:]:
        engine = engine.replace(
            join_s={**engine.join_s, **each.engine.join_s}, leave_s={**engine.leave_s, **each.engine.leave_s}
        )
    return first.model_copy(
        update={
            "stages": tuple(whole),
            "agreement": tuple(entry for each in profiles for entry in each.agreement),
            "contention": tuple(
                entry for each in profiles for entry in each.contention if target in (entry.stage, entry.other)
            ),
            "engine": engine,
            "took_s": sum(each.took_s for each in profiles),
        }
    )


def _key(plan: Plan, prompts: Sequence[ProfilePrompt], max_new_tokens: int) -> str:
    """Of everything the figures depend on: models, prompts, machine, versions."""
    return digest(
        {
            "stages": [stage.model_dump(mode="json") for stage in plan.chain],
            "exact": plan.exact,
            "models": [model_digest(stage) for stage in plan.chain],
            "prompts": [[prompt.kind, list(prompt.ids)] for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "machine": describe_machine().fingerprint,
            "autopipe": __version__,
        }
    )


def _known(folder: Path, key: str, effort: Effort) -> Profile | None:
    """A kept profile, at least as good as wanted; one that cannot be read is measured again."""
    for name in dict.fromkeys([FULL.name, effort.name]):
        path = folder / f"{key}-{name}.json"
        if path.is_file():
            try:
                return Profile.load(path)
            except ConfigError:
                continue
    return None
