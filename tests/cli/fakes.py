"""A stand-in for `AutoPipe` that loads nothing and answers at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autopipe.api import GenerationResult, StreamDelta
from autopipe.core.plan import Plan
from autopipe.core.stats import RequestStats, StageReport

REPORT = StageReport(
    name="ngram",
    forwards=0,
    proposed=10,
    accepted=6,
    acceptance_rate=0.6,
    emitted=10,
    rollbacks=1,
    busy_s=0.1,
    waiting_s=0.2,
    catch_up_s=0.0,
    overhead_s=0.0,
    bytes_out=40,
)


class FakeTokenizer:
    """Bytes are tokens."""

    chat_template: str | None = "{{ messages }}"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        return "".join(message["content"] for message in messages)


@dataclass
class FakePipe:
    """Answers `words` whatever it is asked, and remembers what that was."""

    plan: Plan
    words: tuple[str, ...] = ("Hello", ", ", "world")
    error: BaseException | None = None
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    requests: list[dict[str, Any]] = field(default_factory=list)
    applied: list[Plan] = field(default_factory=list)
    closed: bool = False

    def __enter__(self) -> FakePipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def apply(self, plan: Plan) -> None:
        self.plan = plan
        self.applied.append(plan)

    def generate(self, prompt: str | None = None, **request: Any) -> GenerationResult:
        if self.error is not None:
            raise self.error
        self.requests.append({"prompt": prompt, **request})
        stats = RequestStats(total_s=0.5, ttft_s=0.1, ms_per_token=8.0, acceptance_length=3.0, stages=[REPORT])
        return GenerationResult(
            text="".join(self.words),
            token_ids=list(range(len(self.words))),
            finish_reason="stop",
            prompt_ids=[1, 2, 3, 4],
            logprobs=None,
            stats=stats,
            plan=self.plan,
        )

    def stream(self, **request: Any) -> Iterator[StreamDelta]:
        result = self.generate(**request)
        for index, word in enumerate(self.words):
            last = index == len(self.words) - 1
            yield StreamDelta(word, [index], result=result if last else None)
