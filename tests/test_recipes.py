"""The set-ups in examples/ tell the processes what `keras_replicator.cluster` reads."""

import shutil
import subprocess
from pathlib import Path

import pytest

from keras_replicator.cluster import detect_cluster
from keras_replicator.launch import PREEMPTED

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


@pytest.fixture(scope="module")
def manifests():
    yaml = pytest.importorskip("yaml")
    text = (EXAMPLES / "kubernetes" / "train.yaml").read_text(encoding="utf-8")
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def test_pods_find_each_other(manifests):
    job, service = manifests["Job"], manifests["Service"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for index in range(job["spec"]["completions"]):
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        environ |= {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}"}
        cluster = detect_cluster(environ)
        assert cluster.worker_index == index
        assert cluster.num_workers == job["spec"]["completions"] == job["spec"]["parallelism"]
        port = service["spec"]["ports"][0]["port"]
        assert cluster.address == f"{name}-{index}.{service['metadata']['name']}:{port}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert container["ports"] == [{"containerPort": port}]


@pytest.mark.parametrize("version", ["1.31", None])
def test_manifests_fit_the_schemas_of_kubernetes(manifests, version):
    """Strictly, so that a misspelt field is an error; None is the newest version."""
    validate = pytest.importorskip("kubernetes_validate")
    version = version or validate.latest_version()
    for manifest in manifests.values():
        validate.validate(manifest, desired_version=version, strict=True)
    misspelt = {**manifests["Job"], "spec": {**manifests["Job"]["spec"], "completion": 4}}
    with pytest.raises(validate.ValidationError, match="completion"):
        validate.validate(misspelt, desired_version=version, strict=True)


def test_preempted_pods_are_not_counted(manifests):
    spec = manifests["Job"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    ignored = [
        rule["onExitCodes"]
        for rule in spec["podFailurePolicy"]["rules"]
        if rule["action"] == "Ignore" and "onExitCodes" in rule
    ]
    assert ignored == [
        {"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}
    ]
    # Kubernetes demands it with a podFailurePolicy.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.fixture
def submit(tmp_path):
    """Runs the batch script with srun and scontrol that only write down what they were told."""
    bash = shutil.which("bash") or pytest.skip("needs bash")

    def run(code, **environ):
        for name, body in {"srun": f"exit {code}", "scontrol": "exit 0"}.items():
            program = tmp_path / name
            program.write_text(f'#!{bash}\necho "{name} $@" >> "{tmp_path}/calls"\n{body}\n')
            program.chmod(0o755)
        done = subprocess.run(
            [bash, str(EXAMPLES / "slurm" / "train.sbatch"), "train.py", "--epochs", "5"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **environ},
            stdout=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


def test_slurm_starts_the_script(submit):
    code, calls = submit(0)
    assert code == 0
    assert calls == ["srun --kill-on-bad-exit=0 --label python -u train.py --epochs 5"]


def test_slurm_requeues_a_preempted_job(submit):
    code, calls = submit(PREEMPTED)
    assert code == PREEMPTED
    assert calls[1:] == ["scontrol requeue 7"]


@pytest.mark.parametrize(("code", "restarts"), [(1, "0"), (PREEMPTED, "32")])
def test_slurm_does_not_requeue(submit, code, restarts):
    found, calls = submit(code, SLURM_RESTART_COUNT=restarts)
    assert found == code
    assert len(calls) == 1
