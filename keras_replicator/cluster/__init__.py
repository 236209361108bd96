"""The machines of this job, read from the environment.

```python
from keras_replicator import cluster

found = cluster.detect_cluster()             # None: a single machine
found.num_workers, found.worker_index        # 2, 0
found.to_tf_config()                         # {"cluster": {"worker": [...]}, "task": {...}}
print(cluster.explain_cluster())             # what was found, where, and why
cluster.check_expected_workers(found, 2)     # an error when the job has another number
```

Nothing here imports TensorFlow, opens a connection or changes the environment. One file reads one
kind of environment; `detect.py` asks them in order.
"""

from keras_replicator.cluster.cluster import Cluster, ClusterError
from keras_replicator.cluster.detect import (
    check_expected_workers,
    detect_cluster,
    explain_cluster,
)

__all__ = [
    "Cluster",
    "ClusterError",
    "check_expected_workers",
    "detect_cluster",
    "explain_cluster",
]
