"""examples/d4pg: its parts against values worked out by hand, and the learner on N replicas."""

import dataclasses
import doctest
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from d4pg import (  # noqa: E402
    categorical,
    checkpoints,
    figures,
    limiter,
    n_step,
    networks,
    policies,
    sum_tree,
    throughput,
)
from d4pg.actor import act  # noqa: E402
from d4pg.config import PRESETS  # noqa: E402
from d4pg.environments import Environment, Reach, Spec, make_environment  # noqa: E402
from d4pg.exchange import Exchange, connect, serve  # noqa: E402
from d4pg.learner import Learner, make_optimizers  # noqa: E402
from d4pg.limiter import Limiter  # noqa: E402
from d4pg.n_step import NStep, stack  # noqa: E402
from d4pg.replay import Prioritised, Replay, Uniform  # noqa: E402
from d4pg.sum_tree import SumTree  # noqa: E402
from d4pg.update import make_update  # noqa: E402

from tests.tensorboard import scalars  # noqa: E402

SMOKE = PRESETS["smoke"]
SPEC = Spec((2,), 1)


@pytest.mark.parametrize("module", [categorical, limiter, n_step, sum_tree])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


# -------------------------------------------------------------------------------- projection


def test_projection_by_hand():
    atoms = [-1.0, 0.0, 1.0]
    values = [
        [-1.0, 0.0, 1.0],  # on the atoms
        [-0.75, 0.25, 0.5],  # between them
        [-3.0, 1.0, 7.0],  # beyond their range
    ]
    probabilities = [[0.2, 0.3, 0.5], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]]
    expected = [
        [0.2, 0.3, 0.5],
        # 0.75 * 0.4; 0.25 * 0.4 + 0.75 * 0.4 + 0.5 * 0.2; 0.25 * 0.4 + 0.5 * 0.2
        [0.3, 0.5, 0.2],
        [0.1, 0.0, 0.9],
    ]
    np.testing.assert_allclose(
        categorical.project(values, probabilities, atoms), expected, rtol=1e-6, atol=1e-7
    )


def test_projection_equals_its_formula_on_51_atoms():
    random = np.random.default_rng(0)
    atoms = np.linspace(-150, 150, 51)
    values = random.normal(0, 120, (7, 51))
    probabilities = random.dirichlet(np.ones(51), 7)
    distance = np.abs(np.clip(values, -150, 150)[:, None, :] - atoms[None, :, None])
    weights = np.clip(1 - distance / 6.0, 0, 1)
    expected = (weights * probabilities[:, None, :]).sum(-1)
    actual = categorical.project(values, probabilities, atoms).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual.sum(1), 1.0, rtol=1e-5)


# ------------------------------------------------------------------------------------ n steps


def episode(rewards, last_discount, n=3, discount=0.5):
    """Returns the transitions of an episode whose observations are 0, 1, 2, …"""
    steps, complete = NStep(n, discount), []
    steps.begin(0)
    for number, reward in enumerate(rewards):
        last = number == len(rewards) - 1
        complete += steps.add(
            action=10 * number,
            reward=reward,
            discount=last_discount if last else 1.0,
            observation=number + 1,
            last=last,
        )
    return complete


@pytest.mark.parametrize(
    "last_discount, discounts",
    [
        # The episode ends for good: nothing comes after it.
        (0.0, [0.125, 0.0, 0.0, 0.0]),
        # It is cut off: its last observation has a value.
        (1.0, [0.125, 0.125, 0.25, 0.5]),
    ],
)
def test_n_step_transitions_by_hand(last_discount, discounts):
    transitions = stack(episode([1.0, 2.0, 3.0, 4.0], last_discount))
    # 1 + 2/2 + 3/4; 2 + 3/2 + 4/4; 3 + 4/2; 4
    np.testing.assert_allclose(transitions["reward"], [2.75, 4.5, 5.0, 4.0])
    np.testing.assert_allclose(transitions["discount"], discounts)
    assert transitions["observation"].tolist() == [0, 1, 2, 3]
    assert transitions["action"].tolist() == [0, 10, 20, 30]
    assert transitions["next_observation"].tolist() == [3, 4, 4, 4]


