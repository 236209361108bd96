"""Installs `keras_replicator`; the folder `callbacks/` becomes `keras_replicator.callbacks`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version():
    """Returns the version without importing the package, which would need TensorFlow."""
    text = (ROOT / "keras_replicator" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def read_description():
    """Returns the text of the README, for package indexes."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


def list_packages():
    """Returns every package: those below keras_replicator/, and callbacks/ with its own."""
    packages = find_packages(str(ROOT), include=["keras_replicator", "keras_replicator.*"])
    callbacks = find_packages(str(ROOT), include=["callbacks", "callbacks.*"])
    return packages + [f"keras_replicator.{name}" for name in callbacks]


setup(
    name="keras_replicator",
    version=read_version(),
    description="Train Keras 3 models on many devices and machines, with the numbers of one device",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="keras tensorflow distributed training data-parallel replicas",
    python_requires=">=3.11",
    packages=list_packages(),
    package_dir={"keras_replicator.callbacks": "callbacks"},
    package_data={"keras_replicator": ["py.typed"]},
    zip_safe=False,
    install_requires=[
        "tensorflow>=2.20",
        "keras>=3.12",
        # TensorFlow 2.21 no longer brings it.
        "tensorboard>=2.20",
        "numpy>=1.26",
        # `trainer.verify` sends functions to another process.
        "cloudpickle>=3.0",
    ],
    extras_require={
        "examples": [
            "tensorflow-datasets>=4.9.9",
            # tensorflow-datasets needs it and does not say so on Python 3.11.
            "importlib_resources",
            "scikit-learn>=1.4",
            "matplotlib>=3.8",
        ],
        "control": [
            "dm-control==1.0.*",
            # With MuJoCo 4 no task of dm-control 1.0 loads.
            "mujoco>=3.17,<4",
            "dm_env>=1.6",
        ],
        "dev": [
            "pytest>=9.0",
            "pytest-xdist",
            "pytest-timeout>=2.3",
            "ruff>=0.9",
            "PyYAML>=6.0",
            "kubernetes-validate>=1.31",
            # For the task of its own of examples/d4pg.
            "dm_env>=1.6",
            # To execute the notebook.
            "ipykernel>=6.29",
            "nbclient>=0.10",
        ],
    },
    entry_points={"console_scripts": ["keras-replicator = keras_replicator.launch.main:main"]},
)
