"""plan.make_plan: which hardware is used how, why, and what it says when that is impossible."""

import dataclasses
import re

import pytest

from keras_replicator.cluster import Cluster
from keras_replicator.hardware import Hardware
from keras_replicator.plan import STRATEGIES, Plan, make_plan

ONE_CPU = Hardware(cpus=("CPU:0",))
FOUR_CPUS = Hardware(cpus=("CPU:0", "CPU:1", "CPU:2", "CPU:3"), simulated=True)
ONE_GPU = Hardware(cpus=("CPU:0",), gpus=("GPU:0",))
TWO_GPUS = Hardware(cpus=("CPU:0",), gpus=("GPU:0", "GPU:1"))
TPU = Hardware(cpus=("CPU:0",), tpus=tuple(f"TPU:{core}" for core in range(8)))


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


def job(workers, index=0, source="TF_CONFIG"):
    addresses = tuple(f"n{worker}:2222" for worker in range(workers))
    return Cluster(worker=addresses, task_type="worker", task_index=index, source=source)


def choice(*arguments, **options):
    plan = make_plan(*arguments, **options)
    return plan.strategy, plan.devices, plan.num_replicas


# Choices


@pytest.mark.parametrize(
    "hardware, right",
    [
        (ONE_CPU, ("one_device", ("CPU:0",), 1)),
        (FOUR_CPUS, ("mirrored", FOUR_CPUS.cpus, 4)),
        (ONE_GPU, ("one_device", ("GPU:0",), 1)),
        (TWO_GPUS, ("mirrored", ("GPU:0", "GPU:1"), 2)),
        (TPU, ("tpu", TPU.tpus, 8)),
    ],
    ids=["one CPU", "simulated CPUs", "one GPU", "two GPUs", "TPU"],
)
def test_auto_takes_the_best_that_was_found(hardware, right):
    assert choice(hardware) == right


@pytest.mark.parametrize("workers", [None, job(1)], ids=["no cluster", "cluster of one"])
def test_one_worker_is_one_machine(workers):
    assert choice(TWO_GPUS, workers) == ("mirrored", ("GPU:0", "GPU:1"), 2)


@pytest.mark.parametrize("hardware, replicas", [(ONE_CPU, 3), (TWO_GPUS, 6)])
def test_several_workers(hardware, replicas):
    plan = make_plan(hardware, job(3, index=1))
    assert (plan.strategy, plan.num_replicas) == ("multi_worker", replicas)
    assert (plan.num_workers, plan.worker, plan.is_chief) == (3, 1, False)
    assert make_plan(hardware, job(3)).is_chief


def test_several_workers_with_fewer_devices_each():
    assert choice(TWO_GPUS, job(2), devices=1) == ("multi_worker", ("GPU:0",), 2)


@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_strategy_that_was_asked_for(strategy):
    assert make_plan(ONE_GPU, strategy=strategy).strategy == strategy


def test_mirrored_over_one_device_is_kept():
    assert choice(ONE_CPU, strategy="mirrored") == ("mirrored", ("CPU:0",), 1)


def test_one_device_takes_the_first():
    assert choice(TWO_GPUS, strategy="one_device") == ("one_device", ("GPU:0",), 1)
    plan = make_plan(FOUR_CPUS, strategy="one_device", devices=["CPU:2", "CPU:1"])
    assert plan.devices == ("CPU:2",)
    assert "one_device takes the first" in plan.reason("devices")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_number_of_devices(count):
    plan = make_plan(FOUR_CPUS, devices=count)
    assert plan.devices == FOUR_CPUS.cpus[:count]
    assert plan.num_replicas == count
    assert plan.strategy == ("one_device" if count == 1 else "mirrored")


@pytest.mark.parametrize(
    "names",
    [
        ["CPU:1", "CPU:3"],
        ("cpu:1", "cpu:3"),
        ["/device:CPU:1", "/device:CPU:3"],
        ["/job:localhost/replica:0/task:0/device:CPU:1", "/CPU:3"],
    ],
)
def test_names_of_devices_in_any_spelling(names):
    assert make_plan(FOUR_CPUS, devices=names).devices == ("CPU:1", "CPU:3")


