"""What one replica computes. Importing this package teaches Keras the replica's semantics."""

from keras_replicator.steps import (
    losses,
    metrics,
    normalization,
    optimizers,
    randomness,
    tables,
    variables,
)

__all__ = [
    "losses",
    "metrics",
    "normalization",
    "optimizers",
    "randomness",
    "tables",
    "variables",
]
