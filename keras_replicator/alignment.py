"""Variables that are the same on all workers: made alike, and brought back when they differ."""

import contextlib
import itertools
import zlib

import numpy as np
import tensorflow as tf

from keras_replicator import compat, workers


@contextlib.contextmanager
def alike(engine, what):
    """Context in which all workers make the same variables; the chief's values count.

    What they made is compared before anything is sent, so that workers with different models get
    an error that names the difference.

    Args:
        engine: The engine.
        what: Name of what is made, for messages: "the model".

    Raises:
        keras_replicator.workers.WorkersDisagreeError: When workers made other variables.
    """
    if engine.num_workers == 1:
        yield
        return
    made = []
    with engine.recording(made):
        yield
    facts = [[f"{list(v.shape)} {v.dtype.name}", v.name] for v in made]
    _compare(what, workers.exchange(what, facts, engine), engine)
    align(engine, made)


def _compare(what, everyone, engine):
    """Names may differ: a script may have made other layers before on one of the workers."""
    nothing = ["none", ""]
    for worker, theirs in enumerate(everyone):
        pairs = itertools.zip_longest(everyone[0], theirs, fillvalue=nothing)
        for number, (one, other) in enumerate(pairs):
            if one[0] != other[0]:
                chief, peer = (" ".join(facts).strip() for facts in (one, other))
                raise workers.WorkersDisagreeError(
                    f"The workers of this job differ in the variables of {what}: as number "
                    f"{number} worker 0 (the chief) has {chief}, worker {worker} has {peer}. Every "
                    "worker must run the same script with the same settings. This is worker "
                    f"{engine.worker}."
                )


def align(engine, variables):
    """Gives every worker the chief's values of the variables that are not equal on all workers.

    Args:
        engine: The engine.
        variables: Keras or TensorFlow variables, the same on all workers. What replicas hold
            parts of, and strings, are left as they are.

    Returns:
        How many variables differed.
    """
    if engine.num_workers == 1:
        return 0
    variables = [v for v in map(compat.raw_variable, variables) if _is_common(v)]
    values = [np.asarray(compat.first_copy(v)) for v in variables]
    table = engine.table([zlib.crc32(value.tobytes()) for value in values])
    differing = [n for n in range(len(values)) if (table[:, n] != table[0, n]).any()]
    by_dtype = {}
    for number in differing:
        by_dtype.setdefault(values[number].dtype, {})[f"{number:06d}"] = values[number]
    for dtype, found in sorted(by_dtype.items(), key=lambda item: item[0].str):
        if engine.worker != 0:
            found = {name: np.zeros_like(value) for name, value in found.items()}
        with engine.cross_replica():
            for name, value in engine.sum_over_workers(found).items():
                variables[int(name)].assign(value.astype(dtype))
    return len(differing)


def _is_common(variable):
    return (
        variable.dtype != tf.string
        and getattr(variable, "synchronization", None) != tf.VariableSynchronization.ON_READ
    )
