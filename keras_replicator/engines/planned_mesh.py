"""A mesh of devices that are not there: shapes, layout and memory, and no step."""

from keras_replicator import compat, placement
from keras_replicator.engines.mesh import MeshEngine
from keras_replicator.mesh_planning import Planned


class PlannedMeshEngine(MeshEngine):
    """Makes models without memory, and ends the script when their trainer is compiled."""

    def make_mesh(self, devices):
        return None

    def owns(self, variable):
        return True

    def _place(self, variable, value, like):
        placement.make(variable, value)  # metrics and counters, a few bytes

    def make(self, function):
        with compat.deferred_variables() as deferred:
            made = function()
        self._settle(made)
        for variable in deferred.variables:
            compat.set_raw_variable(variable, compat.unallocated_variable(variable))
        return made

    def complete(self, plan, optimizers=None):
        plan = super().complete(plan, optimizers)
        if optimizers is not None:
            print(plan)
            raise Planned
        return plan
