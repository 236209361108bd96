"""Steps of one device and of N replicas, compared: what differs by more than rounding explains.

Rounding is magnified by some models. How much, a run shows whose weights and data were disturbed
in their last digits; a difference counts when it is many times as large.
"""

import numpy as np

from keras_replicator.verify.report import QUANTITIES, Difference

# How many times as large as those of the disturbed run differences may be.
_MARGIN = 50.0
# And how large at most, whatever the disturbed run does.
_MOST = 1e-2


def differences(expected, actual):
    """Returns `{quantity: {name: [relative difference in each step]}}`."""
    found = {}
    for one, many in zip(expected, actual):
        for quantity in QUANTITIES:
            known, other = getattr(one, quantity), getattr(many, quantity)
            largest = max((_largest(_first(v)) for v in known.values()), default=0.0)
            for name, value in known.items():
                difference = np.inf
                if name in other:
                    scale = max(_largest(_first(value)), _least(quantity, largest))
                    difference = _difference(_first(value), other[name], scale)
                found.setdefault(quantity, {}).setdefault(name, []).append(difference)
    return found


def compare(expected, actual, noise, floor):
    """Returns `{quantity: Difference}`, the worst of each quantity.

    Args:
        expected: List of `Step` of one device.
        actual: The same of N replicas.
        noise: `differences` that rounding makes.
        floor: Relative difference that is allowed in any case.
    """
    worst = {}
    for quantity, names in differences(expected, actual).items():
        for name, values in names.items():
            rounding = noise.get(quantity, {}).get(name, [])
            for step, value in enumerate(values):
                own = rounding[step] if step < len(rounding) else 0.0
                allowed = min(max(floor, _MARGIN * own), max(_MOST, floor))
                if quantity == "weights" and own > _MOST:
                    allowed = _MARGIN * own  # a gradient of zero, whose sign is rounding
                found = Difference(float(value), float(allowed), name, step)
                if quantity not in worst or _badness(found) > _badness(worst[quantity]):
                    worst[quantity] = found
    return worst


def _badness(difference):
    return difference.value / difference.allowed


def _first(value):
    return value[0] if isinstance(value, tuple) else value


def _largest(array):
    array = np.abs(np.asarray(array, np.float64))
    return float(array[np.isfinite(array)].max(initial=0.0))


def _least(quantity, largest):
    """The scale below which a tensor is compared with the others of its quantity."""
    return max(1e-2 * largest, 1e-12) if quantity in ("gradient", "weights") else 1e-4


def _difference(value, other, scale):
    copies = other if isinstance(other, tuple) else (other,)
    value = np.asarray(value, np.float64)
    worst = 0.0
    for copy in copies:
        copy = np.asarray(copy, np.float64)
        if copy.shape != value.shape:
            return np.inf
        with np.errstate(invalid="ignore"):
            apart = np.where(
                (value == copy) | (np.isnan(value) & np.isnan(copy)), 0.0, np.abs(value - copy)
            )
        apart = np.where(np.isnan(apart), np.inf, apart)
        worst = max(worst, float(apart.max(initial=0.0)) / scale)
    return worst
