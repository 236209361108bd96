"""LARS: a learning rate for each layer, so that very large batches train (arXiv 1708.03888)."""

import keras
from keras import ops


@keras.saving.register_keras_serializable("resnet50")
class LARS(keras.optimizers.SGD):
    """Momentum SGD whose step for a weight has a length in proportion to the weight's own.

    For a weight w of more than one axis, with gradient g (section 4):

        trust = coefficient * |w| / (|g| + weight_decay * |w|)
        velocity = momentum * velocity + learning_rate * trust * (g + weight_decay * w)
        w = w - velocity

    Vectors (biases, scales and offsets of BatchNormalization) get plain momentum SGD without decay.

    Args:
        learning_rate: a float or a schedule.
        momentum: float.
        decay: the weight decay of the formula.
        coefficient: the trust coefficient.
        **kwargs: other arguments of `keras.optimizers.SGD`.
    """

    def __init__(
        self,
        learning_rate=1.0,
        momentum=0.9,
        decay=1e-4,
        coefficient=1e-3,
        name="lars",
        **kwargs,
    ):
        super().__init__(learning_rate=learning_rate, momentum=momentum, name=name, **kwargs)
        self.decay = decay
        self.coefficient = coefficient

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            weight = ops.convert_to_tensor(variable)
            gradient = ops.cast(gradient, weight.dtype)
            size, steepness = ops.norm(weight), ops.norm(gradient) + self.decay * ops.norm(weight)
            trust = ops.where(
                ops.logical_and(size > 0, steepness > 0),
                self.coefficient * size / ops.maximum(steepness, 1e-30),
                1.0,
            )
            gradient = trust * (gradient + self.decay * weight)
        super().update_step(gradient, variable, learning_rate)

    def get_config(self):
        return {**super().get_config(), "decay": self.decay, "coefficient": self.coefficient}
