from __future__ import annotations

from autopipe.core.ngram import NgramDrafter
from autopipe.core.plan import NgramOptions
from autopipe.profile import PromptRecord
from autopipe.profile.ngram_replay import replay
from tests.profile.samples import LOOP, PROMPT, prompt_records


def test_offers_are_those_of_the_drafter_at_each_position() -> None:
    offer = replay(NgramOptions(), prompt_records()[:1]).prompts[0]
    drafter = NgramDrafter(NgramOptions())
    for position in range(1, len(LOOP)):
        text = [*PROMPT, *LOOP[:position]]
        drafter.sync(text, 0 if position == 1 else len(text) - 1)
        draft = drafter.draft(32)
        assert offer.length[position] == len(draft.token_ids)
        assert offer.confidence[position] == tuple(round(value, 4) for value in draft.confidence)


def test_right_counts_drafts_up_to_the_first_wrong_one() -> None:
    offer = replay(NgramOptions(), prompt_records()[:1]).prompts[0]

    assert offer.right[8] == 3  # after 1 2 3 4 1 2 3 4: 1 2 3, then 9 where the drafter says 4
    assert offer.right[11] == 0


def test_nothing_is_offered_for_the_first_token() -> None:
    offer = replay(NgramOptions(), prompt_records()[:1]).prompts[0]

    assert (offer.length[0], offer.right[0], offer.confidence[0]) == (0, 0, ())


def test_a_prompt_starts_without_the_text_of_the_last() -> None:
    record = prompt_records()[0]
    fresh = PromptRecord(**{**record.model_dump(), "prompt_ids": (50,), "output_ids": (51, 1, 2, 60)})
    offer = replay(NgramOptions(), [record, fresh]).prompts[1]

    assert offer.length[:3] == (0, 0, 0)


def test_replay_is_the_same_every_time() -> None:
    first, second = (replay(NgramOptions(), prompt_records()) for _ in range(2))

    assert first.prompts == second.prompts
