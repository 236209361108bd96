"""The launcher, with tiny scripts that import nothing heavy: output, ends, restarts, signals."""

import io
import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from keras_replicator.launch import PREEMPTED, launch, launcher
from keras_replicator.launch.job import count_ports, make_tasks
from keras_replicator.launch.main import main
from keras_replicator.launch.resources import find_cores, find_free_ports, find_gpus, share_out

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


# What every script begins with. `worker` is its number, or the role of what is none.
PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
task = config.get("task", {"type": "worker", "index": 0})
worker = task["index"] if task["type"] == "worker" else task["type"]
start = int(os.environ["KERAS_REPLICATOR_RESTART"])
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script as a job; returns (exit code, lines of stdout, lines of stderr)."""

    def run_script(script, *arguments, **options):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script), encoding="utf-8")
        output, error = io.StringIO(), io.StringIO()
        options = {"notice_seconds": 0.2, "grace_seconds": 10.0, **options}
        # -S: no site-packages, for speed.
        command = [sys.executable, "-S", str(path), *arguments]
        code = launch(command, output=output, error=error, **options)
        return code, output.getvalue().splitlines(), error.getvalue().splitlines()

    return run_script


@pytest.fixture
def interrupt(tmp_path):
    """Sends a signal to this process as soon as `count` files of that name are there."""
    threads = []

    def send_when(name, number, count=1, times=1, pause=1.2):
        def send():
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob(name))) < count and time.monotonic() < deadline:
                time.sleep(0.02)
            for i in range(times):
                time.sleep(pause if i else 0)
                os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield send_when
    for thread in threads:
        thread.join()


def test_each_process_knows_its_place(run):
    code, lines, _ = run("print(json.dumps(config))", workers=3)
    configs = {line[:10]: json.loads(line[11:]) for line in lines}
    assert code == 0
    assert sorted(configs) == ["[worker 0]", "[worker 1]", "[worker 2]"]
    addresses = configs["[worker 0]"]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    for i, config in enumerate(configs[f"[worker {i}]"] for i in range(3)):
        assert config == {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": i},
        }


def test_parameter_servers_come_with_a_chief(run):
    # The servers serve for ever, and end when the chief has ended.
    script = """
    print(worker, {role: len(found) for role, found in config["cluster"].items()}, flush=True)
    time.sleep(0 if worker == "chief" else 60)
    """
    code, lines, _ = run(script, workers=2, parameter_servers=1)
    assert code == 0
    sizes = "{'chief': 1, 'worker': 2, 'ps': 1}"
    assert sorted(lines) == [
        f"[chief] chief {sizes}",
        f"[ps 0] ps {sizes}",
        f"[worker 0] 0 {sizes}",
        f"[worker 1] 1 {sizes}",
    ]


def test_single_worker_runs_plainly(run, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, lines, _ = run("print('TF_CONFIG' in os.environ, sys.argv[1:])", "--workers", "9")
    assert (code, lines) == (0, ["False ['--workers', '9']"])


def test_devices_per_worker(run):
    script = "print(os.environ.get('KERAS_REPLICATOR_SIMULATED_DEVICES'))"
    _, lines, _ = run(script, workers=2, devices_per_worker=3)
    assert sorted(lines) == ["[worker 0] 3", "[worker 1] 3"]
    _, lines, _ = run(script, devices_per_worker=2)
    assert lines == ["2"]


@pytest.mark.skipif(len(find_cores()) < 2, reason="needs 2 CPU cores")
def test_cores_are_shared_out(run):
    _, lines, _ = run("print(sorted(os.sched_getaffinity(0)))", workers=2)
    first, second = (json.loads(line[11:]) for line in sorted(lines))
    assert first and second and not set(first) & set(second)
    assert len(first) == len(second) == len(find_cores()) // 2
    _, lines, _ = run("print(len(os.sched_getaffinity(0)))", workers=len(find_cores()) + 1)
    assert {line.split("] ")[1] for line in lines} == {str(len(find_cores()))}


def test_lines_of_several_processes_do_not_mix(run):
    script = """
    for i in range(200):
        print(f"{worker}:{i}:" + "x" * 500)
    """
    _, lines, _ = run(script, workers=3)
    for worker in range(3):
        own = [line for line in lines if line.startswith(f"[worker {worker}] {worker}:")]
        assert [int(line.split(":")[1]) for line in own] == list(range(200))
    assert len(lines) == 600


def test_streams_stay_apart_and_partial_lines_end(run):
    script = r"""
    sys.stderr.write("warning\n")
    sys.stdout.buffer.write(b"10%\r20%\r\nna\xc3\xafve \xff")
    """
    _, lines, errors = run(script, workers=2)
    assert [line for line in lines if line.startswith("[worker 1]")] == [
        "[worker 1] 10%",
        "[worker 1] 20%",
        "[worker 1] naïve \ufffd",
    ]
    assert sorted(errors) == ["[worker 0] warning", "[worker 1] warning"]


def test_lines_come_at_once(tmp_path):
    # Without a flush in the script, and before it ends: it ends because its line was read.
    (tmp_path / "script.py").write_text(
        PRELUDE + "print('ready')\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)",
        encoding="utf-8",
    )

    class Listener(io.StringIO):
        def write(self, text):
            (tmp_path / "heard").touch()

    command = [sys.executable, "-S", str(tmp_path / "script.py"), str(tmp_path / "heard")]
    assert launch(command, output=Listener(), error=io.StringIO()) == 0


def test_logs(run, tmp_path):
    log_dir = tmp_path / "logs" / "new"
    script = """
    print("start", start)
    print("problem", file=sys.stderr)
    sys.exit(0 if start else 4)
    """
    assert run(script, workers=2, log_dir=log_dir, max_restarts=1)[0] == 0
    assert sorted(path.name for path in log_dir.iterdir()) == ["worker_0.log", "worker_1.log"]
    lines = (log_dir / "worker_1.log").read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == ["problem", "problem", "start 0", "start 1"]
    # Another job begins its logs anew.
    assert run("print('again')", workers=2, log_dir=log_dir)[0] == 0
    assert (log_dir / "worker_1.log").read_text(encoding="utf-8") == "again\n"


class BrokenStream(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_nobody_listens(run, tmp_path):
    script = "print('x' * 1_000_000); Path(__file__).with_name(f'done{worker}').touch()"
    (tmp_path / "script.py").write_text(PRELUDE + script, encoding="utf-8")
    command = [sys.executable, "-S", str(tmp_path / "script.py")]
    assert launch(command, workers=2, output=BrokenStream(), error=BrokenStream()) == 0
    assert len(list(tmp_path.glob("done*"))) == 2


def test_first_failing_code_wins_and_the_others_are_ended(run):
    script = """
    if worker == 1:
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: (print("terminated"), sys.exit(9)))
    time.sleep(60)
    """
    start = time.monotonic()
    code, lines, errors = run(script, workers=3)
    assert code == 3
    assert sorted(lines) == ["[worker 0] terminated", "[worker 2] terminated"]
    assert errors == ["[launch] worker 1 ended with code 3; the others are ended"]
    assert time.monotonic() - start < 10


def test_others_may_say_what_they_see_first(run):
    script = """
    if worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    print("worker 1 was lost")
    sys.exit(1)
    """
    code, lines, _ = run(script, workers=2, notice_seconds=20)
    assert code == 128 + signal.SIGKILL
    assert lines == ["[worker 0] worker 1 was lost"]


def test_who_does_not_end_is_killed(run, tmp_path):
    # The child of worker 0 holds the output open; it goes, too.
    script = """
    import subprocess
    if worker == 1:
        sys.exit(5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    Path(__file__).with_name("child").write_text(str(child.pid))
    time.sleep(120)
    """
    start = time.monotonic()
    code, _, _ = run(script, workers=2, notice_seconds=1, grace_seconds=0.3)
    assert code == 5
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    # It may stay as a zombie until whoever inherited it looks.
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] in "ZX"


def test_restarts(run):
    script = """
    print("start", start)
    sys.exit(0 if start == 2 else 7 + start)
    """
    code, lines, errors = run(script, workers=2, max_restarts=2)
    assert code == 0
    assert sorted(set(lines)) == [f"[worker {w}] start {s}" for w in range(2) for s in range(3)]
    assert [line for line in errors if "started again" in line] == [
        "[launch] the job is started again, 1 of at most 2 times",
        "[launch] the job is started again, 2 of at most 2 times",
    ]
    code, lines, _ = run(script, max_restarts=1)
    assert (code, lines) == (8, ["start 0", "start 1"])


def test_restarts_use_other_ports(run):
    script = "print(json.dumps(config['cluster'])); sys.exit(start == 0)"
    _, lines, _ = run(script, workers=2, max_restarts=1)
    assert len({line.split("] ", 1)[1] for line in lines}) == 2


def test_preempted_job_starts_again_without_counting(run):
    script = f"""
    print("start", start)
    sys.exit(0 if start == 3 else {PREEMPTED})
    """
    code, lines, errors = run(script, workers=2)
    assert code == 0
    assert lines.count("[worker 0] start 3") == 1
    assert sum("preempted with its state saved" in line for line in errors) == 3


def test_preempted_peers_have_time_to_save(run):
    script = f"""
    if start:
        sys.exit(0)
    if worker == 0:
        time.sleep(1)
        print("saved")
    sys.exit({PREEMPTED})
    """
    code, lines, _ = run(script, workers=2, notice_seconds=0)
    assert (code, lines) == (0, ["[worker 0] saved"])


def test_preemptions_are_bounded(run, monkeypatch):
    monkeypatch.setattr(launcher, "MAX_PREEMPTIONS", 2)
    code, lines, _ = run(f"print(start); sys.exit({PREEMPTED})")
    assert (code, lines) == (PREEMPTED, ["0", "1", "2"])


def test_worker_of_parameter_servers_is_replaced_alone(run):
    script = """
    print(worker, "start", start, flush=True)
    marker = Path(__file__).with_name("replaced")
    if worker == 1:
        if start == 0:
            sys.exit(6)
        marker.touch()
    while worker == "chief" and not marker.exists():
        time.sleep(0.05)
    time.sleep(0 if worker == "chief" else 60)
    """
    options = {"workers": 2, "parameter_servers": 1}
    code, lines, errors = run(script, max_restarts=1, **options)
    assert code == 0
    assert sorted(lines) == [
        "[chief] chief start 0",
        "[ps 0] ps start 0",
        "[worker 0] 0 start 0",
        "[worker 1] 1 start 0",
        "[worker 1] 1 start 1",
    ]
    assert errors == ["[launch] worker 1 ended with code 6 and is replaced"]


def test_job_of_parameter_servers_goes_on_without_a_worker(run):
    script = """
    if worker == 1:
        sys.exit(6)
    time.sleep(1 if worker == "chief" else 60)
    """
    code, _, errors = run(script, workers=2, parameter_servers=1)
    assert code == 0
    assert errors == ["[launch] worker 1 ended with code 6; the job goes on without it"]


def test_job_of_parameter_servers_ends_without_its_last_worker(run):
    script = "sys.exit(6) if worker == 0 else time.sleep(60)"
    code, _, errors = run(script, workers=1, parameter_servers=1)
    assert code == 6
    assert errors[0] == "[launch] worker 0 ended with code 6; the others are ended"


def test_lost_parameter_server_ends_the_job(run):
    script = "time.sleep(0.2 if worker == 'ps' else 60); sys.exit(8)"
    code, _, errors = run(script, workers=1, parameter_servers=1)
    assert code == 8
    assert errors == ["[launch] ps 0 ended with code 8; the others are ended"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(run, interrupt, number):
    script = f"""
    def stop(number, frame):
        print("got", number)
        sys.exit({PREEMPTED})
    signal.signal({number:d}, stop)
    Path(__file__).with_name(f"up{{worker}}").touch()
    time.sleep(60)
    """
    interrupt("up*", number, count=2)
    before = signal.getsignal(number)
    code, lines, errors = run(script, workers=2, max_restarts=5)
    # It was asked to end: neither a failure nor a preemption starts it again.
    assert code == PREEMPTED
    assert sorted(lines) == [f"[worker {i}] got {number:d}" for i in range(2)]
    assert errors[0] == f"[launch] {signal.Signals(number).name} is passed on to all processes"
    assert signal.getsignal(number) == before


def test_signal_that_the_script_does_not_handle(run, interrupt):
    script = "Path(__file__).with_name(f'up{worker}').touch(); time.sleep(60)"
    interrupt("up*", signal.SIGTERM, count=2)
    assert run(script, workers=2)[0] == 128 + signal.SIGTERM


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(__file__).with_name(f"up{worker}").touch()
time.sleep(60)
"""


def test_grace_after_a_signal_is_bounded(run, interrupt):
    interrupt("up*", signal.SIGTERM, count=2)
    start = time.monotonic()
    code, _, _ = run(DEAF, workers=2, grace_seconds=0.5)
    assert code == 128 + signal.SIGKILL
    assert time.monotonic() - start < 15


def test_second_signal_kills(run, interrupt):
    interrupt("up*", signal.SIGTERM, count=2, times=2)
    code, _, errors = run(DEAF, workers=2, grace_seconds=100)
    assert code == 128 + signal.SIGKILL
    assert "[launch] a second signal: all processes are killed" in errors


def test_same_signal_sent_twice_is_one_signal(run, interrupt):
    # As `timeout` does: to the process, and to its group.
    interrupt("up*", signal.SIGTERM, count=2, times=2, pause=0.1)
    code, _, errors = run(DEAF, workers=2, grace_seconds=0.5)
    assert code == 128 + signal.SIGKILL
    assert not any("second signal" in line for line in errors)


def test_outside_of_the_main_thread(run):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run("sys.exit(3)", workers=2)[0]))
    thread.start()
    thread.join()
    assert codes == [3]