def test_discounts_of_the_environment_weigh_later_rewards():
    steps = NStep(2, 0.9)
    steps.begin(0)
    assert steps.add(0, 1.0, 0.5, 1, False) == []
    [transition] = steps.add(0, 10.0, 0.2, 2, False)
    assert transition["reward"] == pytest.approx(1.0 + 0.9 * 0.5 * 10.0)
    assert transition["discount"] == pytest.approx(0.9 * 0.5 * 0.9 * 0.2)


def test_five_steps_of_reward_one():
    transitions = episode([1.0] * 7, 1.0, n=5, discount=0.99)
    assert len(transitions) == 7
    assert transitions[0]["reward"] == pytest.approx(4.90099501)  # (1 - 0.99^5) / 0.01
    assert transitions[0]["discount"] == pytest.approx(0.9509900499)


# ------------------------------------------------------------------------------------- replay


def rows(*numbers):
    return {"observation": np.array(numbers, np.float32)[:, None], "reward": np.array(numbers)}


def test_sum_tree_finds_by_priority():
    tree = SumTree(5)
    tree.set(np.arange(5), [1.0, 0.0, 2.0, 3.0, 4.0])
    assert tree.total == 10.0
    found = tree.find([0.0, 0.99, 1.0, 2.99, 3.0, 5.99, 6.0, 9.99])
    assert found.tolist() == [0, 0, 2, 2, 3, 3, 4, 4]
    tree.set([3, 0], [0.0, 0.5])
    assert tree.total == 6.5
    assert tree.find([0.49, 0.5, 2.4, 2.5]).tolist() == [0, 2, 2, 4]
    assert tree.get([0, 1, 2, 3, 4]).tolist() == [0.5, 0.0, 2.0, 0.0, 4.0]
    assert tree.find([6.5, 7.0]).tolist() == [4, 4]  # rounding never leads to a zero


def test_the_oldest_transitions_make_room():
    replay = Replay(3, Uniform(), seed=0)
    replay.insert(rows(0, 1))
    assert len(replay) == 2
    replay.insert(rows(2, 3, 4))
    batch = replay.sample(100)
    assert len(replay) == 3 and replay.inserted == 5
    assert set(batch.rows["reward"]) == {2, 3, 4}
    np.testing.assert_array_equal(batch.keys, batch.rows["reward"])
    assert (batch.rows["weight"] == 1).all()


def test_uniform_draws_all_alike():
    replay = Replay(4, Uniform(), seed=0)
    replay.insert(rows(0, 1, 2, 3))
    counts = np.bincount(replay.sample(4000).rows["reward"])
    assert (np.abs(counts - 1000) < 120).all()  # 4 standard deviations


def test_prioritised_draws_and_weighs_by_hand():
    replay = Replay(4, Prioritised(4, exponent=0.5, importance=1.0), seed=0)
    replay.insert(rows(0, 1, 2, 3))
    # To the power of 1/2: 1, 2, 3, 4, so the probabilities are tenths.
    replay.update_priorities(np.arange(4), np.array([1.0, 4.0, 9.0, 16.0]))
    batch = replay.sample(1000)
    # One from each of 1,000 equal parts: exact, but for the parts in which two meet.
    np.testing.assert_allclose(np.bincount(batch.rows["reward"]), [100, 200, 300, 400], atol=1)
    # (4 P)^-1 = 2.5, 1.25, 0.833, 0.625, divided by the largest.
    expected = np.array([1.0, 0.5, 1 / 3, 0.25])[batch.rows["reward"]]
    np.testing.assert_allclose(batch.rows["weight"], expected, rtol=1e-6)
    # A new transition has the highest priority: 4 of 2 + 3 + 4 + 4.
    replay.insert(rows(4))
    counts = np.bincount(replay.sample(1300).rows["reward"])
    np.testing.assert_allclose(counts[1:], [200, 300, 400, 400], atol=1)


def test_priorities_of_transitions_that_are_gone_are_passed_over():
    replay = Replay(2, Prioritised(2, exponent=1.0, importance=0.0), seed=0)
    replay.insert(rows(0, 1))
    keys = replay.sample(2).keys
    assert sorted(keys) == [0, 1]
    replay.insert(rows(2))  # in the place of 0
    replay.update_priorities(np.array([0, 1]), np.array([100.0, 3.0]))
    counts = np.bincount(replay.sample(400).rows["reward"], minlength=3)
    np.testing.assert_allclose(counts, [0, 300, 100], atol=1)


