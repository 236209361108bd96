"""`python -m keras_replicator …`: the same as the command `keras-replicator`."""

import sys

from keras_replicator.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
