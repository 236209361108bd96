"""The pictures of a run: a grid of samples and the curve of their quality."""

import pathlib

import keras

from keras_replicator.callbacks.tensorboard import image_grid


def save_figures(folder, history, quality):
    """Writes `samples.png` and `curve.png`.

    Args:
        folder: where to write.
        history: dict of lists, one entry per epoch, with "updates" among them.
        quality: the `SampleQuality` of the run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = pathlib.Path(folder)
    grid = image_grid(quality.pictures(), columns=10)
    keras.utils.save_img(folder / "samples.png", grid * 255, scale=False)

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    left.plot(history["updates"], history["frechet_distance"], marker="o")
    left.axhline(quality.real_to_real, linestyle=":", label="real against real")
    left.set(xlabel="generator updates", ylabel="Fréchet distance", yscale="log")
    left.legend()
    right.plot(history["updates"], history["recognised"], marker="o", label="all classes")
    right.plot(history["updates"], history["recognised_worst_class"], label="worst class")
    right.set(xlabel="generator updates", ylabel="recognised as their class", ylim=(0, 1))
    right.legend()
    figure.savefig(folder / "curve.png", dpi=80)
    pyplot.close(figure)
