"""Keras callbacks that know about replicas. Installed as `keras_replicator.callbacks`.

    trainer.fit(x, y, callbacks=[kr.callbacks.Throughput(), kr.callbacks.TensorBoard("logs")])

They use the public API only, and work with `keras.Model.fit`, too, as far as it tells them what
they need.
"""

from keras_replicator.callbacks.checkpoint import Checkpoint
from keras_replicator.callbacks.learning_rate_warmup import LearningRateWarmup
from keras_replicator.callbacks.tensorboard import TensorBoard
from keras_replicator.callbacks.throughput import Throughput

__all__ = ["Checkpoint", "LearningRateWarmup", "TensorBoard", "Throughput"]
