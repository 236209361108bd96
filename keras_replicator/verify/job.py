"""From a trainer and data to a `Job` that another process can run."""

import keras

from keras_replicator.checks import check_positive
from keras_replicator.data.rows import count_rows, drop_optionals, slice_rows
from keras_replicator.data.sources import make_source
from keras_replicator.verify import parcel
from keras_replicator.verify.investigate import Job


def make_job(
    given,
    x,
    y=None,
    sample_weight=None,
    *,
    class_weight=None,
    replicas=(2, 4),
    batch_size=None,
    steps=3,
    weights=None,
):
    """Packs what a trainer was given, and the first batches of data.

    Args:
        given: Dict with "model", "steps", "compile" and "seed", as the user gave them.
        x: Data, as in `fit`.
        y: Targets.
        sample_weight: Weights.
        class_weight: Weights by class.
        replicas: Numbers of replicas, an int or a tuple.
        batch_size: Rows of a global batch (default 32).
        steps: Steps of each run.
        weights: Initial weights, or None.

    Raises:
        ValueError: When an argument is wrong.
        VerifyError: When something cannot be sent to another process.
    """
    check_positive("steps", steps)
    replicas = (replicas,) if isinstance(replicas, int) else tuple(replicas)
    for number in replicas:
        check_positive("replicas", number)
    if not replicas or min(replicas) < 2:
        raise ValueError(
            "`replicas` must be numbers of replicas of at least 2, such as (2, 4). "
            f"Received: replicas={replicas!r}"
        )
    source = make_source(
        x, y, sample_weight, batch_size=batch_size, steps=steps, class_weight=class_weight
    )
    batches = _first_batches(source, steps)
    batches, uneven = _with_uneven_batch(batches, max(replicas))
    content = {name: given[name] for name in ("model", "steps", "compile")}
    content["batches"] = [(rows, parcel.plain(batch)) for rows, batch in batches]
    return Job(
        content=parcel.pack(content),
        spec=source.element_spec,
        replicas=tuple(dict.fromkeys(int(number) for number in replicas)),
        weights=weights,
        seed=given["seed"],
        policy=keras.config.dtype_policy().name,
        uneven=uneven,
    )


def _first_batches(source, steps):
    """Returns `steps` pairs of rows and batch, from the start again where the data end."""
    source.on_epoch_begin()
    found = []
    for rows, batch in source.iterator(0):
        found.append((int(rows), drop_optionals(batch)))
        if len(found) == steps:
            break
    source.on_epoch_end()
    if not found:
        raise ValueError("The data hold no batches. Pass data with at least one row.")
    return [found[number % len(found)] for number in range(steps)]


def _with_uneven_batch(batches, replicas):
    """Cuts one row off the last batch where otherwise all replicas would have equal shares."""
    rows, batch = batches[-1]
    if rows < 2 or any(count % replicas for count, _ in batches):
        return batches, False
    cut = slice_rows(batch, 0, rows - 1)
    return [*batches[:-1], (int(count_rows(cut)), cut)], True
