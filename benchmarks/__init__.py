"""Speed of this package beside Keras, a loop by hand and Orbit: `python -m benchmarks --help`."""
