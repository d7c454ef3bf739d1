"""`autopipe profile` without the terminal: measure a plan's stages, section by section, and write one file."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autopipe.core.affinity import usable_cores
from autopipe.core.chain import neural_stages
from autopipe.core.errors import ConfigError
from autopipe.core.plan import Mode, NgramOptions, Plan
from autopipe.profile.candidates import Candidate, candidates, pairs
from autopipe.profile.contention import slow_down
from autopipe.profile.identity import content_hash, describe_machine, digest, model_digest
from autopipe.profile.model import Profile, PromptRecord, Settings
from autopipe.profile.process import StageProcess
from autopipe.profile.sections import Sections

VERIFY_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PREFILL_TOKENS = (16, 64, 256, 1024)
CATCH_UP_TOKENS = (16, 64)
CONTEXTS = (64, 384, 1024)
REPEATS = 5
PREFILL_REPEATS = 2
_MIN_OUTPUT = 8
"""Tokens of the target's context that a prompt must leave free."""

Advance = Callable[[str, float], None]
"""Told what begins, and the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ProfilePrompt:
    """A prompt as the target sees it. `kind` groups prompts that behave alike (code, chat, ...)."""

    name: str
    kind: str
    ids: tuple[int, ...]


def default_threads(cores: int | None = None) -> tuple[int, ...]:
    """1, 2, 4, ... up to all of so many cores; None: those this process may use."""
    cores = usable_cores() if cores is None else cores
    counts = [1]
    while 2 * counts[-1] <= cores:
        counts.append(2 * counts[-1])
    return tuple(dict.fromkeys([*counts, cores]))


def profile_plan(
    plan: Plan,
    prompts: Sequence[ProfilePrompt],
    output: str | Path,
    *,
    prompt_sets: Sequence[str] = ("custom",),
    eos_token_ids: Sequence[int] = (),
    threads: Sequence[int] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    verify_tokens: Sequence[int] = VERIFY_TOKENS,
    repeats: int = REPEATS,
    max_new_tokens: int = 128,
    resume: bool = True,
    advance: Advance = lambda label, share: None,
) -> Profile:
    """Measure every stage of `plan`, write the profile to `output` and return it.

    Every finished section is on disk (`<output>.partial`), so an interrupted call, made again, goes on where
    it was, provided that settings, models, prompts and machine are the same.

    Args:
        prompt_sets: how the prompts were chosen, for the record.
        eos_token_ids: that end the target's text.
        threads: thread counts to measure; None: `default_threads`.
        resume: false: ignore what an interrupted call left.

    Raises:
        ConfigError: no prompts, a setting out of range, or `output` cannot be written.
        AutoPipeError: a stage cannot be loaded, or fails.
    """
    if not prompts:
        raise ConfigError("--prompts", [], "at least one prompt")
    path = Path(output)
    if not path.resolve().parent.is_dir():
        raise ConfigError("--out", str(output), "a file in a folder that exists")
    found = candidates(plan)
    settings = Settings.parse(
        {
            "plan": plan,
            "threads": tuple(threads) if threads is not None else default_threads(),
            "contexts": tuple(contexts),
            "verify_tokens": tuple(verify_tokens),
            "prefill_tokens": PREFILL_TOKENS,
            "repeats": repeats,
            "prompts": tuple(prompt_sets),
            "max_new_tokens": max_new_tokens,
            "models": {each.name: model_digest(each.stage) for each in found if each.is_first},
            "prompts_digest": digest([[prompt.kind, list(prompt.ids)] for prompt in prompts]),
        }
    )
    machine = describe_machine()
    code = content_hash(settings, machine)
    sections = Sections(path, code, resume=resume)
    with _Measurement(settings, found, prompts, tuple(eos_token_ids), sections, advance) as measurement:
        data = measurement.measure()
    profile = Profile.parse(
        {
            "content_hash": code,
            "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine,
            "settings": settings,
            **data,
        }
    )
    sections.finish(profile.model_dump(mode="json"))
    return profile


class _Measurement:
    """One call of `profile_plan`: processes are started when a section needs them and live to the end."""

    def __init__(
        self,
        settings: Settings,
        found: list[Candidate],
        prompts: Sequence[ProfilePrompt],
        eos: tuple[int, ...],
        sections: Sections,
        advance: Advance,
    ) -> None:
        self._settings = settings
        self._found = found
        self._target = found[-1]
        self._prompts = prompts
        self._eos = eos
        self._sections = sections
        self._advance = advance
        self._processes: dict[int, StageProcess] = {}
        self._facts: dict[int, dict[str, Any]] = {}
        self._done_weight = 0.0
        self._whole_weight = 1.0

    def __enter__(self) -> _Measurement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def measure(self) -> dict[str, Any]:
        """All sections; fields of `Profile`."""
        firsts = [each for each in self._found if each.is_first]
        drafters = self._found[:-1]
        distinct = [each for each in firsts if any(other.measured_as == each.name for other in drafters)]
        together = list(pairs(self._found))
        self._whole_weight = (
            len(firsts) * (3 + 8 * len(self._settings.threads))
            + len(self._prompts) * (1.2 + 0.3 * len(distinct))
            + 1
            + 4 * len(together)
            + 8
        )
        stages = [self._stage(each) for each in firsts]
        outputs = [self._output(index) for index in range(len(self._prompts))]
        records = [PromptRecord.parse(output["record"]) for output in outputs]
        picks = {each.name: self._picks(each, records) for each in distinct}
        options = next((stage.ngram_options() for stage in self._settings.plan.chain if stage.is_ngram), NgramOptions())
        ngram = self._section("ngram", "n-gram drafter", 1, lambda: self._ngram(options, records))
        contention = [entry for pair in together for entry in self._contention(*pair)]
        self._close()  # the engine loads the stages again
        pick_s = statistics.median(output["pick_s"] for output in outputs)
        engine = self._section("engine", "engine", 8, lambda: self._engine(records, pick_s))
        self._advance("done", 1.0)
        return {
            "took_s": self._sections.took_s,
            "stages": stages,
            "prompts": records,
            "agreement": [_agreement(name, picks, records) for name in picks],
            "ngram": ngram,
            "contention": contention,
            "engine": engine,
        }

    # -- sections -------------------------------------------------------------------------------------------

    def _section(self, name: str, label: str, weight: float, measure: Callable[[], Any]) -> Any:
        self._advance(label, min(1.0, self._done_weight / self._whole_weight))
        result = self._sections.get(name, measure)
        self._done_weight += weight
        return result

    def _stage(self, each: Candidate) -> dict[str, Any]:
        facts = self._section(f"stage {each.name}", f"load {each.name}", 3, lambda: self._load(each))
        curves = [
            self._section(
                f"curves {each.name} {threads}",
                f"{each.name} on {threads} thread{'s' if threads > 1 else ''}",
                8,
                lambda threads=threads: self._curves(each, facts, threads),  # type: ignore[misc]
            )
            for threads in self._thread_counts(facts)
        ]
        return {"name": each.name, "stage": each.stage.model_copy(update={"name": None}), **facts, "curves": curves}

    def _thread_counts(self, facts: dict[str, Any]) -> tuple[int, ...]:
        """On a GPU the CPU's threads hardly matter: one count is enough."""
        threads = self._settings.threads
        return threads if facts["device"] in ("", "cpu") else (max(threads),)

    def _load(self, each: Candidate) -> dict[str, Any]:
        process = self._process(each)
        return {**self._facts[each.index], "memory": process.ask("memory")}

    def _curves(self, each: Candidate, facts: dict[str, Any], threads: int) -> dict[str, Any]:
        process, settings = self._process(each), self._settings
        process.ask("set_threads", threads=threads)
        # A context that the stage cannot hold is no context of its; the shortest always counts.
        contexts = [c for c in sorted(settings.contexts) if c < facts["max_length"]] or [
            max(1, facts["max_length"] // 2)
        ]
        found = process.ask("verify", contexts=contexts, tokens=list(settings.verify_tokens), repeats=settings.repeats)
        catch_up = process.ask("prefill", context=contexts[0], tokens=list(CATCH_UP_TOKENS), repeats=PREFILL_REPEATS)
        prompts = [n for n in settings.prefill_tokens if n <= facts["max_length"]] or [1]
        prefill = process.ask("prefill", context=0, tokens=prompts, repeats=PREFILL_REPEATS)
        return {
            "threads": threads,
            "verify": found["verify"],
            "prefill": prefill,
            "catch_up": [*catch_up, *found["catch_up"]],
        }

    def _output(self, index: int) -> dict[str, Any]:
        prompt = self._prompts[index]
        label = f"output {index + 1} of {len(self._prompts)}"

        def measure() -> dict[str, Any]:
            process = self._process(self._target)
            longest = self._facts[self._target.index]["max_length"] - _MIN_OUTPUT
            if len(prompt.ids) > longest:
                raise ConfigError("--prompts", f"{prompt.name} ({len(prompt.ids)} tokens)", f"at most {longest} tokens")
            process.ask("set_threads", threads=max(self._settings.threads))
            found = process.ask(
                "greedy", prompt=list(prompt.ids), max_new_tokens=self._settings.max_new_tokens, eos=list(self._eos)
            )
            record = {
                "name": prompt.name,
                "kind": prompt.kind,
                "prompt_ids": list(prompt.ids),
                "output_ids": found["token_ids"],
                "finish_reason": found["finish_reason"],
                "decode_s": found["decode_s"],
            }
            return {"record": record, "pick_s": found["pick_s"]}

        result: dict[str, Any] = self._section(f"output {index}", label, 1.2, measure)
        return result

    def _picks(self, each: Candidate, records: Sequence[PromptRecord]) -> list[list[int]]:
        def measure() -> list[list[int]]:
            process = self._process(each)
            self._process(self._target)
            vocab_size = self._facts[self._target.index]["vocab_size"]
            process.ask("set_threads", threads=max(self._settings.threads))
            return [
                process.ask("picks", prompt=record.prompt_ids, output=record.output_ids, vocab_size=vocab_size)
                for record in records
            ]

        weight = 0.3 * len(records)
        result: list[list[int]] = self._section(f"picks {each.name}", f"agreement of {each.name}", weight, measure)
        return result

    def _ngram(self, options: NgramOptions, records: Sequence[PromptRecord]) -> dict[str, Any]:
        from autopipe.profile.ngram_replay import replay

        return replay(options, records).model_dump(mode="json")

    def _contention(self, upstream: Candidate, downstream: Candidate) -> list[dict[str, Any]]:
        share = max(1, usable_cores() // len(neural_stages(self._settings.plan)))

        def measure() -> list[dict[str, Any]]:
            first, second = self._process(upstream), self._process(downstream)
            for process in (first, second):
                process.ask("set_threads", threads=share)
            factors = slow_down(first, second, context=min(self._settings.contexts))
            names = (upstream.measured_as, downstream.measured_as)
            return [
                {"stage": names[0], "other": names[1], "threads": share, "factor": factors[0]},
                {"stage": names[1], "other": names[0], "threads": share, "factor": factors[1]},
            ]

        name = f"contention {upstream.name} {downstream.name}"
        result: list[dict[str, Any]] = self._section(name, f"{upstream.name} beside {downstream.name}", 4, measure)
        return result

    def _engine(self, records: Sequence[PromptRecord], pick_s: float) -> dict[str, Any]:
        from autopipe.profile.engine_costs import measure_engine

        shortest = min(records, key=lambda record: len(record.prompt_ids))
        plan = self._settings.plan.replace(mode=Mode.LOCKSTEP)
        return measure_engine(plan, shortest.prompt_ids, pick_s).model_dump(mode="json")

    # -- processes ------------------------------------------------------------------------------------------

    def _process(self, each: Candidate) -> StageProcess:
        if each.index not in self._processes:
            threads = max(self._settings.threads)
            process = StageProcess(each.name, threads)
            self._processes[each.index] = process
            self._facts[each.index] = process.load(each.stage, exact=self._settings.plan.exact, threads=threads)
        return self._processes[each.index]

    def _close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()


def _agreement(name: str, picks: dict[str, list[list[int]]], records: Sequence[PromptRecord]) -> dict[str, Any]:
    """The agreement table of one drafter, and how often others pick the same wrong token."""
    texts = [record.output_ids for record in records]
    wrong_equal = {}
    for other in picks:
        both = same = 0
        for mine, theirs, text in zip(picks[name], picks[other], texts, strict=True):
            for ours, his, token in zip(mine, theirs, text, strict=True):
                if ours != token and his != token:
                    both += 1
                    same += ours == his
        if other != name and both:
            wrong_equal[other] = same / both
    agrees = [
        "".join("1" if pick == token else "0" for pick, token in zip(mine, text, strict=True))
        for mine, text in zip(picks[name], texts, strict=True)
    ]
    return {"drafter": name, "agrees": agrees, "wrong_equal": wrong_equal}
