"""The process in which `trainer.verify` runs: `python -m keras_replicator.verify.child IN OUT`."""

import pickle
import sys


def main(source, target):
    """Reads a job, runs it, and writes `(report, error text)`.

    Args:
        source: File with a pickled header and job.
        target: File for the result.
    """
    with open(source, "rb") as file:
        header = pickle.load(file)
        # What the parent could import, this process must be able to import, too.
        sys.path[:] = header["path"]
        data = file.read()

    import keras

    from keras_replicator.verify.investigate import investigate
    from keras_replicator.verify.report import VerifyError

    try:
        job = pickle.loads(data)
        keras.config.set_dtype_policy(job.policy)
        result = (investigate(job), None)
    except VerifyError as error:
        result = (None, str(error))
    with open(target, "wb") as file:
        pickle.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
