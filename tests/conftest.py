"""One process, eight simulated CPUs: every test takes as many of them as it needs, by name."""

import gc
import itertools
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import pytest  # noqa: E402

import keras_replicator as kr  # noqa: E402

kr.simulate_devices(8)

# TensorFlow keeps something of each function that it has traced. To look at all of that again after
# every test would in the end take longer than the test.
_COLLECT_EVERY = 10
_count = itertools.count(1)


@pytest.fixture(autouse=True)
def fresh_keras():
    """Layer names, seeds and the dtype policy start anew in every test."""
    if next(_count) % _COLLECT_EVERY == 0:
        gc.collect()
        gc.freeze()
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
