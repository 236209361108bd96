"""kr.callbacks.LearningRateWarmup against the formula of Goyal et al. (arXiv 1706.02677)."""

import keras
import numpy as np
import pytest

import keras_replicator as kr


class Rates(keras.callbacks.Callback):
    """Notes the learning rate that each step used."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def data(rows=10):
    x = np.ones((rows, 2), "float32")
    return x, x[:, :1]


def compiled(learning_rate=0.1):
    model = build()
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    return model


def fit(model, warmup, epochs=3, **arguments):
    rates = Rates()
    model.fit(
        *data(), batch_size=4, epochs=epochs, verbose=0, callbacks=[warmup, rates], **arguments
    )
    return rates.seen


def test_the_rate_rises_by_equal_amounts_to_the_scaled_rate():
    warmup = kr.callbacks.LearningRateWarmup(
        0.1, batch_size=1024, reference_batch_size=256, epochs=2
    )
    seen = fit(compiled(), warmup)  # 3 steps an epoch, 6 of warm-up
    np.testing.assert_allclose(seen, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4], rtol=1e-6)


def test_without_epochs_the_scaled_rate_holds_at_once():
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512, epochs=0)
    np.testing.assert_allclose(fit(compiled(), warmup, epochs=1), [0.2] * 3, rtol=1e-6)


def test_another_callback_may_take_over_after_the_warmup():
    model = compiled()
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512, epochs=1)
    rates = Rates()
    later = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (
            setattr(model.optimizer, "learning_rate", 0.01) if epoch == 2 else None
        )
    )
    model.fit(*data(), batch_size=4, epochs=3, verbose=0, callbacks=[warmup, later, rates])
    np.testing.assert_allclose(rates.seen[3:], [0.2] * 3 + [0.01] * 3, rtol=1e-6)


def test_a_resumed_run_goes_on_where_the_warmup_was():
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=1024, epochs=2)
    seen = fit(compiled(), warmup, epochs=3, initial_epoch=1)
    np.testing.assert_allclose(seen, [0.25, 0.3, 0.35, 0.4, 0.4, 0.4], rtol=1e-6)


def test_a_run_resumed_behind_the_warmup_is_left_alone():
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=1024, epochs=1)
    seen = fit(compiled(0.03), warmup, epochs=3, initial_epoch=2)
    np.testing.assert_allclose(seen, [0.03] * 3, rtol=1e-6)


def test_it_asks_for_batches_during_the_warmup_only():
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512, epochs=1)
    assert warmup.batch_interval == 1
    fit(compiled(), warmup, epochs=2)
    assert warmup.batch_interval is None


def test_the_rate_is_logged():
    model = compiled()
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512, epochs=0)
    history = model.fit(*data(), verbose=0, callbacks=[warmup])
    np.testing.assert_allclose(history.history["learning_rate"], [0.2], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_step_of_the_trainer_has_its_own_rate(replicas):
    trainer = kr.ReplicatedTrainer(build, devices=replicas)
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=1024, epochs=2)
    rates = Rates()
    trainer.fit(*data(), batch_size=4, epochs=3, verbose=0, callbacks=[warmup, rates])
    np.testing.assert_allclose(
        rates.seen, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4], rtol=1e-6
    )


def test_a_schedule_cannot_be_warmed_up():
    model = build()
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model.compile(keras.optimizers.SGD(schedule), "mse")
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512)
    with pytest.raises(ValueError, match="build the warm-up into the schedule. Received"):
        fit(model, warmup)


def test_data_of_unknown_length_need_the_number_of_steps():
    model = compiled()
    x, y = data(4)

    def batches():
        while True:
            yield x, y

    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512)
    warmup.set_params({"steps": None})
    warmup.set_model(model)
    warmup.on_train_begin()
    with pytest.raises(ValueError, match=r"Pass LearningRateWarmup\(..., steps_per_epoch=...\)"):
        warmup.on_epoch_begin(0)
    told = kr.callbacks.LearningRateWarmup(0.1, batch_size=512, epochs=1, steps_per_epoch=2)
    rates = Rates()
    model.fit(
        batches(), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0, callbacks=[told, rates]
    )
    np.testing.assert_allclose(rates.seen, [0.1, 0.15, 0.2, 0.2], rtol=1e-6)


def test_several_optimizers_need_a_choice():
    def step(models, batch):
        return {}

    trainer = kr.ReplicatedTrainer(lambda: {"a": build(), "b": build()}, train_step=step, devices=2)
    trainer.compile(optimizer={"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.1)})
    warmup = kr.callbacks.LearningRateWarmup(0.1, batch_size=512)
    with pytest.raises(ValueError, match=r"Say which one: .*optimizer=trainer.optimizers"):
        trainer.fit(*data(), verbose=0, callbacks=[warmup])
    warmup = kr.callbacks.LearningRateWarmup(
        0.1, batch_size=512, epochs=0, optimizer=trainer.optimizers["b"]
    )
    trainer.fit(*data(), verbose=0, callbacks=[warmup])
    rates = {name: float(o.learning_rate.numpy()) for name, o in trainer.optimizers.items()}
    assert rates == pytest.approx({"a": 0.1, "b": 0.2})


@pytest.mark.parametrize("name", ["learning_rate", "batch_size", "reference_batch_size"])
def test_numbers_must_be_positive(name):
    arguments = {"learning_rate": 0.1, "batch_size": 8, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be above 0. Received: {name}=0"):
        kr.callbacks.LearningRateWarmup(**arguments)


def test_epochs_must_not_be_negative():
    with pytest.raises(ValueError, match="`epochs` must be 0 or more. Received: epochs=-1"):
        kr.callbacks.LearningRateWarmup(0.1, batch_size=8, epochs=-1)
