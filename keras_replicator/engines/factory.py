"""From a plan to the engine that carries it out."""

import json
import os

import tensorflow as tf

from keras_replicator import compat, workers
from keras_replicator.engines.synchronous import SynchronousEngine

# One strategy per set of devices and process: collectives of two strategies would collide.
_strategies = {}
_TRAINING = ("chief", "worker")


def make_engine(plan, strategy=None, cluster=None, peer_timeout=60, start_timeout=600):
    """Returns the engine of a plan.

    Args:
        plan: A `Plan`.
        strategy: The strategy that the user passed, or None.
        cluster: The `Cluster` of the job, or None.
        peer_timeout: Seconds until a lost worker is an error.
        start_timeout: Seconds until a missing worker is an error.
    """
    if strategy is not None:
        compat.use_local_reductions(strategy)
        return SynchronousEngine(strategy, None, plan.worker, plan.num_workers)
    if plan.strategy == "multi_worker":
        strategy = _multi_worker(plan, cluster, peer_timeout, start_timeout)
        return SynchronousEngine(strategy, None, plan.worker, plan.num_workers, cluster)
    if plan.strategy == "tpu":
        return SynchronousEngine(_tpu(), None)
    if plan.num_replicas == 1:
        return SynchronousEngine(None, f"/device:{plan.devices[0]}")
    return SynchronousEngine(_mirrored(plan.devices), None)


def _mirrored(devices):
    if devices not in _strategies:
        on_cpu = all(name.startswith("CPU") for name in devices)
        _strategies[devices] = tf.distribute.MirroredStrategy(
            list(devices),
            cross_device_ops=tf.distribute.ReductionToOneDevice() if on_cpu else None,
        )
    return _strategies[devices]


def _multi_worker(plan, cluster, peer_timeout, start_timeout):
    if "multi_worker" in _strategies:
        return _strategies["multi_worker"]
    if compat.tensorflow_started():
        raise RuntimeError(
            "A job of several workers was found, and TensorFlow has already started in this "
            "process, so the workers cannot be connected any more. Make the ReplicatedTrainer "
            "before any operation, tensor or model. "
            f"Received: {cluster}"
        )
    if cluster.source != "TF_CONFIG":
        os.environ["TF_CONFIG"] = json.dumps(cluster.to_tf_config())
    jobs = {role: len(names) for role, names in cluster.tasks.items() if role in _TRAINING}
    role = "chief" if "chief" in jobs else "worker"
    try:
        strategy = compat.multi_worker_strategy(
            len(plan.devices),
            peer_timeout,
            start_timeout,
            jobs,
            f"/job:{role}/replica:0/task:0",
        )
    except tf.errors.OpError as error:
        raise workers.missing(error, cluster, start_timeout) from error
    _strategies["multi_worker"] = strategy
    return strategy


def _tpu():
    if "tpu" not in _strategies:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        _strategies["tpu"] = tf.distribute.TPUStrategy(resolver)
    return _strategies["tpu"]
