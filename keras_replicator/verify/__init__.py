"""Trains a model and step on 1 and N simulated devices, and names the cause of any difference.

report = trainer.verify(x, y, replicas=(2, 4))
report.equal       # whether all numbers agree
report.causes      # what was found: kind, place in the code, fix

`parcel.py` packs the user's functions for a process of its own, `process.py` starts it, `child.py`
is what it runs. There `subject.py` runs the step on some devices, `investigate.py` compares and
switches suspects off one at a time (`draws.py`: random numbers), `recorder.py` notes every
operation of a step, `relations.py` says how a value on replicas relates to that on one device, and
`causes.py` follows a wrong value back to the line where it went wrong. `report.py` is the result.
"""

from keras_replicator.verify.report import Cause, Report, VerifyError

__all__ = ["Cause", "Report", "VerifyError"]
