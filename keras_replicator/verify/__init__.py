"""Trains a model and step on 1 and N simulated devices, and names the cause of any difference.

report = trainer.verify(x, y, replicas=(2, 4))
report.equal       # whether all numbers agree
report.causes      # what was found: kind, place in the code, fix

`job.py` and `parcel.py` pack the user's functions for a process of its own, `process.py` starts it,
`child.py` is what it runs. There `subject.py` runs the step on some devices, `investigate.py`
switches suspects off one at a time (`draws.py`: random numbers), `comparison.py` says what differs,
`hooks.py` and `recorder.py` note every operation of a step, `relations.py` says how a value on
replicas relates to that on one device, `evidence.py` finds the operation that goes wrong first, and
`causes.py` the values that matter. `report.py` is the result, `fixes.py` what it advises.
"""

from keras_replicator.verify.report import Cause, Report, VerifyError

__all__ = ["Cause", "Report", "VerifyError"]
