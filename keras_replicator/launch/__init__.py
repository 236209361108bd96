"""The command line: `keras-replicator plan | launch | env | checkpoint`.

`main.py` reads the arguments. `launcher.py` runs a job on this machine and starts it again;
`run.py` watches one start of it; `job.py` says which processes it has, `process.py` runs one of
them, `resources.py` shares out ports, cores and GPUs. `env.py` prints what is installed and
detected.
"""

from keras_replicator.launch.launcher import launch
from keras_replicator.launch.run import PREEMPTED

__all__ = ["PREEMPTED", "launch"]
