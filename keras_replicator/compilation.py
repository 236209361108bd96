"""What `compile` sets: optimizers, losses and metrics in the trainer's scope, and how steps run."""

import dataclasses
import inspect

import keras

from keras_replicator import compat, copies
from keras_replicator.checks import check_flag, check_positive

DEFAULT_OPTIMIZER = "rmsprop"  # as in Keras


@dataclasses.dataclass
class Compilation:
    """The settings of a compiled trainer.

    Attributes:
        optimizers: Dict of optimizers, by the names under which `compile` took them.
        steps_per_execution: An int, or "auto".
        run_eagerly: Whether steps run without compilation.
        jit_compile: Whether XLA compiles forward and backward pass.
        accumulation: Steps that make one update.
        sync_batch_norm: Whether BatchNormalization takes global statistics.
        metrics: Pairs of a metric of the user and the copy that is used.
    """

    optimizers: dict
    steps_per_execution: int | str = "auto"
    run_eagerly: bool = False
    jit_compile: bool = False
    accumulation: int = 1
    sync_batch_norm: bool = False
    metrics: list = dataclasses.field(default_factory=list)

    def describe(self, plan, policy, seed):
        """Returns the lines that `print(trainer.plan)` shows about the update."""
        several, mesh = plan.num_replicas > 1, plan.strategy == "mesh"
        clips = [
            f"{name}: {setting}={value}"
            for name, optimizer in self.optimizers.items()
            for setting in ("clipnorm", "global_clipnorm", "clipvalue")
            if (value := getattr(_inner(optimizer), setting, None))
        ]
        steps = self.accumulation
        return {
            "loss": "mean over the rows of the global batch"
            + ("; masks and weights divide by global sums" if several else ""),
            "scalar losses": "on the global batch (gathered rows)" if several else "as in Keras",
            "clipping": (", ".join(clips) + ", on the averaged gradient") if clips else "none",
            "update": f"every {steps} steps" if steps > 1 else "every step",
            "batch normalization": "statistics over all replicas"
            if self.sync_batch_norm
            else "statistics over all rows"
            if mesh
            else "each replica's rows; moving statistics averaged by rows",
            "precision": policy,
            "XLA": "forward and backward pass" if self.jit_compile else "off",
            "random streams": ("one" if mesh else "one per replica")
            + ("" if seed is None else f", from seed {seed}"),
            "shared files": "written by the chief" if plan.num_workers > 1 else "written here",
        }


