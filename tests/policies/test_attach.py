"""A policy through the Python API."""

import pytest

from autopipe import AutoPipe
from autopipe.core.errors import ConfigError
from autopipe.core.sampling import SamplingParams
from autopipe.envs.prompt_kinds import PromptKind
from autopipe.policies.attach import attach_policy
from tests.envs.scenes import emulated_plan

PROMPT = [5, 6, 7]


def test_generate_with_a_policy_gives_the_output_of_plain_decoding() -> None:
    with AutoPipe.from_plan(emulated_plan(), telemetry=False) as pipe:
        plain = pipe.generate(input_ids=PROMPT, max_new_tokens=120).token_ids
        assert pipe.controller is None
        with_policy = [pipe.generate(input_ids=PROMPT, max_new_tokens=120, policy="bandit").token_ids for _ in range(3)]
        assert with_policy == [plain] * 3
        assert pipe.controller is not None
        assert pipe.controller.status()["policy"] == "bandit"
        pipe.set_policy(None)
        assert pipe.controller is None


def test_from_plan_takes_a_policy_and_close_ends_it() -> None:
    pipe = AutoPipe.from_plan(emulated_plan(), telemetry=False, policy="rules")
    controller = pipe.controller
    assert controller is not None
    assert controller.status()["active"]
    pipe.close()
    assert not controller.status()["active"]


def test_an_unknown_policy_is_refused_before_it_changes_anything() -> None:
    with AutoPipe.from_plan(emulated_plan(), telemetry=False) as pipe:
        with pytest.raises(ConfigError, match="policy"):
            pipe.generate(input_ids=PROMPT, max_new_tokens=4, policy="clever")
        assert pipe.controller is None


def test_kinds_of_prompts_are_guessed_from_their_text() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], **_: object) -> str:
            return "Summarise this text, please." if ids[0] == PROMPT[0] else "Hello there."

    with (
        AutoPipe.from_plan(emulated_plan(), telemetry=False) as pipe,
        attach_policy(pipe.engine, "off", tokenizer=Tokenizer(), interval_tokens=8) as controller,
    ):
        kind_of = controller._watch._kind_of
        assert kind_of is not None
        heard = [kind_of(PROMPT), kind_of([1])]
        pipe.engine.submit(PROMPT, SamplingParams(max_new_tokens=8)).outcome()
    assert heard == [PromptKind.SUMMARY, PromptKind.CHAT]
