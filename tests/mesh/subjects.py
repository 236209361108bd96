"""The models that are trained on meshes, their data and their layouts."""

import functools

import keras
from keras import layers

import keras_replicator as kr
from keras_replicator.engines import mesh_loop, mesh_steps
from tests.helpers import classification, compiled, normal, on_one_device, sequential

# 69 rows in batches of 16: the tail of 5 divides on no batch axis but that of one. 20 updates.
ROWS, FIT = 69, {"batch_size": 16, "epochs": 4}


def several_steps_a_call(monkeypatch):
    """Lets loops of meshes run several steps a call from the second step on.

    Returns:
        A list that grows by the number of steps of each such call.
    """
    calls, stack = [], mesh_steps.SeveralSteps.batches

    def batches(several, elements):
        calls.append(len(elements))
        return stack(several, elements)

    monkeypatch.setattr(mesh_loop, "_STEPS_BEFORE", 1)
    monkeypatch.setattr(mesh_loop, "_STEPS_ASKED", 2)
    monkeypatch.setattr(mesh_steps.SeveralSteps, "batches", batches)
    return calls


def sizes(mesh):
    """{"batch": 2, "model": 1} for "2x1"."""
    batch, model = map(int, mesh.split("x"))
    return {"batch": batch, "model": model}


def mlp():
    """Dense - Dense - Dense."""
    return sequential(
        (6,),
        layers.Dense(16, "relu"),
        layers.Dense(8, "tanh"),
        layers.Dense(4, "softmax"),
    )


def cnn():
    """Convolution - BatchNormalization - pooling - Dense.

    Its activations are smooth. Behind a ReLU the first gradient of a weight can be nearly zero, so
    that one step of Adam makes the rounding of an activation as large as its whole step.
    """
    return sequential(
        (8, 8, 2),
        layers.Conv2D(8, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.Activation("gelu"),
        layers.MaxPooling2D(),
        layers.Conv2D(4, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(4, "softmax"),
    )


def transformer():
    """Token and position embeddings - attention - MLP, with residuals and normalizations."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(12, 8)(tokens)
    attended = layers.MultiHeadAttention(4, 2, use_bias=False)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    hidden = layers.Dense(8)(layers.Dense(16, "gelu")(x))
    x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    return keras.Model(tokens, layers.Dense(4, "softmax")(layers.GlobalAveragePooling1D()(x)))


def embedding():
    """Embedding - mean - Dense."""
    return sequential(
        (5,),
        layers.Embedding(12, 8),
        layers.GlobalAveragePooling1D(),
        layers.Dense(4, "softmax"),
        dtype="int32",
    )


def features(*shape):
    """Rows of normal numbers with one of four labels each."""

    def data(rows):
        _, labels = classification(rows, classes=4)
        x = normal(rows, *shape)
        return {"x": x + 0.3 * labels.reshape(-1, *[1] * len(shape)).astype("float32"), "y": labels}

    return data


def tokens(rows):
    """Rows of five tokens out of twelve, with one of four labels each."""
    _, labels = classification(rows, classes=4)
    x = (abs(normal(rows, 5)) * 5).astype("int32") % 9 + labels[:, None].astype("int32")
    return {"x": x, "y": labels}


SUBJECTS = {
    "mlp": (mlp, features(6)),
    "cnn": (cnn, features(8, 8, 2)),
    "transformer": (transformer, tokens),
    "embedding": (embedding, tokens),
}

# auto_layout leaves convolutions whole.
RULES = {
    "cnn": {
        r".*\bconv2d/kernel": (None, None, None, "model"),
        r".*\bbatch_normalization/.*": ("model",),
        r".*\bconv2d_1/kernel": (None, None, "model", None),
        r".*\bdense/kernel": (None, "model"),
        r".*\bdense/bias": ("model",),
    }
}


def layout(name, mesh):
    """The layout of a subject on a mesh."""
    return kr.Layout(sizes(mesh), RULES.get(name, "auto"))


adam = compiled(
    "Adam",
    0.01,
    global_clipnorm=0.5,
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)


def trainer(name, mesh, **options):
    """A trainer of a subject on a mesh."""
    return kr.ReplicatedTrainer(SUBJECTS[name][0], layout=layout(name, mesh), **options)


@functools.cache
def reference(name):
    """(initial weights, run) of a subject on one device."""
    build, data = SUBJECTS[name]
    keras.backend.clear_session()
    weights = build().get_weights()
    keras.backend.clear_session()
    return weights, on_one_device(build, adam, lambda: data(ROWS), weights, **FIT)
