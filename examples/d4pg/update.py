"""One update of D4PG on one replica: the critic's loss, the policy's loss, two optimizers.

Written as for one device, and of TensorFlow alone: the optimizers average gradients over
replicas and clip after that, because `ReplicatedTrainer` runs it.
"""

import tensorflow as tf

from d4pg import categorical


def make_update(config, optimizers):
    """Returns `fn(models, batch) -> (priorities [rows], logs)`.

    A priority is the absolute difference of target and value, both means of their distributions.
    A batch is a dict with `observation`, `action`, `reward`, `discount`, `next_observation` as
    `n_step.NStep` makes them, and the importance `weight` of each row.

    Args:
        config: a `Config`.
        optimizers: function without arguments that returns the dict with the optimizers "policy"
            and "critic", such as `lambda: trainer.optimizers`.
    """

    def update(models, batch):
        atoms = tf.linspace(config.v_min, config.v_max, config.atoms)
        targets, target_values = _targets(models, batch, atoms)

        critic_variables = _trainable(models, "torso", "critic")
        with tf.GradientTape() as tape:
            features = _features(models, "torso", batch["observation"])
            logits = models["critic"]([features, batch["action"]], training=True)
            losses = tf.nn.softmax_cross_entropy_with_logits(targets, logits)
            critic_loss = tf.reduce_mean(batch["weight"] * losses)
        critic_gradients = tape.gradient(critic_loss, critic_variables)

        # The torso is trained by the critic's loss alone.
        features = tf.stop_gradient(_features(models, "torso", batch["next_observation"]))
        policy_variables = _trainable(models, "policy")
        with tf.GradientTape() as tape:
            actions = models["policy"](features, training=True)
            policy_loss = tf.reduce_mean(_policy_losses(models, features, actions, atoms))
        policy_gradients = tape.gradient(policy_loss, policy_variables)

        optimizers()["critic"].apply(critic_gradients, critic_variables)
        optimizers()["policy"].apply(policy_gradients, policy_variables)
        _copy_to_targets(models, optimizers()["critic"].iterations, config.target_period)

        values = categorical.mean(tf.nn.softmax(logits), atoms)
        errors = tf.abs(target_values - values)
        logs = {
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "q_value": tf.reduce_mean(values),
            "q_error": tf.reduce_mean(errors),
        }
        return errors, logs

    return update


def _targets(models, batch, atoms):
    """Returns the projected target distributions and their means."""
    features = _features(models, "target_torso", batch["next_observation"])
    actions = models["target_policy"](features, training=False)
    logits = models["target_critic"]([features, actions], training=False)
    values = batch["reward"][:, tf.newaxis] + batch["discount"][:, tf.newaxis] * atoms
    targets = tf.stop_gradient(categorical.project(values, tf.nn.softmax(logits), atoms))
    return targets, categorical.mean(targets, atoms)


def _policy_losses(models, features, actions, atoms):
    """Returns `1/2 |stop(dq/da + a) - a|^2` per row, whose gradient by a is -dq/da.

    dq/da is clipped to a norm of 1.
    """
    chosen = tf.stop_gradient(actions)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(chosen)
        logits = models["critic"]([features, chosen], training=True)
        values = categorical.mean(tf.nn.softmax(logits), atoms)
    slopes = tf.clip_by_norm(tape.gradient(values, chosen), 1.0, axes=-1)
    aims = tf.stop_gradient(slopes + chosen)
    return 0.5 * tf.reduce_sum(tf.square(aims - actions), axis=-1)


def _copy_to_targets(models, updates, period):
    pairs = [
        (target, weight)
        for name, model in models.items()
        if not name.startswith("target_")
        for target, weight in zip(models["target_" + name].weights, model.weights)
    ]

    def copy():
        for target, weight in pairs:
            target.assign(weight)

    tf.cond(tf.equal(updates % period, 0), copy, lambda: None)


def _features(models, torso, observations):
    return models[torso](observations, training=True) if torso in models else observations


def _trainable(models, *names):
    return [v for name in names if name in models for v in models[name].trainable_variables]
