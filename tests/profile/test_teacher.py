from __future__ import annotations

from autopipe.core.backends.emulated import EmulatedBackend
from autopipe.core.plan import EmulatedStage
from autopipe.envs.simulator import emulated_agreement
from autopipe.profile.teacher import forced_picks, greedy_output
from tests.core.pipeline import emulated, plain_output
from tests.profile.samples import ScriptedBackend

PROMPT = [1, 2, 3, 4, 5]


def test_greedy_output_is_that_of_the_engine() -> None:
    found = greedy_output(emulated(), PROMPT, 40, ())

    assert found["token_ids"] == plain_output(40)
    assert found["finish_reason"] == "length"


def test_greedy_output_ends_at_eos_and_keeps_it() -> None:
    text = [*PROMPT, 7, 8, 99, 9]
    found = greedy_output(ScriptedBackend(text), PROMPT, 40, (99,))

    assert (found["token_ids"], found["finish_reason"]) == ([7, 8, 99], "stop")


def test_greedy_output_ends_at_the_end_of_the_context() -> None:
    assert len(greedy_output(ScriptedBackend([], max_length=8), PROMPT, 40, ())["token_ids"]) == 3


def test_forced_picks_agree_exactly_where_the_emulated_drafter_does() -> None:
    output = plain_output(100)
    spec = EmulatedStage.parse({"ms": {1: 0}, "agreement": 0.6, "seed": 0, "vocab_size": 64})
    picks = forced_picks(EmulatedBackend(spec), PROMPT, output, 64)

    agrees = [pick == token for pick, token in zip(picks, output, strict=True)]
    assert agrees == emulated_agreement(spec, len(PROMPT), 100).tolist()


def test_the_target_agrees_with_itself() -> None:
    output = plain_output(70)

    assert forced_picks(emulated(), PROMPT, output, 64) == output


def test_positions_beyond_the_drafters_context_are_no_pick() -> None:
    output = [7, 8, 9, 10]
    picks = forced_picks(ScriptedBackend([*PROMPT, *output], max_length=6), PROMPT, output, 100)

    assert picks == [7, 8, -1, -1]


def test_a_prompt_beyond_the_drafters_context_gives_no_picks() -> None:
    assert forced_picks(ScriptedBackend([], max_length=3), PROMPT, [1, 2], 100) == [-1, -1]


def test_tokens_that_the_target_lacks_are_never_picked() -> None:
    output = [90, 91]

    assert forced_picks(ScriptedBackend([*PROMPT, *output]), PROMPT, output, 50) == [0, 0]
