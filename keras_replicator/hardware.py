"""The devices of this machine, and how to simulate more of them.

Nothing here depends on the rest of the package.
"""

import dataclasses
import os

import tensorflow as tf

SIMULATED_DEVICES_VARIABLE = "KERAS_REPLICATOR_SIMULATED_DEVICES"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices that TensorFlow sees on this machine.

    Args:
        cpus: Names of logical CPUs, such as "CPU:0".
        gpus: Names of logical GPUs.
        tpus: Names of TPU cores.
        simulated: Whether the CPU was split by `simulate_devices`.
    """

    cpus: tuple = ()
    gpus: tuple = ()
    tpus: tuple = ()
    simulated: bool = False

    @property
    def names(self):
        """Every device, accelerators first."""
        return self.tpus + self.gpus + self.cpus


def configured_hardware():
    """Returns the `Hardware` that this process will have, without starting TensorFlow's devices.

    Several workers need it: their strategy must be made before anything else starts TensorFlow.
    """
    cpus = 0
    for physical in tf.config.list_physical_devices("CPU"):
        cpus += len(tf.config.get_logical_device_configuration(physical) or [None])
    gpus = len(tf.config.list_physical_devices("GPU"))
    return Hardware(
        cpus=tuple(f"CPU:{number}" for number in range(cpus)),
        gpus=tuple(f"GPU:{number}" for number in range(gpus)),
        simulated=cpus > 1,
    )


def detect_hardware():
    """Returns the `Hardware` of this machine. Starts TensorFlow's devices."""
    found = {"CPU": [], "GPU": [], "TPU": []}
    for device in tf.config.list_logical_devices():
        if device.device_type in found:
            found[device.device_type].append(short_name(device.name))
    return Hardware(
        cpus=tuple(found["CPU"]),
        gpus=tuple(found["GPU"]),
        tpus=tuple(found["TPU"]),
        simulated=len(found["CPU"]) > 1,
    )


def imagined_hardware(count):
    """Returns the `Hardware` of a machine with `count` devices that is not at hand."""
    return Hardware(gpus=tuple(f"device:{number}" for number in range(count)))


def short_name(name):
    """Returns the last two parts of a device name.

    Example:

    >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1")
    'GPU:1'
    >>> short_name("cpu:0")
    'CPU:0'
    """
    kind, number = name.replace("/device:", "/").split("/")[-1].split(":")[-2:]
    return f"{kind.upper()}:{number}"


def simulate_devices(count):
    """Splits the CPU into `count` logical devices, to try replicas without the hardware.

    Call it once, before anything starts TensorFlow (an operation, a model, a list of devices).

    Args:
        count: How many logical CPUs, at least 1.

    Raises:
        ValueError: When `count` is below 1.
        RuntimeError: When TensorFlow has already started with another number.

    Example:

    ```python
    import keras_replicator as kr

    kr.simulate_devices(4)
    trainer = kr.ReplicatedTrainer(build_model)  # 4 replicas
    ```
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"simulate_devices: `count` must be an int of at least 1. Received: count={count!r}"
        )
    physical = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(physical) or [None]) == count:
        return
    try:
        tf.config.set_logical_device_configuration(
            physical, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"simulate_devices({count}) came too late: TensorFlow has already started with "
            f"{len(tf.config.list_logical_devices('CPU'))} CPU device(s). Call "
            "kr.simulate_devices at the top of the script, before any operation or model is made, "
            f"or set the environment variable {SIMULATED_DEVICES_VARIABLE}={count}."
        ) from error


def simulate_devices_from_environment(environ=os.environ):
    """Honours `KERAS_REPLICATOR_SIMULATED_DEVICES`, which the launcher sets."""
    text = environ.get(SIMULATED_DEVICES_VARIABLE)
    if not text:
        return
    if not text.isdigit():
        raise ValueError(
            f"{SIMULATED_DEVICES_VARIABLE} must be a whole number of devices. "
            f"Received: {SIMULATED_DEVICES_VARIABLE}={text!r}"
        )
    simulate_devices(int(text))
