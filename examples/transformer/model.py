"""A decoder-only transformer of Keras layers, as GPT-2 orders them (normalization first)."""

import keras
from keras import layers


class Positions(layers.Layer):
    """Adds a learned vector for each place of a sequence."""

    def build(self, input_shape):
        self.table = self.add_weight(
            shape=input_shape[1:], initializer=keras.initializers.RandomNormal(0.02), name="table"
        )

    def call(self, x):
        return x + self.table


def build_model(vocabulary_size, length, width=64, heads=4, blocks=2, dropout=0.0, seed=0):
    """Returns a model from tokens `(rows, length)` to logits `(rows, length, vocabulary_size)`.

    Args:
        vocabulary_size: number of tokens.
        length: tokens of a sequence.
        width: features of a token.
        heads: attention heads of a block; a mesh splits them, so its axis divides their number.
        blocks: number of blocks.
        dropout: rate behind attention and MLP.
        seed: seed of the initial weights.
    """
    seeds = iter(range(seed, seed + 8 * (blocks + 1)))

    def normal():
        return keras.initializers.RandomNormal(0.02, seed=next(seeds))

    def dense(units, activation=None):
        return layers.Dense(units, activation, kernel_initializer=normal())

    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary_size, width, embeddings_initializer=normal())(tokens)
    x = Positions()(x)
    for _ in range(blocks):
        attention = layers.MultiHeadAttention(
            heads, width // heads, use_bias=False, kernel_initializer=normal()
        )
        normalized = layers.LayerNormalization()(x)
        attended = attention(normalized, normalized, use_causal_mask=True)
        x = layers.Add()([x, layers.Dropout(dropout)(attended)])
        hidden = dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(dropout)(dense(width)(hidden))])
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, dense(vocabulary_size)(x))
