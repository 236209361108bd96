"""keras_replicator: train Keras models with the same numbers on any number of replicas."""

from pathlib import Path as _Path

from keras_replicator.compat import check_versions as _check_versions
from keras_replicator.version import __version__

_check_versions()

# In a checkout the folder callbacks/ lies beside the package and is found through its parent.
_root = _Path(__file__).resolve().parent.parent
if (_root / "callbacks" / "__init__.py").exists() and (_root / "setup.py").exists():
    __path__.append(str(_root))

from keras_replicator import hardware as _hardware  # noqa: E402

_hardware.simulate_devices_from_environment()

from keras_replicator import callbacks, replica  # noqa: E402
from keras_replicator.auto_layout import auto_layout  # noqa: E402
from keras_replicator.batch_size import find_batch_size  # noqa: E402
from keras_replicator.engines.in_process import simulate_cluster  # noqa: E402
from keras_replicator.hardware import simulate_devices  # noqa: E402
from keras_replicator.layout import Layout  # noqa: E402
from keras_replicator.plan import Plan  # noqa: E402
from keras_replicator.replica import PerReplica  # noqa: E402
from keras_replicator.steps.losses import local_mean  # noqa: E402
from keras_replicator.steps.metrics import on_global_batch  # noqa: E402
from keras_replicator.steps.tables import Tables  # noqa: E402
from keras_replicator.trainer import ReplicatedTrainer  # noqa: E402

__all__ = [
    "Layout",
    "PerReplica",
    "Plan",
    "ReplicatedTrainer",
    "Tables",
    "__version__",
    "auto_layout",
    "callbacks",
    "find_batch_size",
    "local_mean",
    "on_global_batch",
    "replica",
    "simulate_cluster",
    "simulate_devices",
]
