import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.ngram_calibration import Calibration


def logit(chance):
    return math.log(chance / (1 - chance))


def test_prior_weights_add_up():
    assert Calibration([1.0, -2.0, 0.5]).confidence((0, 2)) == pytest.approx(1 / (1 + math.exp(-1.5)))


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.95])
def test_confidence_converges_to_the_rate_of_success(chance):
    rng = random.Random(0)
    calibration = Calibration([0.0] * 4)
    confidences = []
    for _ in range(4000):
        confidences.append(calibration.confidence((0, 2)))
        calibration.learn((0, 2), rng.random() < chance)
    assert sum(confidences[1000:]) / 3000 == pytest.approx(chance, abs=0.03)


def test_classes_are_told_apart():
    rng = random.Random(0)
    calibration = Calibration([0.0] * 4)
    for _ in range(6000):
        easy, long = rng.random() < 0.5, rng.random() < 0.5
        classes = (int(easy), 2 + int(long))
        calibration.learn(classes, rng.random() < 1 / (1 + math.exp(-(3 * easy + 2 * long - 3))))
    for easy in (0, 1):
        for long in (0, 1):
            confidence = calibration.confidence((easy, 2 + long))
            assert logit(confidence) == pytest.approx(3 * easy + 2 * long - 3, abs=0.5)


def test_unseen_classes_keep_their_prior():
    calibration = Calibration([0.0, 1.0, 0.3])
    calibration.learn((0,), True)
    assert calibration.confidence((1, 2)) == Calibration([0.0, 1.0, 0.3]).confidence((1, 2))


def test_it_follows_a_change():
    calibration = Calibration([0.0])
    for _ in range(2000):
        calibration.learn((0,), True)
    for _ in range(400):
        calibration.learn((0,), False)
    assert calibration.confidence((0,)) < 0.2


@given(st.lists(st.booleans(), max_size=300), st.floats(-100, 100))
def test_confidence_stays_strictly_between_0_and_1(outcomes, prior):
    calibration = Calibration([prior])
    for right in outcomes:
        calibration.learn((0,), right)
    assert 0 < calibration.confidence((0,)) < 1
