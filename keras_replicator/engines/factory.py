"""From a plan to the engine that carries it out."""

import json
import os

import tensorflow as tf

from keras_replicator import compat, workers
from keras_replicator.cluster import Cluster, check_expected_workers, detect_cluster
from keras_replicator.engines import serving
from keras_replicator.engines.asynchronous import AsynchronousEngine
from keras_replicator.engines.in_process import simulated_cluster
from keras_replicator.engines.joining import meet, watch_over
from keras_replicator.engines.mesh_factory import choose_mesh
from keras_replicator.engines.synchronous import SynchronousEngine
from keras_replicator.hardware import configured_hardware, detect_hardware, short_name
from keras_replicator.plan import Plan, make_plan
from keras_replicator.steps.tables import Tables

# One strategy per set of devices and process: collectives of two strategies would collide.
_strategies = {}
_TRAINING = ("chief", "worker")


def choose_engine(
    strategy,
    devices,
    expected_workers,
    peer_timeout,
    start_timeout,
    max_staleness=None,
    tables=None,
    layout=None,
):
    """Decides what runs where, and makes the engine that does it.

    Args:
        strategy: A name out of `plan.STRATEGIES`, or a `tf.distribute.Strategy`.
        devices: As in `make_plan`.
        expected_workers: The number of workers that the job must have, or None.
        peer_timeout: Seconds until a lost worker is an error.
        start_timeout: Seconds until a missing worker is an error.
        layout: A `Layout` or `keras.distribution.LayoutMap`, or None.
        max_staleness: Bound on staleness, for parameter servers only.
        tables: How embedding tables are spread over servers, a `Tables` or None.

    Returns:
        `(plan, engine)`. In the workers and servers of a job with parameter servers it does not
        return: they serve until the chief ends.
    """
    _check_staleness(max_staleness)
    chosen = choose_mesh(strategy, layout, devices, expected_workers, peer_timeout, start_timeout)
    if chosen is not None:
        _refuse_staleness(max_staleness, "mesh")
        return chosen
    if isinstance(strategy, tf.distribute.Strategy):
        if devices is not None:
            raise ValueError(
                "`devices` and a strategy object exclude each other: the strategy has its devices. "
                f"Received: strategy={type(strategy).__name__}, devices={devices!r}"
            )
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            raise ValueError(
                "A ParameterServerStrategy is made by the trainer, which also starts the workers "
                "and servers. Pass strategy='parameter_server' in a job with 'ps' tasks. "
                f"Received: strategy={strategy!r}"
            )
        _refuse_staleness(max_staleness, "custom")
        cluster = _cluster_of(strategy)
        check_expected_workers(cluster, expected_workers)
        plan = Plan(
            "custom",
            tuple(short_name(name) for name in strategy.extended.worker_devices),
            strategy.num_replicas_in_sync,
            num_workers=1 if cluster is None else cluster.num_workers,
            worker=0 if cluster is None else cluster.worker_index,
            reasons=(
                ("strategy", f"the {_public_name(strategy)} that was passed"),
                ("devices", "of that strategy"),
                ("num_workers", "of that strategy"),
            ),
        )
        return plan, make_engine(
            plan, strategy, cluster, peer_timeout=peer_timeout, start_timeout=start_timeout
        )
    cluster = detect_cluster(os.environ) or simulated_cluster()
    check_expected_workers(cluster, expected_workers)
    several = cluster is not None and (cluster.num_workers > 1 or cluster.has_parameter_servers)
    hardware = configured_hardware() if several else detect_hardware()
    plan = make_plan(hardware, cluster, strategy=strategy, devices=devices)
    if plan.strategy == "parameter_server":
        if cluster.task_type != "chief":
            serving.serve(cluster, start_timeout)
        strategy = _parameter_server(cluster, start_timeout)
        return plan, AsynchronousEngine(
            strategy, cluster, max_staleness, peer_timeout, tables or Tables()
        )
    _refuse_staleness(max_staleness, plan.strategy)
    return plan, make_engine(
        plan, cluster=cluster, peer_timeout=peer_timeout, start_timeout=start_timeout
    )