def test_a_saved_replay_goes_on_as_if_nothing_had_been(tmp_path):
    def make():
        return Replay(5, Prioritised(5, 0.6, 1.0), seed=0)

    replay, again = make(), make()
    replay.insert(rows(*range(7)))
    replay.update_priorities(np.arange(2, 7), np.arange(1.0, 6.0))
    replay.sample(3)
    replay.save(tmp_path / "replay.npz")
    again.load(tmp_path / "replay.npz")
    for each in (replay, again):
        each.insert(rows(7))
    one, other = replay.sample(50), again.sample(50)
    assert again.inserted == 8 and len(again) == 5
    np.testing.assert_array_equal(one.keys, other.keys)
    for name, values in one.rows.items():
        np.testing.assert_array_equal(values, other.rows[name])


def test_a_replay_of_another_size_is_refused(tmp_path):
    replay = Replay(5, Uniform())
    replay.insert(rows(1))
    replay.save(tmp_path / "replay.npz")
    with pytest.raises(ValueError, match="resumed, 5. Received: capacity=6"):
        Replay(6, Uniform()).load(tmp_path / "replay.npz")
    with pytest.raises(ValueError, match="Received: capacity=0"):
        Replay(0, Uniform())


def test_the_ratio_of_samples_to_inserts_is_held_from_both_sides():
    rule = Limiter(samples_per_insert=8.0, minimum=100, tolerance=64.0)
    random = np.random.default_rng(0)
    inserts, samples, waits = 0, 0, [0, 0]
    for _ in range(20_000):
        if random.random() < 1 / 3:
            may = rule.may_insert(inserts, samples)
            inserts += 4 * may
            waits[0] += not may
        else:
            may = rule.may_sample(inserts, samples, 16)
            samples += 16 * may
            waits[1] += not may
        assert abs(rule.due(inserts, samples)) <= 64 + 8 * 4 or inserts < 100
    assert min(waits) > 100  # each had to wait for the other
    assert samples / (inserts - 100) == pytest.approx(8.0, rel=0.01)


# -------------------------------------------------------------------- networks, environments


def sizes(models, *names):
    return [sum(int(np.prod(w.shape)) for w in models[n].trainable_weights) for n in names]


def test_sizes_of_the_published_networks():
    models = networks.build_models(PRESETS["published"], Spec((5,), 1))
    # 5*256+256, 2*256 of LayerNorm, twice 256*256+256, 256+1
    # 6*512+512, 2*512, 512*512+512, 512*256+256, 256*51+51
    assert sizes(models, "policy", "critic") == [133_889, 411_699]
    small = networks.build_models(PRESETS["paper"], Spec((5,), 1))
    assert sizes(small, "policy", "critic") == [62_801, 139_251]


def test_networks_begin_as_published():
    models = networks.build_models(PRESETS["published"], Spec((5,), 3), seed=0)
    observations = tf.random.normal((64, 5))
    actions = models["policy"](observations)
    assert np.abs(actions).max() < 0.1  # near zero
    for name in ("policy", "critic"):
        first = models[name].layers[1 if name == "policy" else 3]
        bound = np.sqrt(3 * 0.333 / first.units)  # uniform, variance 0.333 / fan-out
        kernel = first.kernel.numpy()
        assert 0.9 * bound < np.abs(kernel).max() <= bound
        for weight, target in zip(models[name].weights, models["target_" + name].weights):
            np.testing.assert_array_equal(weight, target)


def test_the_policy_in_numpy_equals_the_policy_in_keras():
    model = networks.build_policy(5, 2, (16, 12, 8))
    model.set_weights([np.random.default_rng(1).normal(size=w.shape) for w in model.weights])
    policy = policies.NumpyPolicy()
    policy.load(model.get_weights())
    observations = np.random.default_rng(2).normal(size=(9, 5)).astype("float32")
    np.testing.assert_allclose(policy(observations), model(observations), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy(observations[3]), policy(observations)[3], rtol=1e-4)


