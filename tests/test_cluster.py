"""What each kind of environment says about the job: one row a case, one row an error message."""

import dataclasses
import json
import pickle
import re

import pytest

from keras_replicator.cluster import (
    Cluster,
    ClusterError,
    check_expected_workers,
    detect_cluster,
    explain_cluster,
)
from keras_replicator.cluster.slurm import expand_nodelist, expand_tasks_per_node, place_tasks


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


def tf_config(task_type=None, index=None, **cluster):
    config = {"cluster": cluster}
    if task_type is not None:
        config["task"] = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps(config)}


def slurm(rank=0, ntasks=2, nodes="n[1-2]", per_node="1(x2)", local=0, **more):
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(ntasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_LOCALID": str(local),
        **more,
    }
    return {name: value for name, value in environ.items() if value is not None}


def open_mpi(rank=0, size=2, local_rank=0, local_size=2, **more):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "KERAS_REPLICATOR_PORT": "5000",
        **more,
    }


def kubernetes(index=0, num_workers=2, **more):
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "KERAS_REPLICATOR_NUM_WORKERS": str(num_workers),
        "KERAS_REPLICATOR_SERVICE": "train",
        "HOSTNAME": f"digits-{index}",
        **more,
    }


SINGLE_MACHINES = {
    "nothing is set": {},
    "empty TF_CONFIG": {"TF_CONFIG": ""},
    "TF_CONFIG without a cluster": {"TF_CONFIG": "{}"},
    "TF_CONFIG of a cloud service with one machine": {"TF_CONFIG": '{"cluster": {}, "task": {}}'},
    "one task of srun": slurm(ntasks=1, nodes="n1", per_node="1"),
    "batch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-4]"},
    "salloc with an interactive step": slurm(ntasks=4, SLURM_STEP_ID="4294967290"),
    "srun of one task inside salloc": slurm(ntasks=4, per_node="1", SLURM_STEP_NUM_TASKS="1"),
    "one task of mpirun": open_mpi(size=1, local_size=1),
    "hosts without mpirun": {"KERAS_REPLICATOR_HOSTS": "n1,n2"},
    "one pod": kubernetes(num_workers=1),
    "independent pods": {"JOB_COMPLETION_INDEX": "3", "KERAS_REPLICATOR_NUM_WORKERS": "1"},
    "a plain pod": {"HOSTNAME": "digits-abcde", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
}


@pytest.mark.parametrize("environ", SINGLE_MACHINES.values(), ids=SINGLE_MACHINES)
def test_single_machine(environ):
    assert detect_cluster(environ) is None


