"""n-step transitions: what an actor hands over to the replay."""

import collections

import numpy as np


class NStep:
    """Turns the steps of an episode into transitions over n steps.

    A transition from step t has `reward`, the discounted sum of the rewards, and `discount`, by
    which the value of `next_observation` is multiplied:

        reward   = sum over k < m of discount^k * (d_t … d_t+k-1) * r_t+k
        discount = discount^m * d_t … d_t+m-1

    with the environment's own discounts d (0 where an episode ends for good, 1 where it is only
    cut off). m is n; at the end of an episode the last transitions are shorter.

    Args:
        n: steps of a transition.
        discount: factor per step.

    Example:

    >>> steps = NStep(n=2, discount=0.5)
    >>> steps.begin(observation=0)
    >>> steps.add(action=1, reward=4.0, discount=1.0, observation=10, last=False)
    []
    >>> [first, second] = steps.add(action=2, reward=6.0, discount=1.0, observation=20, last=True)
    >>> first["reward"], first["discount"], first["next_observation"]
    (7.0, 0.25, 20)
    >>> second["reward"], second["discount"], second["observation"]
    (6.0, 0.5, 10)
    """

    def __init__(self, n, discount):
        self._n = n
        self._discount = discount
        self._steps = collections.deque()  # (observation, action, reward, discount)
        self._observation = None

    def begin(self, observation):
        """Begins an episode."""
        self._steps.clear()
        self._observation = observation

    def add(self, action, reward, discount, observation, last):
        """Takes one step and returns the transitions that are complete with it.

        Args:
            action: what was done.
            reward: what came of it.
            discount: the environment's discount.
            observation: what was seen then.
            last: whether the episode ends.

        Returns:
            List of dicts with the keys `observation`, `action`, `reward`, `discount`,
            `next_observation`.
        """
        self._steps.append((self._observation, action, reward, discount))
        self._observation = observation
        complete = []
        while self._steps and (last or len(self._steps) == self._n):
            complete.append(self._transition(observation))
            self._steps.popleft()
        return complete

    def _transition(self, next_observation):
        observation, action, _, _ = self._steps[0]
        total, factor = 0.0, 1.0
        for _, _, reward, discount in self._steps:
            total += factor * reward
            factor *= self._discount * discount
        return {
            "observation": observation,
            "action": action,
            "reward": total,
            "discount": factor,
            "next_observation": next_observation,
        }


def stack(transitions):
    """Returns one dict of arrays `[n, ...]` for a list of n transitions."""
    first = transitions[0]
    floats = {"reward": np.float32, "discount": np.float32}
    return {
        name: np.stack([np.asarray(each[name], floats.get(name)) for each in transitions])
        for name in first
    }
