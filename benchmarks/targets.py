"""What is to be reached on two cores, and whether a run has reached it.

for line in check(figures):
    print(line)         # mlp, 2 replica(s), fit, ours / keras: 1.71, 1.60 asked: met
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on a ratio of ours to a rival.

    Args:
        name: Name of the figure.
        ours: Our contender.
        rival: The other one.
        bound: Smallest (largest, where `at_most`) median.
        models: The models it is asked of, or () for all.
        replicas: The numbers of replicas it is asked of, or () for all.
        at_most: Whether less is better.
        by_interval: Whether it is enough that the rounds' interval contains the bound.
    """

    name: str
    ours: str
    rival: str
    bound: float
    models: tuple = ()
    replicas: tuple = ()
    at_most: bool = False
    by_interval: bool = False

    def applies_to(self, figure):
        """Whether a figure is what this target is about."""
        return (
            figure.name == self.name
            and (not self.models or figure.model in self.models)
            and (not self.replicas or figure.replicas in self.replicas)
            and figure.ratio(self.ours, self.rival) is not None
        )

    def is_met(self, ratio):
        """Whether `(min, median, max)` of the rounds' ratios is good enough."""
        low, median, high = ratio
        if self.at_most:
            return (low if self.by_interval else median) <= self.bound
        return (high if self.by_interval else median) >= self.bound


def _beside_keras(replicas, **bounds):
    return [
        Target("fit", "ours", "keras", bound, (model,), (replicas,))
        for model, bound in bounds.items()
    ]


TARGETS = (
    *_beside_keras(1, small_mlp=3.6, mlp=1.8, resnet20=1.05),
    *_beside_keras(2, small_mlp=3.0, mlp=1.6, resnet20=1.05),
    Target("fit", "ours_fixed", "bare_loop", 0.97, by_interval=True),
    Target("fit", "ours_fixed", "orbit", 1.0, by_interval=True),
    Target("evaluate", "ours", "keras", 1.5, ("small_mlp", "mlp")),
    Target("predict", "ours", "keras", 1.5, ("small_mlp", "mlp")),
    Target("first step", "ours", "keras", 1.1, at_most=True),
    Target("memory", "ours", "keras", 1.1, at_most=True),
)


def check(figures):
    """Returns a line for each target that a figure is about."""
    lines = []
    for figure in figures:
        for target in TARGETS:
            if not target.applies_to(figure):
                continue
            ratio = figure.ratio(target.ours, target.rival)
            verdict = "met" if target.is_met(ratio) else "MISSED"
            bound = f"{'at most ' if target.at_most else ''}{target.bound:.2f}"
            lines.append(
                f"{figure.model}, {figure.replicas} replica(s), {figure.name}, "
                f"{target.ours} / {target.rival}: {ratio[1]:.2f} "
                f"({ratio[0]:.2f} to {ratio[2]:.2f}), {bound} asked: {verdict}"
            )
    return lines
