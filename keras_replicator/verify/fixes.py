"""What to write instead, for each kind of cause."""

from keras_replicator.verify.report import (
    BATCH_NORMALIZATION,
    DENOMINATOR,
    RANDOMNESS,
    STATE,
    SUM,
    UNKNOWN,
    UNREDUCED,
    WITHIN_REPLICA,
    Cause,
)

_FIXES = {
    SUM: "Write kr.replica.sum(per_row), or a mean over the rows: tf.reduce_mean, "
    "kr.replica.mean(per_row). In logs: kr.replica.Sum(value).",
    DENOMINATOR: "Write kr.replica.mean(per_row, sample_weight=w, normalize='weights'), or divide "
    "by kr.replica.all_sum(...) and by the replica's share.",
    WITHIN_REPLICA: "Fetch the rows of the others by kr.replica.all_gather(values, axis=0), or "
    "reduce statistics by kr.replica.all_sum / all_mean before they are used.",
    UNREDUCED: "Reduce the value over replicas before it is used: kr.replica.all_sum, all_mean, "
    "all_max, kr.replica.mean(per_row).",
    STATE: "Let all replicas compute with the same values: no replica_id(), num_replicas() or "
    "Python state of its own in what is trained; assign variables on every replica.",
    RANDOMNESS: "Nothing needs to be done: replicas draw different numbers by design. For equal "
    "numbers on any number of replicas, draw them in the input pipeline.",
    BATCH_NORMALIZATION: "Pass sync_batch_norm=True to compile() for statistics over all rows; "
    "local statistics are the default and usual for large replica batches.",
    UNKNOWN: "Compare the step with docs/custom_steps.md; kr.replica.mean, sum and all_gather are "
    "what a local mean cannot give.",
}


def make_cause(kind, what, place=None):
    """Returns a `Cause` with the fix that belongs to its kind."""
    where = "" if place is None else str(place)
    line = "" if place is None else place.line
    return Cause(kind, what, where, line, _FIXES[kind])