def compile_models(
    models,
    engine,
    *,
    optimizer,
    given,
    steps_per_execution,
    jit_compile,
    gradient_accumulation_steps,
    sync_batch_norm,
    run_eagerly,
    accelerated,
    more,
):
    """Compiles the models in the engine's scope.

    Args:
        models: The `Models`.
        engine: The engine.
        optimizer: A name, an optimizer, or a dict of them.
        given: Dict of loss, metrics, weighted_metrics and loss_weights, as the user gave them.
        steps_per_execution: See `Compilation`.
        jit_compile: True, False or "auto".
        gradient_accumulation_steps: See `Compilation.accumulation`.
        sync_batch_norm: See `Compilation`.
        run_eagerly: See `Compilation`.
        accelerated: Whether "auto" means XLA on this plan, for built-in steps.
        more: What a subclass's own `compile` takes.

    Returns:
        A `Compilation`.

    Raises:
        ValueError: When an argument is wrong.
    """
    check_positive("gradient_accumulation_steps", gradient_accumulation_steps)
    if steps_per_execution != "auto":
        check_positive("steps_per_execution", steps_per_execution)
    if jit_compile not in (True, False, None, "auto"):
        raise ValueError(
            f"`jit_compile` must be True, False or 'auto'. Received: jit_compile={jit_compile!r}"
        )
    check_flag("sync_batch_norm", sync_batch_norm)
    check_flag("run_eagerly", run_eagerly)
    if run_eagerly and jit_compile is True:
        raise ValueError(
            "`jit_compile=True` compiles what `run_eagerly=True` runs without compilation. Leave "
            "one of them out. Received: jit_compile=True, run_eagerly=True"
        )
    if jit_compile is True and engine.asynchronous:
        raise ValueError(
            "XLA cannot compile a step whose variables live on parameter servers. Leave out "
            "`jit_compile`. Received: jit_compile=True"
        )
    if jit_compile is True and not engine.takes_xla:
        raise ValueError(
            "XLA cannot compile a step on a mesh, whose parts DTensor connects. Leave out "
            "`jit_compile`. Received: jit_compile=True"
        )
    host = models.host
    several = isinstance(optimizer, dict) and "class_name" not in optimizer
    named = dict(optimizer) if several else {"optimizer": optimizer}
    named.update({name: v for name, v in more.items() if isinstance(v, keras.optimizers.Optimizer)})
    with engine.scope():
        optimizers = {
            name: copies.take_optimizer(value, engine, *models.copied())
            for name, value in named.items()
        }
        arguments = {name: value for name, value in given.items() if value is not None}
        pairs = []
        if engine.makes_anew:
            for name in ("metrics", "weighted_metrics"):
                if name in arguments:
                    arguments[name] = copies.copy_metrics(arguments[name], pairs)
        arguments.update(more)
        arguments.update({name: value for name, value in optimizers.items() if name in more})
        if several:
            arguments["optimizer"] = None
            host.replicated_optimizers = [optimizers[name] for name in optimizer]
        elif _takes(host, "optimizer"):
            arguments["optimizer"] = optimizers["optimizer"]
        for name, value in (
            ("run_eagerly", run_eagerly),
            ("jit_compile", False if run_eagerly else jit_compile),
            ("steps_per_execution", 1),
        ):
            if _takes(host, name):
                arguments[name] = value
        host.compile(**arguments)
    found = {name: optimizers[name] for name in optimizer} if several else _found(host, more)
    own = inspect.signature(type(host).compile).parameters
    if len(found) > 1 and optimizer == DEFAULT_OPTIMIZER and "optimizer" not in own:
        del found["optimizer"]  # Keras' default, beside those of the subclass
    for one in found.values():
        compat.take_accumulation(one)
    return Compilation(
        optimizers=found,
        steps_per_execution=steps_per_execution,
        run_eagerly=bool(run_eagerly),
        jit_compile=(accelerated if jit_compile == "auto" else bool(jit_compile))
        and not run_eagerly,
        accumulation=_accumulation(found, gradient_accumulation_steps),
        sync_batch_norm=bool(sync_batch_norm),
        metrics=pairs,
    )


def _found(host, more):
    """The optimizers of a compiled model, by the arguments of its own `compile`."""
    named = {name: getattr(host, name, None) for name in ("optimizer", *more)}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, keras.optimizers.Optimizer)
    }


def _accumulation(optimizers, steps):
    for name, optimizer in optimizers.items():
        own = compat.taken_accumulation(optimizer)
        if own > 1 and steps > 1 and own != steps:
            raise ValueError(
                "`gradient_accumulation_steps` is set twice, to different numbers. Set it in "
                "compile() or on the optimizer, not in both. Received: "
                f"gradient_accumulation_steps={steps}, and {own} on the optimizer '{name}'"
            )
        steps = max(steps, own)
    return steps


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _takes(model, argument):
    """Whether a model's `compile` takes an argument."""
    parameters = inspect.signature(type(model).compile).parameters
    return argument in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def adoptable(model):
    """Returns the arguments with which a model object came compiled, or None."""
    if not getattr(model, "compiled", False) or compat.overridden(model, "compile"):
        return None
    config = compat.compile_config(model)
    if config is None:
        return None
    config["optimizer"] = model.optimizer
    config.pop("steps_per_execution", None)
    return {name: value for name, value in config.items() if value is not None}
