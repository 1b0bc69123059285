"""The configuration of a run, in small sections that validate themselves. Torch-free.

`spurline train --help` shows the docstring below each field.
"""

from spurline.config.data import Data
from spurline.config.layout import ActivationCheckpoint, Comm, Compile, Parallelism
from spurline.config.model import ModelConfig, ParallelFacts
from spurline.config.output import Checkpoint, Debug, Job, Metrics, Profile
from spurline.config.precision import Precision
from spurline.config.run import RunConfig
from spurline.config.training import LRScheduler, Optimizer, Training

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "Data",
    "Debug",
    "Job",
    "LRScheduler",
    "Metrics",
    "ModelConfig",
    "Optimizer",
    "ParallelFacts",
    "Parallelism",
    "Precision",
    "Profile",
    "RunConfig",
    "Training",
]
