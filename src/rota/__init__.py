"""Federated learning that decides, every round, who trains, which model, how much of it and with whom it is shared."""

from rota import data, estimate, models, sampling
from rota.availability import Availability
from rota.data import Federation, from_clients, partition
from rota.engine import Devices
from rota.errors import BadInput
from rota.experiment import Run, run
from rota.loop import Experiment
from rota.plan import Chunk, Plan, Seen, Task

__all__ = [
    "Availability",
    "BadInput",
    "Chunk",
    "Devices",
    "Experiment",
    "Federation",
    "Plan",
    "Run",
    "Seen",
    "Task",
    "data",
    "estimate",
    "from_clients",
    "models",
    "partition",
    "run",
    "sampling",
]
__version__ = "0.1.0"
