"""From a plan to the engine that carries it out."""

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.engines.synchronous import SynchronousEngine

# One strategy per set of devices and process: collectives of two strategies would collide.
_strategies = {}


def make_engine(plan, strategy=None):
    """Returns the engine of a plan.

    Args:
        plan: A `Plan`.
        strategy: The strategy that the user passed, or None.
    """
    if strategy is not None:
        compat.use_local_reductions(strategy)
        return SynchronousEngine(strategy, None, plan.worker, plan.num_workers)
    if plan.strategy == "multi_worker":
        return SynchronousEngine(_multi_worker(), None, plan.worker, plan.num_workers)
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


def _multi_worker():
    if "multi_worker" not in _strategies:
        _strategies["multi_worker"] = tf.distribute.MultiWorkerMirroredStrategy()
    return _strategies["multi_worker"]


def _tpu():
    if "tpu" not in _strategies:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        _strategies["tpu"] = tf.distribute.TPUStrategy(resolver)
    return _strategies["tpu"]
