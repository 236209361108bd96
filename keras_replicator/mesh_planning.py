"""What a script would do on a mesh of devices that this machine does not have.

`keras-replicator plan script.py --mesh batch=2,model=4` runs the script up to `trainer.compile`,
gives its weights shapes but no memory, and prints the plan.
"""

import runpy
import sys

_requested = None  # the sizes of the mesh, while a script is planned


def requested():
    """Returns the mesh for which the script is planned, or None when it simply runs."""
    return _requested


def plan_script(script, mesh, arguments=()):
    """Runs a script up to its first compiled trainer, and prints that trainer's plan.

    Args:
        script: Path of a Python script.
        mesh: Dict of the mesh's axes and sizes.
        arguments: The script's arguments.

    Returns:
        Whether it compiled a trainer.
    """
    global _requested
    before = sys.argv
    _requested, sys.argv = dict(mesh), [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except Planned:
        return True
    finally:
        _requested, sys.argv = None, before
    return False


class Planned(BaseException):
    """Ends the script: its plan is printed."""