def test_the_policy_of_images_takes_torso_and_policy():
    config = dataclasses.replace(SMOKE, pixels=True)
    environment = make_environment(config, seed=0)
    assert environment.spec == Spec((16, 16, 9), 1)
    models = networks.build_models(config, environment.spec, seed=0)
    policy = policies.make_policy(config, environment.spec)
    policy.load(models["torso"].get_weights() + models["policy"].get_weights())
    image = environment.reset()
    expected = models["policy"](models["torso"](image[None]))[0]
    np.testing.assert_allclose(policy(image), expected, rtol=1e-5, atol=1e-6)


def test_the_torso_of_impala():
    torso = networks.build_torso((64, 64, 9))
    kernels = [w for w in torso.weights if len(w.shape) == 4]
    assert len(kernels) == 3 * (1 + 2 * 2)
    assert torso.output_shape == (None, 256)
    assert torso.layers[-2].output.shape[1:] == (8 * 8 * 32,)


def test_actions_are_scaled_repeated_and_clipped():
    seen = []

    class Counting(Reach):
        def step(self, action):
            seen.append(float(action[0]))
            return super().step(action)

        def action_spec(self):
            return super().action_spec().replace(minimum=0.0, maximum=10.0)

    environment = Environment(Counting(seed=0), action_repeat=3)
    observation = environment.reset()
    assert observation.shape == (2,) and observation.dtype == np.float32
    _, reward, discount, last = environment.step(np.array([0.5]))
    assert seen == [7.5] * 3 and discount == 1.0 and not last and 0 <= reward <= 3
    environment.step(np.array([-4.0]))
    assert seen[3:] == [0.0] * 3
    steps = 2
    while not last:
        *_, last = environment.step(np.array([0.0]))
        steps += 1
    assert steps == 7 and len(seen) == 20  # the last action was taken twice only


def test_a_reward_after_the_end_counts_nothing():
    class Ending(Reach):
        def step(self, action):
            step = super().step(action)
            return step._replace(reward=1.0, discount=0.5)

    environment = Environment(Ending(seed=0), action_repeat=3)
    environment.reset()
    _, reward, discount, _ = environment.step(np.zeros(1))
    assert reward == 1.0 + 0.5 + 0.25 and discount == 0.125


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="Received: task='cartpole'"):
        make_environment(dataclasses.replace(SMOKE, task="cartpole"))


# ------------------------------------------------------------------------------------ learner


def batch_of(count, seed=0):
    random = np.random.default_rng(seed)
    return {
        "observation": random.normal(size=(count, 2)).astype("float32"),
        "action": random.uniform(-1, 1, (count, 1)).astype("float32"),
        "reward": random.uniform(0, 3, count).astype("float32"),
        "discount": np.full(count, 0.6, "float32"),
        "next_observation": random.normal(size=(count, 2)).astype("float32"),
        "weight": random.uniform(0.2, 1, count).astype("float32"),
    }


def weights_of(learner):
    return [w for _, model in sorted(learner.trainer.model.items()) for w in model.get_weights()]


def test_the_losses_by_numpy():
    """Cross-entropy, TD error, and the distance to the action that is aimed at."""
    config = dataclasses.replace(SMOKE, policy_sizes=(4,), critic_sizes=(4,))
    models = networks.build_models(config, SPEC, seed=0)
    batch = {name: tf.constant(values) for name, values in batch_of(6).items()}
    atoms = np.linspace(0, 20, 51, dtype="float32")

    def distribution(critic, observations, actions):
        inputs = [tf.constant(observations), tf.constant(actions)]
        return tf.nn.softmax(models[critic](inputs)).numpy()

    following = batch["next_observation"]
    target = distribution("target_critic", following, models["target_policy"](following))
    values = batch["reward"][:, None] + batch["discount"][:, None] * atoms
    projected = categorical.project(values, target, atoms).numpy()
    before = distribution("critic", batch["observation"], batch["action"])
    cross_entropy = -(projected * np.log(before)).sum(1)

    # dq/da by central differences, clipped to a length of 1.
    action, h = models["policy"](following).numpy(), 1e-2
    high, low = (distribution("critic", following, action + s * h) @ atoms for s in (1, -1))
    slope = (high - low) / (2 * h)
    slope /= np.maximum(np.abs(slope), 1)

    # SGD at a rate of 1 shows the clipped gradient.
    optimizers = {n: keras.optimizers.SGD(1.0, global_clipnorm=1e-3) for n in ("policy", "critic")}
    weights = {name: models[name].get_weights() for name in optimizers}
    priorities, logs = make_update(config, lambda: optimizers)(models, batch)
    np.testing.assert_allclose(
        logs["critic_loss"], np.mean(batch["weight"] * cross_entropy), rtol=1e-5
    )
    np.testing.assert_allclose(logs["policy_loss"], np.mean(slope**2) / 2, rtol=2e-2)
    np.testing.assert_allclose(priorities, np.abs((projected - before) @ atoms), rtol=1e-4)
    np.testing.assert_allclose(logs["q_value"], np.mean(before @ atoms), rtol=1e-5)
    for name, old in weights.items():
        moves = [new - weight for new, weight in zip(models[name].get_weights(), old)]
        norm = np.sqrt(sum(np.square(move).sum() for move in moves))
        assert norm == pytest.approx(1e-3, rel=1e-2)


