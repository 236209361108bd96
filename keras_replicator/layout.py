"""`Layout`: how the weights of one replica are split over a mesh of devices.

    layout = kr.Layout(
        mesh={"batch": 2, "model": -1},
        variables={r".*dense/kernel": (None, "model"), r".*dense_1/kernel": ("model", None)},
    )

Pure arithmetic on names and shapes: nothing here knows TensorFlow.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of devices, and which axis of a variable is split over which axis of the mesh.

    Rows of a batch are split over the axis "batch", where the mesh has it.

    Args:
        mesh: Dict of the mesh's axes and their sizes, such as `{"batch": 2, "model": 4}`. One size
            may be -1: as many as the devices leave.
        variables: Dict of rules. A key is a regular expression that matches the whole
            `variable.path`, or a path itself; a value holds for each axis of the variable the
            name of a mesh axis, or None. Variables without a rule have a whole copy on each
            device. "auto": `kr.auto_layout` makes the rules.
        batch_axis: Name of the mesh axis over which rows are split.

    Raises:
        ValueError: When a size, an axis or a rule is wrong; the message names it and the fix.

    Example:

    >>> layout = Layout(mesh={"batch": 2, "model": 2}, variables={".*/kernel": (None, "model")})
    >>> layout.of("dense/kernel", (8, 4))
    (None, 'model')
    >>> layout.of("dense/bias", (4,))
    (None,)
    """

    mesh: Mapping
    variables: Mapping | str = dataclasses.field(default_factory=dict)
    batch_axis: str = "batch"

    def __post_init__(self):
        object.__setattr__(self, "mesh", _checked_mesh(self.mesh))
        if self.variables == AUTO:
            return
        object.__setattr__(self, "variables", _checked_rules(self.variables, self.mesh))

    @property
    def is_auto(self):
        """Whether the rules are still to be made by `kr.auto_layout`."""
        return self.variables == AUTO

    @property
    def num_devices(self):
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def batch_size(self):
        """Parts into which rows are split; 1 where the mesh has no batch axis."""
        return self.mesh.get(self.batch_axis, 1)

    def on(self, num_devices, workers=1):
        """Returns the layout with every size known.

        Args:
            num_devices: Devices that there are, over all workers.
            workers: Workers that have them, equally many each.

        Raises:
            ValueError: When the mesh does not take exactly these devices.
        """
        known = math.prod(size for size in self.mesh.values() if size != -1)
        sizes = {
            axis: num_devices // known if size == -1 else size for axis, size in self.mesh.items()
        }
        if math.prod(sizes.values()) != num_devices or 0 in sizes.values():
            each, of_each = -(-known // workers), " on each worker" if workers > 1 else ""
            raise ValueError(
                f"`mesh` asks for {known if -1 not in self.mesh.values() else f'{known} x n'} "
                f"device(s), and there are {num_devices}"
                f"{f' on {workers} workers' if workers > 1 else ''}. Let one size be -1, take "
                f"fewer by `devices={each}`{of_each}, or split the CPU with "
                f"kr.simulate_devices({each}) at the top of the script. "
                f"Received: mesh={dict(self.mesh)}"
            )
        return dataclasses.replace(self, mesh=sizes)

    def rule(self, path):
        """Returns `(pattern, axes)` of the rule for a variable, or None.

        Raises:
            ValueError: When several rules match.
        """
        if path in self.variables:
            return path, self.variables[path]
        found = [pattern for pattern in self.variables if re.fullmatch(pattern, path)]
        if len(found) > 1:
            raise ValueError(
                f"Several rules of the layout match the variable '{path}'. Make them narrower, "
                f"so that one is left. Received: {', '.join(map(repr, found))}"
            )
        return (found[0], self.variables[found[0]]) if found else None

    def of(self, path, shape):
        """Returns, for each axis of a variable, the name of a mesh axis, or None.

        Args:
            path: The variable's path.
            shape: Its shape.

        Raises:
            ValueError: When the rule for it does not fit its shape.
        """
        rule = self.rule(path)
        if rule is None:
            return (None,) * len(shape)
        pattern, axes = rule
        if len(axes) != len(shape):
            raise ValueError(
                f"The rule {pattern!r} names {len(axes)} axes, and the variable '{path}' has "
                f"{len(shape)}: its shape is {tuple(shape)}. Give one name, or None, for each. "
                f"Received: {pattern!r}: {axes}"
            )
        for axis, size in zip(axes, shape):
            parts = 1 if axis is None else self.mesh[axis]
            if size % parts:
                raise ValueError(
                    f"The variable '{path}' of shape {tuple(shape)} cannot be split: {size} is "
                    f"not divisible by {parts}, the size of the mesh axis {axis!r}. Leave that "
                    f"axis of the variable whole (None), or take a mesh whose {axis!r} divides "
                    f"{size}. Received: {pattern!r}: {axes}, mesh={dict(self.mesh)}"
                )
        return axes

    def check(self, shapes):
        """Raises unless every rule fits, and every rule matches a variable.

        Args:
            shapes: Dict of the shapes of all variables, by path.

        Raises:
            ValueError: For the first rule that does not fit.
        """
        used = set()
        for path, shape in shapes.items():
            self.of(path, shape)
            rule = self.rule(path)
            if rule is not None:
                used.add(rule[0])
        for pattern, axes in self.variables.items():
            if pattern not in used:
                raise ValueError(
                    f"The rule {pattern!r} matches no variable. A rule must match the whole path; "
                    f"the paths are: {_listed(shapes)}. Correct the rule, or leave it out. "
                    f"Received: {pattern!r}: {axes}"
                )

    def check_workers(self, devices_of_each):
        """Raises unless each worker holds all parts of every variable.

        Args:
            devices_of_each: Devices of a worker; workers have consecutive parts of the mesh.

        Raises:
            ValueError: When a rule splits a variable over workers.
        """
        devices, over_workers = 1, set()
        for axis, size in reversed(self.mesh.items()):
            devices *= size
            if size > 1 and devices_of_each % devices:
                over_workers.add(axis)
        for pattern, axes in self.variables.items():
            for axis in over_workers.intersection(axes):
                raise ValueError(
                    f"The rule {pattern!r} splits a variable over {axis!r}, an axis of the mesh "
                    f"that lies over several workers of {devices_of_each} device(s) each. Rows go "
                    "over workers, weights over the devices of one: name the axis of the weights "
                    "last in the mesh, with a size that divides the devices of a worker. "
                    f"Received: {pattern!r}: {axes}, mesh={dict(self.mesh)}"
                )

    def parts(self, axes):
        """Returns over how many devices the bytes of a variable with these axes are split."""
        return math.prod(self.mesh[axis] for axis in axes if axis is not None)

    def describe(self):
        """Returns the text of the mesh, such as "batch=2 x model=4"."""
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())


