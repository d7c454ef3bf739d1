import numpy as np
import pytest

from autopipe.envs.prompt_kinds import PromptKind
from autopipe.policies.beliefs import UNKNOWN_AGREEMENT, Beliefs, agreement_from_counts
from autopipe.policies.predict import Machine
from tests.policies.helpers import MEDIUM, SMALL, action, info, situation

OFF = action(0)


def beliefs(*, profiled: bool = True) -> Beliefs:
    made = situation()
    machine = Machine.of(made.profile, made.codec)  # type: ignore[arg-type]
    if not profiled:
        made = type(made)(made.config, made.codec, None)
    return Beliefs(made, machine)


def scored(share: float) -> dict[str, float]:
    return {"ngram": 0.2, "small": share, "medium": 0.9}


def test_at_first_the_profile_is_believed() -> None:
    believed = beliefs().agreement(PromptKind.CODE)
    assert believed[0].tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_without_a_profile_a_middling_agreement_is_believed() -> None:
    assert beliefs(profiled=False).agreement()[0].tolist() == [UNKNOWN_AGREEMENT] * 3


def test_drafters_that_do_not_draft_are_learned_from_full_information() -> None:
    mine = beliefs()
    for _ in range(30):
        mine.update(info(OFF, agreement=scored(0.3)), OFF)
    assert mine.agreement(PromptKind.CHAT)[0, SMALL] == pytest.approx(0.3, abs=0.02)


def test_kinds_of_text_are_kept_apart() -> None:
    mine = beliefs()
    before = mine.agreement(PromptKind.CODE)[0, SMALL]
    for _ in range(30):
        mine.update(info(OFF, agreement=scored(0.3)), OFF)
    assert mine.agreement(PromptKind.CODE)[0, SMALL] == before


def test_a_sudden_change_is_believed_within_a_few_intervals() -> None:
    mine = beliefs()
    for _ in range(60):
        mine.update(info(OFF, agreement=scored(0.8)), OFF)
    for _ in range(3):
        mine.update(info(OFF, agreement=scored(0.2)), OFF)
    assert mine.agreement(PromptKind.CHAT)[0, SMALL] < 0.35


def test_agreement_is_inferred_from_accepted_drafts_where_nobody_scores() -> None:
    mine, chain = beliefs(), action(2, (2, 2, 2))
    # 10 verifications of 4 drafts; at 0.5 agreement 0.9375 are accepted each
    counts = {"room": np.array([0, 40.0, 0]), "proposed": np.array([0, 40.0, 0]), "accepted": np.array([0, 9.4, 0])}
    for _ in range(40):
        mine.update(info(chain, **counts), chain)
    assert mine.agreement(PromptKind.CHAT)[0, SMALL] == pytest.approx(0.5, abs=0.03)


def test_an_adapters_agreement_is_its_own() -> None:
    mine, chain = beliefs(), action(2, (2, 2, 2), adapter=1)
    counts = {"room": np.array([0, 40.0, 0]), "proposed": np.array([0, 40.0, 0]), "accepted": np.array([0, 9.4, 0])}
    for _ in range(40):
        mine.update(info(chain, agreement=scored(0.6), **counts), chain)
    believed = mine.agreement(PromptKind.CHAT)
    assert believed[1, SMALL] == pytest.approx(0.5, abs=0.03)
    assert believed[0, SMALL] == pytest.approx(0.6, abs=0.02)


def test_what_nobody_confirms_returns_to_the_profile() -> None:
    mine = beliefs()
    for _ in range(30):
        mine.update(info(OFF, agreement=scored(0.2)), OFF)
    for _ in range(600):
        mine.update(info(OFF), OFF)
    assert mine.agreement(PromptKind.CHAT)[0, SMALL] == pytest.approx(0.6, abs=0.03)


def test_a_slow_stage_is_noticed_at_once() -> None:
    mine = beliefs()
    mine.update(info(OFF, step_s=np.array([0, 0, 0, 0.02])), OFF)  # the target: 10 ms in the profile
    assert mine.slow_down[-1] == pytest.approx(2.0, rel=0.01)


def test_more_rows_are_not_taken_for_slowness() -> None:
    mine, chain = beliefs(), action(2, (2, 3, 2))
    counts = {"room": np.array([0, 80.0, 0]), "proposed": np.array([0, 70.0, 0]), "accepted": np.array([0, 20.0, 0])}
    mine.update(info(chain, step_s=np.array([0, 0.001, 0, 0.012]), **counts), chain)  # 8 rows: 12 ms in the profile
    assert mine.slow_down.tolist() == pytest.approx([1, 1, 1, 1], abs=0.02)


def test_a_slow_drafter_that_no_longer_runs_is_given_another_chance() -> None:
    mine, chain = beliefs(), action(4)
    mine.update(info(chain, step_s=np.array([0, 0, 0.009, 0.01])), chain)
    slow = mine.slow_down[MEDIUM]
    for _ in range(40):
        mine.update(info(OFF, step_s=np.array([0, 0, 0, 0.01])), OFF)
    assert slow == pytest.approx(3.0, rel=0.01)
    assert mine.slow_down[MEDIUM] < 1.2


def test_intervals_without_decoding_teach_nothing() -> None:
    mine = beliefs()
    before = mine.agreement(PromptKind.CHAT).copy()
    mine.update(info(OFF, tokens=0, agreement=scored(0.1)), OFF)
    assert (mine.agreement(PromptKind.CHAT) == before).all()


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafts", [1.0, 4.0, 16.0])
def test_agreement_from_counts_inverts_the_expected_number_of_accepted_drafts(share: float, drafts: float) -> None:
    accepted = share * (1 - share**drafts) / (1 - share)
    assert agreement_from_counts(accepted, drafts) == pytest.approx(share, abs=2e-3)


def test_all_accepted_is_full_agreement() -> None:
    assert agreement_from_counts(4.0, 4.0) == 1.0