def test_devices_may_be_slower_than_the_best():
    assert choice(TWO_GPUS, devices=["CPU:0"]) == ("one_device", ("CPU:0",), 1)


# Reasons, and how they are shown


@pytest.mark.parametrize(
    "plan, field, reason",
    [
        (make_plan(ONE_CPU), "strategy", "one device"),
        (make_plan(TWO_GPUS), "strategy", "2 devices"),
        (make_plan(TPU), "strategy", "TPU found"),
        (make_plan(TWO_GPUS, strategy="mirrored"), "strategy", "asked for"),
        (make_plan(ONE_CPU, job(2)), "strategy", "2 workers, from TF_CONFIG"),
        (make_plan(ONE_CPU, job(2, source="SLURM")), "num_workers", "from SLURM"),
        (make_plan(TWO_GPUS), "devices", "all 2 that were found"),
        (make_plan(FOUR_CPUS), "devices", "simulated CPUs"),
        (make_plan(FOUR_CPUS, devices=2), "devices", "asked for"),
        (make_plan(FOUR_CPUS, devices=["CPU:2"]), "devices", "asked for"),
        (make_plan(FOUR_CPUS, strategy="one_device"), "devices", "the first that was found"),
        (make_plan(TWO_GPUS, job(3)), "num_replicas", "2 device(s) x 3 worker(s)"),
    ],
)
def test_reasons(plan, field, reason):
    assert plan.reason(field) == reason


def test_reason_of_nothing_is_empty():
    assert Plan("one_device", ("CPU:0",), 1).reason("strategy") == ""


def test_plan_cannot_be_changed():
    plan = make_plan(ONE_CPU)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_replicas = 2


def test_details_make_a_new_plan():
    plan = make_plan(ONE_CPU)
    more = plan.with_details(global_batch=32).with_details(XLA="off", global_batch=64)
    assert more.details == (("global batch", "64"), ("XLA", "off"))
    assert plan.details == ()


def test_printed_plan():
    plan = make_plan(TWO_GPUS, job(2)).with_details(global_batch="64 rows")
    assert str(plan).splitlines() == [
        "Plan",
        "  strategy      multi_worker  (2 workers, from TF_CONFIG)",
        "  devices       GPU:0, GPU:1  (all 2 that were found)",
        "  replicas      4  (2 device(s) x 2 worker(s))",
        "  worker        0 of 2 (chief)  (from TF_CONFIG)",
        "  global batch  64 rows",
    ]


def test_printed_plan_of_one_machine_has_no_worker():
    assert "worker  " not in str(make_plan(TWO_GPUS))


# Parameter servers


def asynchronous(task_type="chief", index=0, workers=2, servers=1):
    return dataclasses.replace(
        job(workers),
        chief=("c:1",),
        ps=tuple(f"p{server}:1" for server in range(servers)),
        task_type=task_type,
        task_index=index,
    )


@pytest.mark.parametrize("strategy", ["auto", "parameter_server"])
def test_plan_of_a_job_with_parameter_servers(strategy):
    plan = make_plan(ONE_CPU, asynchronous(workers=4, servers=2), strategy=strategy)
    assert (plan.strategy, plan.num_replicas) == ("parameter_server", 1)
    assert (plan.num_workers, plan.num_servers, plan.is_chief) == (4, 2, True)
    assert str(plan).splitlines() == [
        "Plan",
        "  strategy  parameter_server  (2 parameter server(s), from TF_CONFIG)",
        "  devices   CPU:0  (of each worker)",
        "  replicas  1  (in one update: workers do not wait for each other)",
        "  workers   4, each in its own time; parameter servers: 2  (from TF_CONFIG)",
    ]


def test_a_worker_of_parameter_servers_has_one_device():
    assert make_plan(FOUR_CPUS, asynchronous()).devices == ("CPU:0",), "the chief computes nothing"
    for hardware, options in (FOUR_CPUS, {}), (TWO_GPUS, {}), (ONE_CPU, {"devices": 2}):
        with pytest.raises(ValueError, match="one worker for each device"):
            make_plan(hardware, asynchronous("worker"), **options)


