"""A small classifier of the same images, whose features judge the samples.

judge = train_classifier(builder, preset)
outputs = judge.predict(images)         # {"features": [rows, 128], "logits": [rows, classes]}
"""

import keras
from keras import layers

import keras_replicator as kr
from sngan.data import labelled_images


def build_classifier(preset):
    """Returns the model `images -> logits`, with a layer called "features" before its last.

    Args:
        preset: a `Preset`.
    """
    images = keras.Input(preset.image_shape, name="images")
    x = images
    channels = 32
    while x.shape[1] > 4:
        x = layers.Conv2D(channels, 5, strides=2, padding="same", activation="relu")(x)
        channels *= 2
    x = layers.Flatten()(x)
    features = layers.Dense(128, activation="relu", name="features")(x)
    logits = layers.Dense(preset.num_classes, name="logits")(features)
    return keras.Model(images, logits, name="classifier")


def with_features(classifier):
    """Returns the model `images -> {"features": …, "logits": …}` with the same weights."""
    outputs = {"features": classifier.get_layer("features").output, "logits": classifier.output}
    return keras.Model(classifier.input, outputs, name="judge")


def train_classifier(builder, preset, devices=None, epochs=3, batch_size=128, verbose=2):
    """Trains the classifier on all replicas.

    Args:
        builder: a prepared `tfds.core.DatasetBuilder`.
        preset: a `Preset`.
        devices: as in `kr.ReplicatedTrainer`.
        epochs: number of epochs.
        batch_size: rows of a global batch.
        verbose: as in Keras.

    Returns:
        A `kr.ReplicatedTrainer` whose `predict` gives features and logits.
    """
    classifier = build_classifier(preset)
    trainer = kr.ReplicatedTrainer(classifier, devices=devices, seed=0)
    trainer.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    train, test = (
        labelled_images(builder, preset, split).batch(batch_size).prefetch(2)
        for split in ("train", "test")
    )
    trainer.fit(train, epochs=epochs, validation_data=test, verbose=verbose)
    # `classifier` has the trained weights, whatever the trainer did them on.
    return kr.ReplicatedTrainer(with_features(classifier), devices=devices)
