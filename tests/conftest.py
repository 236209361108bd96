"""One process, eight simulated CPUs: every test takes as many of them as it needs, by name."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import pytest  # noqa: E402

import keras_replicator as kr  # noqa: E402

kr.simulate_devices(8)


@pytest.fixture(autouse=True)
def fresh_keras():
    """Layer names, seeds and the dtype policy start anew in every test."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