def test_two_adams_clip_to_the_norm_of_the_configuration():
    optimizers = make_optimizers(PRESETS["published"])
    for name in ("policy", "critic"):
        assert type(optimizers[name]) is keras.optimizers.Adam
        assert float(optimizers[name].learning_rate) == pytest.approx(1e-4)
        assert optimizers[name].global_clipnorm == 40.0


def test_learning_rates_fall_linearly_to_the_end_of_the_run():
    config = dataclasses.replace(SMOKE, updates=1000, decay_from=0.4, policy_learning_rate=0.1)
    optimizer = make_optimizers(config)["policy"]
    for updates, rate in ((0, 0.1), (400, 0.1), (700, 0.05), (900, 0.1 / 6), (1000, 0.0)):
        optimizer.iterations.assign(updates)
        assert float(optimizer.learning_rate) == pytest.approx(rate, abs=1e-7)


def targets_are_copies(models):
    return all(
        np.array_equal(weight, target)
        for name in ("policy", "critic")
        for weight, target in zip(
            models[name].get_weights(), models["target_" + name].get_weights()
        )
    )


def test_50_updates_from_a_fixed_replay_equal_one_replica():
    # 30 rows on 4 replicas: 7 or 8 each. A norm that every gradient exceeds: clipping per replica
    # would show.
    config = dataclasses.replace(SMOKE, batch_size=30, clip_norm=0.05, target_period=20)
    weights, priorities, logs = {}, {}, {}
    for replicas in (1, 2, 4):
        replay = Replay(500, Prioritised(500, 0.6, 1.0), seed=3)
        replay.insert({n: v for n, v in batch_of(500, seed=1).items() if n != "weight"})
        learner = Learner(config, SPEC, replicas=replicas, seed=0)
        history = []
        for _ in range(50):
            batch = replay.sample(config.batch_size)
            found, logs[replicas] = learner.update(batch.rows)
            replay.update_priorities(batch.keys, found)
            history.append(found)
            updates = int(learner.trainer.optimizers["policy"].iterations)
            assert targets_are_copies(learner.trainer.model) == (updates % 20 == 0)
        weights[replicas], priorities[replicas] = weights_of(learner), np.array(history)
        assert updates == len(history) == 50
    for replicas in (2, 4):
        for actual, expected in zip(weights[replicas], weights[1], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(priorities[replicas], priorities[1], rtol=1e-4, atol=1e-4)
        assert logs[replicas] == pytest.approx(logs[1], rel=1e-4)


def test_fit_makes_the_same_updates():
    data = batch_of(64)
    models, optimizers = networks.build_models(SMOKE, SPEC, seed=0), make_optimizers(SMOKE)
    update = make_update(SMOKE, lambda: optimizers)
    for begin in range(0, 64, 16):
        update(models, {name: tf.constant(v[begin : begin + 16]) for name, v in data.items()})
    learner = Learner(SMOKE, SPEC, replicas=1, seed=0)
    history = learner.trainer.fit(data, batch_size=16, shuffle=False, verbose=0).history
    assert set(history) == {"critic_loss", "policy_loss", "q_value", "q_error"}
    for name, model in models.items():
        for actual, expected in zip(learner.trainer.model[name].get_weights(), model.get_weights()):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_images_train_the_torso_by_the_critic_alone():
    config = dataclasses.replace(SMOKE, pixels=True)
    spec = Spec((16, 16, 9), 1)
    learner = Learner(config, spec, replicas=1, seed=0)
    models, optimizers = learner.trainer.model, learner.trainer.optimizers
    parts = {name: {v.path for v in models[name].trainable_variables} for name in models}
    assert len(optimizers["critic"].variables) == 2 + 2 * len(parts["torso"] | parts["critic"])
    assert len(optimizers["policy"].variables) == 2 + 2 * len(parts["policy"])
    batch = {name: tf.constant(values) for name, values in batch_of(4).items()}
    images = np.random.default_rng(0).integers(0, 256, (2, 4, *spec.observation_shape), "uint8")
    batch.update(observation=tf.constant(images[0]), next_observation=tf.constant(images[1]))
    # The policy learns nothing and the torso still does.
    optimizers["policy"].learning_rate = 0.0
    make_update(config, lambda: optimizers)(models, batch)
    changed = {
        name: any(map(np.any, (a != b for a, b in zip(models[name].get_weights(), targets))))
        for name in ("torso", "critic", "policy")
        for targets in [models["target_" + name].get_weights()]
    }
    assert changed == {"torso": True, "critic": True, "policy": False}
    weights = learner.policy_weights()
    assert len(weights) == len(models["torso"].weights) + len(models["policy"].weights)


# ------------------------------------------------------------------------------------- actors


class Watched(Exchange):
    """An exchange with the weights of a new policy, and no learner."""

    def __init__(self, config):
        super().__init__(config, seed=0)
        self.publish(networks.build_policy(2, 1, config.policy_sizes).get_weights())


def assert_waits_at(inserts, exchange, thread):
    """The actor comes as far as this, and no further."""
    deadline = time.monotonic() + 30
    while exchange.counters.inserts < inserts and time.monotonic() < deadline:
        time.sleep(0.01)
    thread.join(0.3)
    assert thread.is_alive() and exchange.counters.inserts == inserts


def test_an_actor_waits_until_the_learner_has_caught_up():
    config = dataclasses.replace(SMOKE, minimum=40, insert_every=20, samples_per_insert=2.0)
    exchange = Watched(config)
    thread = threading.Thread(target=act, args=(exchange, 0, 0, 1000), daemon=True)
    thread.start()
    assert exchange.sample(32, timeout=30) is not None
    # 160 samples may be due, of 2 * (inserts - 40) - 32.
    assert_waits_at(140, exchange, thread)
    for _ in range(8):
        batch = exchange.sample(32, timeout=30)
        exchange.updated(batch, np.ones(32))
    assert_waits_at(280, exchange, thread)
    exchange._limiter = Limiter(2.0, 40, float("inf"))
    exchange.sample(32)
    thread.join(30)
    assert not thread.is_alive() and exchange.counters.inserts == 1000
    assert exchange.counters.episodes == 50
    returns, lags = exchange.take_news()
    assert len(returns) == 50 and {actor for actor, _ in returns} == {0}
    assert lags[0] == 0 and max(lags) == 8  # versions are those of the first weights


def test_actors_of_other_processes_call_the_exchange():
    exchange = Watched(SMOKE)
    address, key = serve(exchange)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from d4pg.actor import act\nfrom d4pg.exchange import connect\n"
        "act(connect((sys.argv[2], int(sys.argv[3])), bytes.fromhex(sys.argv[4])), 5, 0, 60)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES), address[0], str(address[1]), key.hex()],
        check=True,
        timeout=60,
    )
    assert exchange.counters.inserts == 60 and exchange.last_seen == {5: 3}
    assert connect(address, key).get_config() == SMOKE