def _check_staleness(max_staleness):
    is_count = isinstance(max_staleness, int) and not isinstance(max_staleness, bool)
    if max_staleness is not None and not (is_count and max_staleness >= 0):
        raise ValueError(
            "`max_staleness` must be None or an int of at least 0: how many updates may come "
            "between a step's reading of the weights and its own update. "
            f"Received: max_staleness={max_staleness!r}"
        )


def _public_name(strategy):
    """The name under which users know the class of a strategy."""
    names = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "TPUStrategy")
    known = (name for name in names if type(strategy) is getattr(tf.distribute, name))
    return next(known, type(strategy).__name__)


def _refuse_staleness(max_staleness, strategy):
    if max_staleness is not None:
        raise ValueError(
            f"`max_staleness` is for parameter servers, and the plan is {strategy!r}, in which no "
            f"update is stale. Leave it out. Received: max_staleness={max_staleness!r}"
        )


def make_engine(plan, strategy=None, cluster=None, peer_timeout=60, start_timeout=600):
    """Returns the engine of a plan.

    Args:
        plan: A `Plan`.
        strategy: The strategy that the user passed, or None.
        cluster: The `Cluster` of the job, or None.
        peer_timeout: Seconds until a lost worker is an error.
        start_timeout: Seconds until a missing worker is an error.
    """
    if plan.strategy == "multi_worker":
        strategy = _multi_worker(plan, cluster, peer_timeout, start_timeout)
    if strategy is not None:
        compat.use_local_reductions(strategy)
        watch = None
        if plan.num_workers > 1:
            watch = watch_over(cluster, workers.task_names(cluster), peer_timeout)
        return SynchronousEngine(
            strategy, None, plan.worker, plan.num_workers, cluster, watch, start_timeout
        )
    if plan.strategy == "tpu":
        return SynchronousEngine(_tpu(), None)
    if plan.num_replicas == 1:
        return SynchronousEngine(None, f"/device:{plan.devices[0]}", groups=plan.groups)
    return SynchronousEngine(_mirrored(plan.devices), None, groups=plan.groups)


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
    meet(cluster, start_timeout)
    try:
        strategy = compat.multi_worker_strategy(
            len(plan.devices),
            peer_timeout,
            start_timeout,
            jobs,
            f"/job:{role}/replica:0/task:0",
        )
    except tf.errors.OpError as error:
        raise workers.not_connected(error, cluster) from error
    _strategies["multi_worker"] = strategy
    return strategy


def _cluster_of(strategy):
    """The `Cluster` of a strategy over several workers, or None."""
    resolver = getattr(strategy, "cluster_resolver", None)
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return None
    tasks = resolver.cluster_spec().as_dict()
    if sum(len(tasks.get(role, ())) for role in _TRAINING) < 2:
        return None
    return Cluster(
        task_type=resolver.task_type,
        task_index=resolver.task_id,
        source="the strategy that was passed",
        **{role: tuple(addresses) for role, addresses in tasks.items()},
    )


def _parameter_server(cluster, start_timeout):
    if "parameter_server" in _strategies:
        return _strategies["parameter_server"]
    if compat.tensorflow_started():
        raise RuntimeError(
            "A job with parameter servers was found, and TensorFlow has already started in this "
            "process, so it cannot be connected any more. Make the ReplicatedTrainer before any "
            f"operation, tensor or model. Received: {cluster}"
        )
    serving.wait_for(cluster, start_timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({role: list(found) for role, found in cluster.tasks.items()}),
        task_type="chief",
        task_id=0,
        rpc_layer="grpc",
    )
    _strategies["parameter_server"] = tf.distribute.ParameterServerStrategy(resolver)
    return _strategies["parameter_server"]


def _tpu():
    if "tpu" not in _strategies:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect()
        _strategies["tpu"] = tf.distribute.TPUStrategy(resolver)
    return _strategies["tpu"]
