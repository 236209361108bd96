"""An optimizer's `apply` inside a step: reduce, then unscale, clip and update.

The order is that of the contract: local gradients -> average over replicas, weighted by rows ->
unscale and finite check (one decision for all) -> clip -> update. Keras clips before it reduces;
here the whole gradient is reduced at the entrance of `apply`, and everything behind it runs as on
one device, on each replica's own copy of the variables.
"""

import keras
import tensorflow as tf

from keras_replicator import compat, placement, replica
from keras_replicator.steps import conditions, gradient_norms, step_times, tables


class GradientWindow:
    """Collects gradients over several steps; one reduction and one update close the window.

    Args:
        steps: How many steps make one update.
        scope: Context in which accumulators are made (the strategy's scope).
    """

    def __init__(self, steps, scope):
        self.steps = steps
        self.scope = scope
        self.slots = {}  # id of the optimizer -> (optimizer, {id: (variable, accumulator)})
        self.rows = None

    def variables(self):
        """Returns every variable of the window, in a fixed order."""
        found = [] if self.rows is None else [self.rows]
        for _, slots in self.slots.values():
            found.extend(accumulator for _, accumulator in slots.values())
        return found

    def prepare(self, optimizer, gradients, variables):
        """Makes an accumulator once for each variable that has a gradient."""
        _, slots = self.slots.setdefault(id(optimizer), (optimizer, {}))
        missing = [
            variable
            for gradient, variable in zip(gradients, variables)
            if gradient is not None and id(variable) not in slots
        ]
        if self.rows is not None and not missing:
            return
        with tf.init_scope(), self.scope():
            if self.rows is None:
                self.rows = keras.Variable(0.0, trainable=False, name="accumulated_rows")
            for variable in missing:
                with placement.like(variable):
                    accumulator = keras.Variable(
                        tf.zeros(variable.shape, variable.dtype),
                        trainable=False,
                        name=f"accumulated_{variable.name}",
                    )
                slots[id(variable)] = (variable, accumulator)

    def add(self, optimizer, gradients, variables):
        """Adds local gradients, weighted by this replica's rows."""
        current = replica.current()
        self.prepare(optimizer, gradients, variables)
        _, slots = self.slots[id(optimizer)]
        rows = tf.cast(current.rows, tf.float32)
        for gradient, variable in zip(gradients, variables):
            if gradient is None:
                continue
            gradient = tf.convert_to_tensor(gradient)
            _, accumulator = slots[id(variable)]
            accumulator.assign(
                accumulator + tf.math.multiply_no_nan(gradient, tf.cast(rows, gradient.dtype))
            )

    def add_rows(self):
        """Counts the rows of one step."""
        self.rows.assign(self.rows + tf.cast(replica.current().total_rows, tf.float32))

    def close(self):
        """Reduces what was collected, updates, and starts an empty window."""
        for optimizer, slots in self.slots.values():
            if not slots:
                continue
            variables, accumulators = zip(*slots.values())
            means = [
                tf.math.divide_no_nan(
                    compat.local_copy(a).read_value(),
                    tf.cast(compat.local_copy(self.rows).read_value(), a.dtype),
                )
                for a in accumulators
            ]
            _update(optimizer, step_times.reduce_sum(means), list(variables))
            for accumulator in accumulators:
                accumulator.assign(tf.zeros_like(compat.local_copy(accumulator)))
        self.rows.assign(0.0)


class StepWindow:
    """Collects gradients over steps that one worker runs one after the other, without variables.

    Args:
        steps: How many steps make one update.
    """

    def __init__(self, steps):
        self.steps = steps
        self._sums = {}  # id of the optimizer -> (optimizer, {id of a variable: (variable, sum)})
        self._rows = None

    def variables(self):
        """Returns no variables: nothing is kept between updates."""
        return []

    def prepare(self, optimizer, gradients, variables):
        """Nothing has to be made."""

    def open(self):
        """Begins an update."""
        self._sums, self._rows = {}, tf.constant(0.0)

    def add(self, optimizer, gradients, variables):
        """Adds gradients, weighted by the rows of their step."""
        rows = tf.cast(replica.current().rows, tf.float32)
        _, sums = self._sums.setdefault(id(optimizer), (optimizer, {}))
        for gradient, variable in zip(gradients, variables):
            if gradient is None:
                continue
            weighted = _weigh(gradient, tf.cast(rows, gradient.dtype))
            _, before = sums.get(id(variable), (variable, None))
            sums[id(variable)] = (variable, _sum(before, weighted))

    def add_rows(self):
        """Counts the rows of one step."""
        self._rows += tf.cast(replica.current().rows, tf.float32)

    def close(self):
        """Updates with the mean over the rows that were seen."""
        for optimizer, sums in self._sums.values():
            share = tf.math.divide_no_nan(1.0, self._rows)
            _update(
                optimizer,
                [_weigh(total, tf.cast(share, total.dtype)) for _, total in sums.values()],
                [variable for variable, _ in sums.values()],
            )


def _sum(before, gradient):
    if before is None:
        return gradient
    if isinstance(before, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([before.values, gradient.values], 0),
            tf.concat([before.indices, gradient.indices], 0),
            before.dense_shape,
        )
    return tf.convert_to_tensor(before) + tf.convert_to_tensor(gradient)


def _apply(original, optimizer, grads, trainable_variables=None):
    current = replica.current()
    if current is None or current.applying:
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    variables = list(
        compat.known_variables(optimizer) if trainable_variables is None else trainable_variables
    )
    if current.building:
        if not optimizer.built:
            _build(optimizer, variables)
        if current.window is not None:
            current.window.prepare(optimizer, grads, variables)
        _count_update(current, optimizer)
        return None
    _check_reducible(optimizer, variables, current)
    if current.window is not None:
        current.window.add(optimizer, grads, variables)
        return None
    _update(optimizer, _average(grads, current), variables)
    return None


