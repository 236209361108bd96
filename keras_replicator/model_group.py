"""Several models that one custom step trains, as one Keras model for callbacks and files."""

import keras


class ModelGroup(keras.Model):
    """Holds a dict of models, so that callbacks, metrics and weight files see them as one.

    Args:
        models: Dict of `keras.Model`, by name.
    """

    def __init__(self, models):
        super().__init__(name="models")
        self.models = models
        self.built = True

    def call(self, inputs):
        raise ValueError(
            "A group of models cannot be called as one. Pass `predict_step=fn(models, batch)`, or "
            "call trainer.model[name]."
        )
