"""Reads what TensorBoard callbacks wrote."""

from pathlib import Path

import tensorflow as tf


def scalars(folder):
    """{tag: [(step, value), ...]} of the event files directly in `folder`, in order of writing."""
    # Here, because importing it takes a second that most tests need not spend.
    from tensorboard.compat.proto import event_pb2

    found = {}
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.dtype == tf.float32.as_datatype_enum:
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, []).append((event.step, number))
    return found