def _build(optimizer, variables):
    """Makes the slots; an optimizer that was made outside of the scope moves into it before."""
    with tf.init_scope():
        iterations = compat.iterations_of(optimizer)
        if compat.scope_has_copies() and not compat.is_distributed(iterations):
            compat.move_optimizer_to_scope(optimizer)
        optimizer.build(variables)


compat.around("apply")(_apply)
compat.around("apply_scaled")(_apply)


def _count_update(current, optimizer):
    """Notes, while variables are made, how often a step advances the optimizer's counter."""
    counter = optimizer.iterations
    _, updates = current.applied.get(id(counter), (None, 0))
    current.applied[id(counter)] = (counter, updates + 1)


def _update(optimizer, gradients, variables):
    """Runs the optimizer's own `apply` on gradients that are equal on all replicas."""
    current = replica.current()
    gradient_norms.note(optimizer, gradients)
    current.applying = True
    try:
        optimizer.apply(tables.rows_of_gradients(gradients, variables), variables)
    finally:
        current.applying = False


def _average(gradients, current):
    """Averages gradients over replicas, weighted by rows, in one packed reduction."""
    if not current.distributed:
        return gradients
    conditions.check_update(current)
    present = [g for g in gradients if g is not None]
    weighted = [_weigh(g, current.weight(g.dtype)) for g in present]
    reduced = iter(step_times.reduce_sum(weighted))
    return [None if g is None else next(reduced) for g in gradients]


def _weigh(gradient, weight):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.math.multiply_no_nan(gradient.values, weight),
            gradient.indices,
            gradient.dense_shape,
        )
    return tf.math.multiply_no_nan(gradient, weight)


def _check_reducible(optimizer, variables, current):
    if not current.distributed:
        return
    if compat.accumulation_of(optimizer) > 1:
        raise ValueError(
            f"The optimizer '{optimizer.name}' accumulates gradients, which the trainer does for "
            "it. Pass it to trainer.compile(...), or set `gradient_accumulation_steps` there. "
            f"Received: gradient_accumulation_steps={compat.accumulation_of(optimizer)} on the "
            "optimizer"
        )
    owned = {f"optimizer '{optimizer.name}'": compat.iterations_of(optimizer)}
    owned.update({f"variable '{variable.name}'": variable for variable in variables})
    for name, variable in owned.items():
        if not compat.is_distributed(variable):
            raise ValueError(
                f"The {name} was made outside of the trainer, so all replicas would change the "
                "same copy of it. Make it in the function that is passed to ReplicatedTrainer, or "
                "pass the optimizer to trainer.compile(...)."
            )


@compat.around("add_optimizer_variable")
def _make_slot_in_scope(original, optimizer, reference_variable, *args, **kwargs):
    """An optimizer that is built outside of the scope makes its slots where its weights live."""
    strategy = compat.strategy_of(reference_variable)
    if strategy is None or tf.distribute.has_strategy():
        return original(optimizer, reference_variable, *args, **kwargs)
    with strategy.scope():
        return original(optimizer, reference_variable, *args, **kwargs)


# ------------------------------------------------- behind the reduction: as on one device


def _inside(current):
    return current is not None and current.distributed and not current.building


@compat.around("update_step")
def _update_local_copies(original, optimizer, grads, trainable_variables, learning_rate):
    if not _inside(replica.current()):
        return original(optimizer, grads, trainable_variables, learning_rate)
    for gradient, variable in zip(grads, trainable_variables):
        optimizer.update_step(gradient, compat.local_copy(variable), learning_rate)
    return None


@compat.around("weight_decay")
def _decay_local_copies(original, optimizer, variables):
    if not _inside(replica.current()):
        return original(optimizer, variables)
    for variable in variables:
        if compat.decays(optimizer, variable):
            rate = tf.cast(optimizer.learning_rate, variable.dtype)
            decay = tf.cast(optimizer.weight_decay, variable.dtype)
            copy = compat.local_copy(variable)
            copy.assign_sub(conditions.masked(replica.current(), copy * decay * rate))
    return None


@compat.around("overwrite_with_average")
def _overwrite_local_copies(original, optimizer, trainable_variables):
    if not _inside(replica.current()):
        return original(optimizer, trainable_variables)
    for variable, average in zip(trainable_variables, compat.moving_averages(optimizer)):
        copy, current = compat.local_copy(variable), replica.current()
        copy.assign(conditions.selected(current, compat.local_copy(average), copy))
    return None


@compat.around("tf_apply_scaled")
def _apply_scaled_locally(original, optimizer, grads, trainable_variables=None):
    if replica.current() is None:
        return original(optimizer, grads, trainable_variables)
    return compat.apply_with_finite_check(optimizer, grads, trainable_variables)


def _assign_locally(original, optimizer, variable, value):
    current = replica.current()
    if _inside(current):
        variable = compat.local_copy(variable)
        if not isinstance(value, tf.IndexedSlices):
            value = conditions.selected(current, tf.cast(value, variable.dtype), variable)
    return original(optimizer, variable, value)


def _add_locally(original, optimizer, variable, value):
    current = replica.current()
    if _inside(current):
        variable = compat.local_copy(variable)
        value = conditions.masked(current, value)
    return original(optimizer, variable, value)


compat.around("optimizer_assign")(_assign_locally)
compat.around("optimizer_assign_add")(_add_locally)
compat.around("optimizer_assign_sub")(_add_locally)
