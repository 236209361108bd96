"""How a value on N replicas relates to the same value on one device.

    relations(whole, parts, shares)     # {"mean"} for a mean over the replica's rows

SAME    every replica has the value of one device
ROWS    the replicas' values, put together along an axis, are that of one device
MEAN    their average, weighted by rows, is
SUM     their sum is
MAX, MIN, SCALED (rows whose values carry 1 / rows), SHARE (1 / rows)

An empty set means: the replicas computed something else. Numbers only; nothing of TensorFlow.
"""

import numpy as np

SAME, ROWS, MEAN, SUM = "same", "rows", "mean", "sum"
MAX, MIN, SCALED, SHARE = "max", "min", "scaled rows", "share"
STATISTICS = {MEAN, SUM, MAX, MIN}

TOLERANCE = 2e-5


def relations(whole, parts, shares, tolerance=TOLERANCE):
    """Returns the set of relations that hold.

    Args:
        whole: Array of one device.
        parts: List of arrays, one per replica.
        shares: Shares of the rows, one per replica; a replica without rows has 0 and counts
            nothing.
        tolerance: Relative to the largest entry.

    Example:

    >>> sorted(relations(np.array(2.0), [np.array(1.0), np.array(3.0)], [0.5, 0.5]))
    ['mean']
    >>> relations(np.arange(4.0), [np.arange(2.0), np.arange(2.0, 4.0)], [0.5, 0.5])
    {'rows'}
    """
    kept = [(np.asarray(p), s) for p, s in zip(parts, shares) if s > 0]
    parts, shares = [part for part, _ in kept], [share for _, share in kept]
    whole = np.asarray(whole)
    if whole.dtype.kind not in "fiubc":
        return {SAME} if all(np.array_equal(part, whole) for part in parts) else set()
    whole = _numbers(whole)
    parts = [_numbers(part) for part in parts]

    def close(value):
        if value.shape != whole.shape:
            return False
        limit = tolerance * np.abs(whole[np.isfinite(whole)]).max(initial=1e-30)
        return bool(np.allclose(value, whole, rtol=0, atol=limit, equal_nan=True))

    found = set()
    with np.errstate(all="ignore"):
        if all(part.shape == whole.shape for part in parts):
            if all(close(part) for part in parts):
                found.add(SAME)
            if close(sum(share * part for part, share in zip(parts, shares))):
                found.add(MEAN)
            if close(sum(parts)):
                found.add(SUM)
            if close(np.max(parts, axis=0)):
                found.add(MAX)
            if close(np.min(parts, axis=0)):
                found.add(MIN)
            if all(close(share * part) for part, share in zip(parts, shares)):
                found.add(SHARE)
            if whole.ndim == 1 and whole.size <= 16 and not found:
                found |= _mixed(whole, parts, shares, tolerance)
        scaled = [share * part for part, share in zip(parts, shares)]
        for axis in range(whole.ndim):
            for name, values in ((ROWS, parts), (SCALED, scaled)):
                if any(close(joined) for joined in _joined(values, axis, whole, shares)):
                    found.add(name)
    return found


def row_axes(whole, parts, shares):
    """Returns how many axes of a value grow with the rows of the batch."""
    whole, part = np.shape(whole), np.shape(parts[0])
    if len(whole) != len(part):
        return 0
    return sum(w != p and p and abs(p / w - shares[0]) < 0.5 for w, p in zip(whole, part))


def _numbers(array):
    return array if array.dtype.kind == "c" else array.astype(np.float64)


def _mixed(whole, parts, shares, tolerance):
    """A shape, and other short vectors, whose entries are each the same, a sum or a mean."""
    for place in range(whole.size):
        if not relations(whole[place], [p[place] for p in parts], shares, tolerance):
            return set()
    return {SAME}


def _joined(parts, axis, whole, shares):
    """Candidates for the value of one device: parts in order, or in blocks of rows.

    `tf.concat([real, fake], 0)` holds a replica's real rows and then its fake ones; on one device
    all real rows come first.
    """
    sizes = [np.delete(part.shape, axis) for part in parts if part.ndim == whole.ndim]
    if len(sizes) < len(parts) or any(
        not np.array_equal(size, np.delete(whole.shape, axis)) for size in sizes
    ):
        return
    if sum(part.shape[axis] for part in parts) != whole.shape[axis]:
        return
    yield np.concatenate(parts, axis)
    size = whole.shape[axis]
    for times in range(2, min(size, 64) + 1):
        if size % times or any(part.shape[axis] % times for part in parts):
            continue
        blocks = [np.split(part, times, axis) for part in parts]
        yield np.concatenate([block[number] for number in range(times) for block in blocks], axis)