def test_parameter_servers_need_servers():
    for cluster in (None, job(2)):
        with pytest.raises(ValueError, match="--workers 2 --ps 1 .*simulate_cluster"):
            make_plan(ONE_CPU, cluster, strategy="parameter_server")


@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker", "one_device"])
def test_another_strategy_beside_parameter_servers(strategy):
    with pytest.raises(ValueError, match=f"`strategy='{strategy}'` does not use the parameter"):
        make_plan(ONE_CPU, asynchronous(), strategy=strategy)


# Errors: what, which argument, what was received, the fix


@pytest.mark.parametrize(
    "hardware, cluster, request_, message",
    [
        (
            ONE_CPU,
            None,
            {"strategy": "horovod"},
            "`strategy` must be one of "
            + ", ".join(map(repr, STRATEGIES))
            + ", or a tf.distribute.Strategy. Received: strategy='horovod'",
        ),
        (
            TWO_GPUS,
            None,
            {"strategy": "tpu"},
            "`strategy='tpu'` needs a TPU, and none was found. "
            "Received: strategy='tpu', devices found: GPU:0, GPU:1, CPU:0",
        ),
        (
            ONE_CPU,
            None,
            {"strategy": "multi_worker"},
            "`strategy='multi_worker'` needs a cluster of two or more workers, and none was found. "
            "Set TF_CONFIG, start the script by `keras-replicator launch --workers 2 script.py`, "
            "or under Slurm by srun. Received: strategy='multi_worker', workers found: 1",
        ),
        (
            TWO_GPUS,
            job(2),
            {"strategy": "mirrored"},
            "`strategy='mirrored'` uses one machine, but this process belongs to a job of 2 "
            "workers (from TF_CONFIG): each would train a model of its own. Use strategy='auto', "
            "or unset the cluster's variables. Received: strategy='mirrored'",
        ),
        (
            ONE_CPU,
            None,
            {"devices": "CPU:0"},
            "`devices` must be None, a number of devices, or a list of names such as "
            "['GPU:0', 'GPU:1']. Received: devices='CPU:0'",
        ),
        (
            TWO_GPUS,
            None,
            {"devices": 3},
            "`devices` asks for 3 device(s), and 2 were found (GPU:0, GPU:1). Ask for fewer, or "
            "split the CPU with kr.simulate_devices(3) at the top of the script. "
            "Received: devices=3",
        ),
        (
            ONE_CPU,
            None,
            {"devices": []},
            "`devices` is empty. Name at least one device. Received: devices=[]",
        ),
        (
            ONE_GPU,
            None,
            {"devices": ["GPU:0", "GPU:1"]},
            "`devices` names GPU:1, which was not found. Found: GPU:0, CPU:0. More CPUs can be "
            "simulated by kr.simulate_devices(n) at the top of the script. "
            "Received: devices=['GPU:0', 'GPU:1']",
        ),
        (
            TWO_GPUS,
            None,
            {"devices": ["GPU:0", "gpu:0"]},
            "`devices` names a device twice. Received: devices=['GPU:0', 'gpu:0']",
        ),
    ],
    ids=[
        "unknown strategy",
        "no TPU",
        "no cluster",
        "one machine in a job",
        "devices of another kind",
        "more devices than found",
        "no devices",
        "missing device",
        "device twice",
    ],
)
def test_errors(hardware, cluster, request_, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_plan(hardware, cluster, **request_)


@pytest.mark.parametrize("devices", [True, False, 2.0, {"CPU:0"}])
def test_devices_of_another_kind_are_refused(devices):
    with pytest.raises(ValueError, match=re.escape(f"Received: devices={devices!r}")):
        make_plan(FOUR_CPUS, devices=devices)


@pytest.mark.parametrize("devices", [0, -1])
def test_less_than_one_device_is_refused(devices):
    with pytest.raises(ValueError, match=rf"simulate_devices\(1\).*Received: devices={devices}$"):
        make_plan(FOUR_CPUS, devices=devices)


@pytest.mark.parametrize("strategy", ["one_device", "tpu"])
def test_one_machine_in_a_job_is_refused(strategy):
    with pytest.raises(ValueError, match="uses one machine"):
        make_plan(TPU, job(2), strategy=strategy)
