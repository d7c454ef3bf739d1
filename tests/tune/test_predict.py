from __future__ import annotations

import pytest

from autopipe.profile import simulate_plan
from autopipe.tune.predict import PowerModel, Predictor, plain_plan
from tests.profile.samples import sample_profile
from tests.tune.scenes import space

NGRAM = {**space().defaults(), "use.ngram": True}


def test_a_prediction_is_what_simulate_says() -> None:
    plan = space().plan({**space().defaults(), "use.small": True})
    found = Predictor(sample_profile()).predict(plan)

    assert found.ms_per_token == pytest.approx(simulate_plan(sample_profile(), plan)["plan"]["ms_per_token"])
    assert found.tokens_per_s == pytest.approx(1e3 / found.ms_per_token)
    assert found.slow_ms_per_token >= found.ms_per_token * 0.5


def test_other_ngram_options_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopipe.tune import predict

    replayed = []
    original = predict.replay
    monkeypatch.setattr(predict, "replay", lambda *args: replayed.append(args[0]) or original(*args))
    predictor = Predictor(sample_profile())
    for window in (3, 5, 7):
        for gate in (False, True):
            predictor.predict(space().plan({**NGRAM, "ngram.max_order": 4, "ngram.gate": gate, "window.ngram": window}))

    assert len(replayed) == 1


def test_memory_counts_every_neural_stage_and_the_longest_cache() -> None:
    predictor = Predictor(sample_profile())
    both = space().plan({**space().defaults(), "use.small": True})

    assert predictor.memory_bytes(plain_plan(both)) == {"cpu": 4096 + 8 * 28}
    assert predictor.memory_bytes(both) == {"cpu": 2 * (4096 + 8 * 28)}


def test_energy_is_known_only_with_a_power_model() -> None:
    plan = space().plan(space().defaults())
    without = Predictor(sample_profile()).predict(plan)
    found = Predictor(sample_profile(), PowerModel(10.0, 5.0)).predict(plan)

    assert without.j_per_token is None
    assert found.j_per_token is not None
    # at most idle power and both cores all the time
    assert 10 * found.ms_per_token / 1e3 < found.j_per_token <= 20 * found.ms_per_token / 1e3 + 1e-9


def test_plain_decoding_of_a_plan_is_its_target_alone() -> None:
    plan = plain_plan(space().plan({**NGRAM, "warmup": "conservative"}))

    assert len(plan.chain) == 1
    assert plan.mode == "plain"
