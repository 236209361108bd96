"""One actor: acts with noise, and hands n-step transitions to the learner's replay.

The learner starts it (`actors.py`), again when it dies, and it ends when the learner is gone. For
states it acts in NumPy and never imports TensorFlow.
"""

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import numpy as np  # noqa: E402

from d4pg.environments import make_environment  # noqa: E402
from d4pg.exchange import connect  # noqa: E402
from d4pg.n_step import NStep, stack  # noqa: E402
from d4pg.policies import explore, make_policy  # noqa: E402


def act(exchange, number, seed, steps=None):
    """Acts until the learner is gone, or for a number of steps.

    Args:
        exchange: the `Exchange`, or a proxy of it.
        number: number of this actor.
        seed: seed of environment and noise.
        steps: steps of the agent, or None for no end.
    """
    config = exchange.get_config()
    environment = make_environment(config, seed)
    random = np.random.default_rng(seed)
    policy = make_policy(config, environment.spec)
    version, weights = exchange.fetch_weights()
    policy.load(weights)
    n_step = NStep(config.n_step, config.discount)
    transitions, returns, made, last = [], [], 0, True
    while steps is None or made < steps:
        if last:
            observation, total = environment.reset(), 0.0
            n_step.begin(observation)
        action = explore(policy(observation), config.noise, random)
        observation, reward, discount, last = environment.step(action)
        transitions += n_step.add(action, reward, discount, observation, last)
        total += reward
        made += 1
        if last:
            returns.append(total)
        if len(transitions) >= config.insert_every:
            exchange.insert(number, stack(transitions), returns, version)
            transitions, returns = [], []
        if made % config.fetch_every == 0:
            version, weights = exchange.fetch_weights(version)
            if weights is not None:
                policy.load(weights)


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", required=True, metavar="HOST:PORT")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    host, port = arguments.address.rsplit(":", 1)
    try:
        exchange = connect((host, int(port)), bytes.fromhex(os.environ["D4PG_KEY"]))
        act(exchange, arguments.number, arguments.seed)
    except (EOFError, ConnectionError):
        print(f"actor {arguments.number}: the learner is gone", file=sys.stderr)


if __name__ == "__main__":
    main()