def test_ports_are_free_and_differ():
    ports = find_free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as bound:
            bound.bind(("", port))
    assert find_free_ports(0) == []


def test_ports_run_out(monkeypatch):
    def bind(self, address):
        raise OSError

    monkeypatch.setattr(socket.socket, "bind", bind, raising=False)
    with pytest.raises(RuntimeError, match="Only 0 of the 3 ports"):
        find_free_ports(3)


@pytest.mark.parametrize(
    ("workers", "servers", "count"), [(1, 0, 0), (2, 0, 2), (1, 1, 3), (4, 2, 7)]
)
def test_count_ports(workers, servers, count):
    assert count_ports(workers, servers) == count


@pytest.mark.parametrize(
    ("visible", "gpus"), [("0,1", ["0", "1"]), ("", []), ("-1", []), ("GPU-a, 1", ["GPU-a", "1"])]
)
def test_visible_gpus(visible, gpus):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_gpus_are_shared_out():
    tasks = make_tasks(workers=2, ports=[1, 2], gpus=["0", "1", "2", "3"])
    assert [task.environ["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["0,1", "2,3"]
    tasks = make_tasks(workers=2, parameter_servers=1, ports=[1, 2, 3, 4], gpus=["0", "1"])
    visible = {task.name: task.environ["CUDA_VISIBLE_DEVICES"] for task in tasks}
    assert visible == {"ps 0": "", "worker 0": "0", "worker 1": "1", "chief": ""}
    # Simulated devices are CPUs, and a single worker takes what there is.
    tasks = make_tasks(workers=2, ports=[1, 2], gpus=["0", "1"], devices_per_worker=2)
    assert [task.environ["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["", ""]
    assert make_tasks(workers=1, ports=[], gpus=["0", "1"])[0].environ == {}


def test_too_few_gpus():
    with pytest.raises(ValueError, match="1 GPU, too few .* Received: --workers 2"):
        make_tasks(workers=2, ports=[1, 2], gpus=["0"])


def test_share_out():
    assert share_out("abcdef", 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert share_out("abc", 2) == [["a"], ["b"]]
    assert share_out("a", 2) is None


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys; print(sys.argv[1:]); sys.exit(len(sys.argv) - 1)")
    return str(path)


def test_command_line(script, capfd):
    # Options behind the script belong to the script.
    assert main(["launch", "--workers", "2", script, "--workers", "7"]) == 2
    assert "[worker 1] ['--workers', '7']" in capfd.readouterr().out
    assert main(["launch", script]) == 0


USAGE_ERRORS = {
    "no command": ([], "required: COMMAND"),
    "an unknown command": (["train"], "invalid choice: 'train'"),
    "no script": (["launch"], "required: script"),
    "a missing script": (["launch", "nowhere.py"], "no such script. Received: 'nowhere.py'"),
    "no worker": (["launch", "--workers", "0", "SCRIPT"], "of at least 1. Received: '0'"),
    "a wrong count": (["launch", "--ps", "-1", "SCRIPT"], "of at least 0. Received: '-1'"),
    "a wrong time": (["launch", "--grace", "x", "SCRIPT"], "number of seconds. Received: 'x'"),
    "a plan of no script": (["plan", "nowhere.py"], "no such script. Received: 'nowhere.py'"),
    "no action": (["checkpoint"], "required: ACTION"),
    "no directory": (["checkpoint", "show"], "required: directory"),
    "no path": (["checkpoint", "export", "there"], "required: path"),
}


@pytest.mark.parametrize(("argv", "message"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors(argv, message, script, capsys):
    with pytest.raises(SystemExit) as error:
        main([script if argument == "SCRIPT" else argument for argument in argv])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_launch_inside_of_a_job(script, monkeypatch, capsys):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(SystemExit) as error:
        main(["launch", "--workers", "2", script])
    assert error.value.code == 2
    assert "already one of several" in capsys.readouterr().err
    # One process in the place of this one is no job of its own: it joins.
    assert main(["launch", script]) == 0


def test_too_few_gpus_on_the_command_line(script, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SystemExit) as error:
        main(["launch", "--workers", "2", script])
    assert error.value.code == 2
    assert "too few for a worker each" in capsys.readouterr().err


def test_env(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for word in ("keras_replicator", "tensorflow", "keras", "CPU:0", "cluster", "a single machine"):
        assert word in text


def test_env_of_a_broken_cluster(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["env"]) == 1
    assert "error: TF_CONFIG is not JSON" in capsys.readouterr().out