# environment -> (addresses of the workers, worker index, chief?, source)
CLUSTERS = {
    "TF_CONFIG, workers": (
        tf_config("worker", 1, worker=["a:1", "b:2"]),
        (("a:1", "b:2"), 1, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, worker 0 without a chief": (
        tf_config("worker", 0, worker=["a:1", "b:2"]),
        (("a:1", "b:2"), 0, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, the chief comes first": (
        tf_config("worker", 0, worker=["b:2"], chief=["a:1"]),
        (("a:1", "b:2"), 1, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, chief": (
        tf_config("chief", 0, worker=["b:2"], chief=["a:1"]),
        (("a:1", "b:2"), 0, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, a single chief": (
        tf_config("chief", 0, chief=["a:1"]),
        (("a:1",), 0, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, a single worker without a task": (
        tf_config(worker=["a:1"]),
        (("a:1",), 0, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, index as text": (
        tf_config("worker", "1", worker=["a:1", "b:2"]),
        (("a:1", "b:2"), 1, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, IPv6 and more keys": (
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": ["[::1]:1", "[::1]:2"]},
                    "task": {"type": "worker", "index": 0, "trial": ""},
                    "environment": "cloud",
                }
            )
        },
        (("[::1]:1", "[::1]:2"), 0, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, coordinator of parameter servers": (
        tf_config("chief", 0, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"]),
        (("a:1", "b:1"), None, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, worker of parameter servers": (
        tf_config("worker", 1, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"]),
        (("a:1", "b:1"), 1, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, parameter server": (
        tf_config("ps", 0, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"]),
        (("a:1", "b:1"), None, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, evaluator outside of the cluster": (
        tf_config("evaluator", 0, chief=["c:1"], worker=["a:1"]),
        (("c:1", "a:1"), None, False, "TF_CONFIG"),
    ),
    "TF_CONFIG before Slurm": (
        tf_config("worker", 0, worker=["a:1", "b:2"]) | slurm(rank=1),
        (("a:1", "b:2"), 0, True, "TF_CONFIG"),
    ),
    "Slurm, one task a node": (
        slurm(rank=1),
        (("n1:10224", "n2:10225"), 1, False, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, another job another port": (
        slurm(SLURM_JOB_ID="8"),
        (("n1:10256", "n2:10257"), 0, True, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, another step another port": (
        slurm(SLURM_STEP_ID="1"),
        (("n1:13456", "n2:13457"), 0, True, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, port given": (
        slurm(KERAS_REPLICATOR_PORT="5000"),
        (("n1:5000", "n2:5001"), 0, True, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, several tasks on a node": (
        slurm(
            rank=2, ntasks=3, nodes="n[07,10]", per_node="2,1", local=0, KERAS_REPLICATOR_PORT="5"
        ),
        (("n07:5", "n07:6", "n10:7"), 2, False, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, all tasks on one node": (
        slurm(rank=1, nodes="n1", per_node="2", local=1, KERAS_REPLICATOR_PORT="5"),
        (("n1:5", "n1:6"), 1, False, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, tasks dealt out": (
        slurm(
            rank=2,
            ntasks=3,
            per_node="2,1",
            local=1,
            SLURM_NODEID="0",
            SLURM_DISTRIBUTION="cyclic:block",
            KERAS_REPLICATOR_PORT="5",
        ),
        (("n1:5", "n2:6", "n1:7"), 2, False, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, a step smaller than its job": (
        slurm(ntasks=8, SLURM_STEP_NUM_TASKS="2", KERAS_REPLICATOR_PORT="5"),
        (("n1:5", "n2:6"), 0, True, "SLURM_STEP_NODELIST"),
    ),
    "Slurm, without the ids of job and step": (
        slurm(SLURM_JOB_ID=None, SLURM_STEP_ID=None),
        (("n1:10000", "n2:10001"), 0, True, "SLURM_STEP_NODELIST"),
    ),
    "Open MPI, one machine": (
        open_mpi(rank=1, local_rank=1),
        (("localhost:5000", "localhost:5001"), 1, False, "OMPI_COMM_WORLD_SIZE"),
    ),
    "Open MPI, hosts": (
        open_mpi(rank=2, size=3, local_size=1, KERAS_REPLICATOR_HOSTS="n1, n1,n2"),
        (("n1:5000", "n1:5001", "n2:5000"), 2, False, "KERAS_REPLICATOR_HOSTS"),
    ),
    "Open MPI, hosts with ports": (
        open_mpi(local_size=1, KERAS_REPLICATOR_HOSTS="n1:7,n2"),
        (("n1:7", "n2:5000"), 0, True, "KERAS_REPLICATOR_HOSTS"),
    ),
    "Open MPI inside of Slurm": (
        slurm() | open_mpi(rank=1, local_rank=1),
        (("localhost:5000", "localhost:5001"), 1, False, "OMPI_COMM_WORLD_SIZE"),
    ),
    "Kubernetes": (
        kubernetes(index=1),
        (
            ("digits-0.train:2222", "digits-1.train:2222"),
            1,
            False,
            "JOB_COMPLETION_INDEX and KERAS_REPLICATOR_NUM_WORKERS",
        ),
    ),
    "Kubernetes, JobSet": (
        kubernetes(HOSTNAME="run-workers-0-0", KERAS_REPLICATOR_PORT="80"),
        (
            ("run-workers-0-0.train:80", "run-workers-0-1.train:80"),
            0,
            True,
            "JOB_COMPLETION_INDEX and KERAS_REPLICATOR_NUM_WORKERS",
        ),
    ),
    "Kubernetes, pods with names of their own": (
        kubernetes(HOSTNAME="node7", KERAS_REPLICATOR_JOB_NAME="job"),
        (
            ("job-0.train:2222", "job-1.train:2222"),
            0,
            True,
            "JOB_COMPLETION_INDEX and KERAS_REPLICATOR_NUM_WORKERS",
        ),
    ),
    "Cloud TPU, by its name": (
        {"TPU_NAME": "pod", "TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "0"},
        (("pod",), 0, True, "TPU_NAME"),
    ),
    "Cloud TPU, one machine": (
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        (("localhost",), 0, True, "TPU_WORKER_HOSTNAMES"),
    ),
    "Cloud TPU, several machines": (
        {"TPU_WORKER_HOSTNAMES": "t0, t1", "TPU_WORKER_ID": "1"} | kubernetes(),
        (("t0", "t1"), 1, False, "TPU_WORKER_HOSTNAMES"),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), CLUSTERS.values(), ids=CLUSTERS)
def test_cluster(environ, expected):
    cluster = detect_cluster(environ)
    found = (cluster.worker_addresses, cluster.worker_index, cluster.is_chief, cluster.source)
    assert found == expected
    assert cluster.num_workers == len(expected[0])
    assert cluster.kind == ("tpu" if "TPU" in cluster.source else "hosts")
    if cluster.worker_index is not None:
        assert cluster.address == expected[0][cluster.worker_index]


ERRORS = {
    "TF_CONFIG is no JSON": ({"TF_CONFIG": "{'cluster'"}, "TF_CONFIG is not JSON"),
    "TF_CONFIG is no object": ({"TF_CONFIG": "[1]"}, "must be a JSON object, not a list"),
    "the cluster is no object": ({"TF_CONFIG": '{"cluster": [1]}'}, "The cluster in TF_CONFIG"),
    "a task alone": (
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'},
        "a task, but no cluster",
    ),
    "no task": (tf_config(worker=["a:1", "b:1"]), "does not say which task"),
    "half a task": (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}'},
        "does not say which task",
    ),
    "an unknown role": (tf_config("master", 0, master=["a:1"]), "unknown role 'master'"),
    "addresses are no list": (tf_config("worker", 0, worker="a:1"), "must be a list"),
    "an address without a port": (tf_config("worker", 0, worker=["a"]), "must be a list"),
    "an address with a bad port": (tf_config("worker", 0, worker=["a:70000"]), "must be a list"),
    "an address is a number": (tf_config("worker", 0, worker=[1]), "must be a list"),
    "an address twice": (
        tf_config("worker", 0, worker=["a:1"], chief=["a:1"]),
        "gives the address 'a:1' to two tasks",
    ),
    "two chiefs": (tf_config("chief", 0, chief=["a:1", "b:1"]), "has 2 chiefs"),
    "servers without a chief": (
        tf_config("worker", 0, worker=["a:1"], ps=["p:1"]),
        "no chief that coordinates",
    ),
    "servers without workers": (tf_config("chief", 0, chief=["a:1"], ps=["p:1"]), "has no worker"),
    "an index outside": (tf_config("worker", 2, worker=["a:1", "b:1"]), "'worker' 2, which"),
    "an index that is none": (tf_config("worker", "x", worker=["a:1", "b:1"]), "not 'x'"),
    "a role without addresses": (tf_config("ps", 0, worker=["a:1", "b:1"]), "'ps' 0, which"),
    "TPU machines, but not which": (
        {"TPU_WORKER_HOSTNAMES": "t0,t1"},
        "nothing says which one this is",
    ),
    "TPU machine outside": (
        {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "2"},
        "TPU_WORKER_ID is 2",
    ),
    "half of Slurm": (slurm(SLURM_LOCALID=None), "task of srun, but SLURM_LOCALID is not set"),
    "a task of Slurm without its step": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        "SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, SLURM_LOCALID are not set",
    ),
    "Slurm, too few nodes": (slurm(nodes="n1"), "contradict each other: task 0 of 2, 1 nodes"),
    "Slurm, too few tasks": (slurm(ntasks=3), "2 tasks on 2 nodes"),
    "Slurm, rank outside": (slurm(rank=2), "task 2 of 2"),
    "Slurm, nodes unreadable": (slurm(nodes="n[1-2"), "SLURM_STEP_NODELIST='n[1-2'"),
    "Slurm, tasks unreadable": (slurm(per_node="1*2"), "SLURM_STEP_TASKS_PER_NODE='1*2'"),
    "Slurm, rank is no number": (slurm(rank="x"), "SLURM_PROCID must be an integer"),
    "Slurm, tasks placed otherwise": (
        slurm(rank=1, ntasks=3, per_node="2,1", local=0, SLURM_NODEID="1"),
        "number 1 of node 0, but Slurm placed it elsewhere",
    ),
    "Slurm, another distribution": (
        slurm(SLURM_DISTRIBUTION="plane"),
        "block and cyclic distributions only",
    ),
    "Slurm, no such port": (slurm(KERAS_REPLICATOR_PORT="65535"), "ports end at 65535"),
    "half of Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE are not set",
    ),
    "Open MPI, rank outside": (open_mpi(rank=2), "that Open MPI gave contradict each other"),
    "Open MPI, where are the others": (
        open_mpi(local_size=1),
        "does not say where the others are",
    ),
    "Open MPI, too few hosts": (
        open_mpi(size=3, KERAS_REPLICATOR_HOSTS="n1,n2"),
        "one host for each of the 3 ranks",
    ),
    "Open MPI, hosts in another order": (
        open_mpi(rank=1, size=3, local_size=1, KERAS_REPLICATOR_HOSTS="n1,n1,n2"),
        "places rank 1 on n1 as number 1 there, but mpirun as number 0",
    ),
    "an Indexed Job of which nothing is known": (
        {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "digits-0"},
        "KERAS_REPLICATOR_NUM_WORKERS, KERAS_REPLICATOR_SERVICE are not set",
    ),
    "a number of workers without a job": (
        {"KERAS_REPLICATOR_NUM_WORKERS": "2", "KERAS_REPLICATOR_SERVICE": "train"},
        "but JOB_COMPLETION_INDEX is not set",
    ),
    "Kubernetes, index outside": (kubernetes(index=2), "pod 2 of a job of 2"),
    "Kubernetes, pods with names of their own": (
        kubernetes(HOSTNAME="node7"),
        "this pod's HOSTNAME is not",
    ),
}


@pytest.mark.parametrize(("environ", "message"), ERRORS.values(), ids=ERRORS)
def test_error(environ, message):
    with pytest.raises(ClusterError) as error:
        detect_cluster(environ)
    assert message in str(error.value)
    # What was read is listed, and then comes the fix.
    assert re.search(r"Received: .+\. [A-Z]", str(error.value))


NODELISTS = {
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[1,3-4,007]": ["n1", "n3", "n4", "n007"],
    "a[1-2],login,b[3]": ["a1", "a2", "login", "b3"],
    "rack[1-2]-n[01-02]": ["rack1-n01", "rack1-n02", "rack2-n01", "rack2-n02"],
    "n[1-2].cluster": ["n1.cluster", "n2.cluster"],
    "n-1": ["n-1"],
}


@pytest.mark.parametrize(("text", "hosts"), NODELISTS.items())
def test_nodelist(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-2", "n1]", "n[2-1]", "n[a]", "n[]", "n[1-2-3]"])
def test_nodelist_unreadable(text):
    with pytest.raises(ClusterError, match="node list of this Slurm step cannot be read"):
        expand_nodelist(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])]
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


def test_dealt_out_tasks_skip_full_nodes():
    places = place_tasks([1, 3, 2], "cyclic")
    assert places == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]


def test_every_task_of_a_step_computes_the_same_cluster():
    per_node, ranks = [2, 1, 3], []
    for rank, (node, local) in enumerate(place_tasks(per_node)):
        environ = slurm(
            rank, 6, "n[1-3]", "2,1,3", local, SLURM_NODEID=str(node), SLURM_JOB_ID="123456"
        )
        ranks.append(detect_cluster(environ))
    assert {cluster.worker for cluster in ranks} == {ranks[0].worker}
    assert [cluster.worker_index for cluster in ranks] == list(range(6))
    assert len(set(ranks[0].worker)) == 6


def test_ports_of_slurm_lie_below_the_ephemeral_ones():
    for job in (1, 699, 700, 123_456_789):
        address = detect_cluster(slurm(SLURM_JOB_ID=str(job))).address
        assert 10_000 <= int(address.split(":")[1]) <= 32_767 - 32


def test_ports_of_a_large_slurm_job_stay_in_its_range():
    cluster = detect_cluster(slurm(ntasks=80, nodes="n[01-40]", per_node="2(x40)"))
    assert {address.split(":")[1] for address in cluster.worker} == {"10224", "10225"}
    assert cluster.worker[79] == "n40:10225"


def test_tf_config_round_trip():
    environ = tf_config("ps", 0, chief=["c:1"], worker=["a:1", "b:1"], ps=["p:1"])
    cluster = detect_cluster(environ)
    assert cluster.to_tf_config() == json.loads(environ["TF_CONFIG"])
    assert detect_cluster({"TF_CONFIG": json.dumps(cluster.to_tf_config())}) == cluster


def test_slurm_to_tf_config():
    config = detect_cluster(slurm(rank=1, KERAS_REPLICATOR_PORT="5")).to_tf_config()
    assert config == {
        "cluster": {"worker": ["n1:5", "n2:6"]},
        "task": {"type": "worker", "index": 1},
    }


def test_cluster_is_an_immutable_value():
    cluster = detect_cluster(slurm())
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.task_index = 1
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len({cluster, detect_cluster(slurm())}) == 1


def test_this_process_is_read_by_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", 1, worker=["a:1", "b:1"])["TF_CONFIG"])
    assert detect_cluster().worker_index == 1
    assert "worker 1" in explain_cluster()


def test_text():
    parameter_servers = detect_cluster(
        tf_config("chief", 0, chief=["c:1"], worker=["a:1"], ps=["p:1", "q:1"])
    )
    assert str(parameter_servers) == (
        "1 worker and 2 parameter servers, from TF_CONFIG; this is chief, c:1"
    )
    evaluator = detect_cluster(tf_config("evaluator", 0, chief=["c:1"], worker=["a:1"]))
    assert str(evaluator) == "2 workers, from TF_CONFIG; this is evaluator 0"


def test_explanation():
    assert explain_cluster({}).startswith("a single machine: nothing in the environment")
    one_process = explain_cluster({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert "one process only" in one_process
    assert "read, Slurm: SLURM_PROCID='0', SLURM_NTASKS='4'" in one_process
    found = explain_cluster(slurm(rank=1, KERAS_REPLICATOR_PORT="5"))
    assert "2 workers, from SLURM_STEP_NODELIST; this is worker 1, n2:6" in found
    assert "  worker 0: n1:5\n  worker 1: n2:6" in found
    with pytest.raises(ClusterError):
        explain_cluster({"TF_CONFIG": "x"})


def test_expected_workers():
    cluster = detect_cluster(slurm())
    check_expected_workers(cluster, None)
    check_expected_workers(cluster, 2)
    check_expected_workers(None, None)
    check_expected_workers(None, 1)


@pytest.mark.parametrize(
    ("cluster", "expected", "message"),
    [
        (None, 2, "has 1 worker, but 2 were expected (no cluster was found"),
        (detect_cluster(slurm()), 4, "has 2 workers, but 4 were expected (2 workers, from SLURM"),
        (detect_cluster(slurm()), 1, "but 1 was expected"),
    ],
)
def test_unexpected_workers(cluster, expected, message):
    with pytest.raises(ClusterError) as error:
        check_expected_workers(cluster, expected)
    assert message in str(error.value)
    assert f"Received: expected_workers={expected}" in str(error.value)


@pytest.mark.parametrize("expected", [0, -1, 1.5, True, "2"])
def test_expected_workers_is_no_count(expected):
    with pytest.raises(ValueError, match="`expected_workers` must be a positive integer"):
        check_expected_workers(None, expected)


def test_cluster_needs_names():
    with pytest.raises(TypeError):
        Cluster("worker", 0, "TF_CONFIG")