# -------------------------------------------------------------------------------- a whole run


class Run:
    """A run of the script in a process of its own, whose lines are collected."""

    def __init__(self, logdir, updates):
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(EXAMPLES / "d4pg" / "run.py"),
                *("--preset=smoke", "--replicas=2", "--actors=2"),
                *(f"--updates={updates}", f"--logdir={logdir}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()

    def until(self, condition, seconds=120):
        """Waits until a condition holds, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, "".join(self.lines)
            time.sleep(0.05)
        return value

    def find(self, pattern):
        """Returns what a pattern finds in all lines so far."""
        return re.findall(pattern, "".join(list(self.lines)))

    def end(self):
        """Ends the process, if it still runs, and returns its code."""
        self.process.kill()
        code = self.process.wait()
        self._reader.join(30)
        self.process.stdout.close()
        return code


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.multiprocess
def test_a_run_outlives_its_actors_and_its_learner(tmp_path):
    folder = tmp_path / "checkpoints"

    def newest():
        return next(iter(checkpoints.complete(folder)), None)

    run = Run(tmp_path, updates=1_000_000)
    try:
        run.until(newest)
        first = int(run.find(r"actor 0: process (\d+)")[0])
        os.kill(first, signal.SIGKILL)
        run.until(lambda: run.find("actor 0 ended with code -9; started again"))
        path = newest()
        run.until(lambda: newest() != path)
        actors = [int(pid) for pid in run.find(r"actor \d: process (\d+)")]
        assert len(actors) == 3 and first in actors
    finally:
        assert run.end() == -signal.SIGKILL
    # Actors end with their learner.
    deadline = time.monotonic() + 30
    while any(map(is_running, actors)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, actors))

    found = json.loads((newest() / "worker_0" / "run.json").read_text())["counters"]
    with np.load(newest() / "worker_0" / "replay.npz") as replay:
        assert replay["inserted"] == found["inserts"] > SMOKE.minimum
    assert found["samples"] == found["updates"] * SMOKE.batch_size
    updates = found["updates"] + 400
    run = Run(tmp_path, updates)
    try:
        assert run.process.wait(120) == 0, "".join(run.lines)
    finally:
        run.end()
    expected = "resumed at update {updates}: {samples} samples, {inserts} inserts, {episodes} "
    assert run.find(expected.format(**found)), "".join(run.lines)
    config, history = figures.read_results(tmp_path)
    last = history[-1]
    assert config.updates == last["updates"] == updates and last["steps"] > found["inserts"]
    assert last["samples_per_insert"] == pytest.approx(SMOKE.samples_per_insert, rel=0.1)
    # Noise alone gets about 7 of 20, the best policy 18.5.
    assert np.mean(last["returns"]) > 15, history

    written = scalars(tmp_path / "tensorboard")
    groups = {name.split("/")[0] for name in written}
    assert groups == {"actors", "learner", "replay", "evaluation"}
    figures.draw_curve([tmp_path], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5_000
    assert figures.frame_strip(tmp_path, frames=4, size=16).shape == (16, 64, 3)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_have_replays_of_their_own_and_one_policy(tmp_path):
    def job(updates):
        command = [sys.executable, "-m", "keras_replicator", "launch", "--workers=2"]
        script = [str(EXAMPLES / "d4pg" / "run.py"), "--preset=smoke", "--actors=1"]
        options = [f"--updates={updates}", f"--logdir={tmp_path}"]
        done = subprocess.run(
            command + script + options, timeout=200, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    job(100)
    job(200)
    [newest, _] = checkpoints.complete(tmp_path / "checkpoints", num_workers=2)
    assert newest.name == "update-00000200"
    replays = []
    for worker in range(2):
        part = newest / f"worker_{worker}"
        counters = json.loads((part / "run.json").read_text())["counters"]
        assert (counters["updates"], counters["samples"]) == (200, 200 * SMOKE.batch_size // 2)
        with np.load(part / "replay.npz") as replay:
            replays.append(replay["column/observation"])
    assert not np.array_equal(*(replay[:100] for replay in replays))
    _, history = figures.read_results(tmp_path)
    assert [entry["updates"] for entry in history] == [100, 200]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_throughput_measures_each_contender():
    best = throughput.measure("smoke", [1, 2], [8, 16], rounds=2, seconds=0.1)
    assert list(best) == [0, 1, 2]
    for by_rows in best.values():
        assert list(by_rows) == [8, 16]
        assert all(speed > 0 and 0 < ms < 1000 for speed, ms in by_rows.values())