def as_layout(layout):
    """Returns a `Layout` for what the trainer takes as `layout=`.

    Args:
        layout: A `Layout`, or a `keras.distribution.LayoutMap` (rows are split over the axis
            "batch" of its mesh, or over its first axis, as Keras does).

    Raises:
        TypeError: For anything else.
    """
    if isinstance(layout, Layout):
        return layout
    mesh = getattr(layout, "device_mesh", None)
    if mesh is None or not isinstance(layout, Mapping):
        raise TypeError(
            "`layout` must be a kr.Layout, or a keras.distribution.LayoutMap with a device mesh. "
            f"Received: layout={layout!r}"
        )
    names = list(mesh.axis_names)
    return Layout(
        mesh=dict(zip(names, mesh.shape)),
        variables={pattern: tuple(layout[pattern].axes) for pattern in layout},
        batch_axis="batch" if "batch" in names else names[0],
    )


def devices_of(layout):
    """Returns the names of the devices that a `LayoutMap` holds, or None."""
    mesh = getattr(layout, "device_mesh", None)
    if mesh is None:
        return None
    return [str(name).upper() for name in mesh.devices.flatten()]


def _checked_mesh(mesh):
    if not isinstance(mesh, Mapping) or not mesh:
        raise ValueError(
            "`mesh` must be a dict of axes and their sizes, such as {'batch': 2, 'model': 2}. "
            f"Received: mesh={mesh!r}"
        )
    for axis, size in mesh.items():
        is_int = isinstance(size, int) and not isinstance(size, bool)
        if not isinstance(axis, str) or not is_int or (size < 1 and size != -1):
            raise ValueError(
                "`mesh` must hold names and sizes of at least 1 (one may be -1). "
                f"Received: {axis!r}: {size!r} in mesh={dict(mesh)}"
            )
    if list(mesh.values()).count(-1) > 1:
        raise ValueError(
            "`mesh` may hold one -1; with two there are many ways to divide the devices. "
            f"Received: mesh={dict(mesh)}"
        )
    return dict(mesh)


def _checked_rules(variables, mesh):
    if not isinstance(variables, Mapping):
        raise ValueError(
            "`variables` must be 'auto', or a dict of patterns and axes, such as "
            f"{{'.*/kernel': (None, 'model')}}. Received: variables={variables!r}"
        )
    checked = {}
    for pattern, axes in variables.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                "A key of `variables` must be a regular expression or a variable's path. "
                f"Received: {pattern!r} ({error})"
            ) from error
        if not isinstance(axes, (tuple, list)):
            raise ValueError(
                f"The rule {pattern!r} must hold a tuple with a name, or None, for each axis of "
                f"the variable. Received: {pattern!r}: {axes!r}"
            )
        names = [axis for axis in axes if axis is not None]
        for axis in names:
            if axis not in mesh:
                raise ValueError(
                    f"The rule {pattern!r} names the axis {axis!r}, which the mesh does not have. "
                    f"Its axes are {', '.join(map(repr, mesh))}. Received: {pattern!r}: "
                    f"{tuple(axes)}"
                )
        if len(set(names)) != len(names):
            raise ValueError(
                f"The rule {pattern!r} names a mesh axis twice; each can split one axis of a "
                f"variable. Received: {pattern!r}: {tuple(axes)}"
            )
        checked[pattern] = tuple(axes)
    return checked


def _listed(shapes, most=12):
    paths = [f"{path} {tuple(shape)}" for path, shape in list(shapes.items())[:most]]
    return ", ".join(paths) + (f" and {len(shapes) - most} more" if len(shapes) > most else "")
