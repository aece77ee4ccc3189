"""Federated learning that decides, every round, who trains which model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota import data, estimate, grouping, models, sampling, scores
    from rota.admission import Admission
    from rota.data import Federation, from_arrays, from_clients, partition
    from rota.errors import BadInput
    from rota.experiment import Experiment
    from rota.notebook.compare import compare
    from rota.notebook.progress import Progress
    from rota.plan import Chunk, Job, Local, Model, Plan, Seen, Task
    from rota.running.run import Run, run
    from rota.world.availability import Availability
    from rota.world.devices import Devices

__all__ = [
    "Admission",
    "Availability",
    "BadInput",
    "Chunk",
    "Devices",
    "Experiment",
    "Federation",
    "Job",
    "Local",
    "Model",
    "Plan",
    "Progress",
    "Run",
    "Seen",
    "Task",
    "compare",
    "data",
    "estimate",
    "from_arrays",
    "from_clients",
    "grouping",
    "models",
    "partition",
    "personal",
    "run",
    "sampling",
    "scores",
]
__version__ = "0.1.0"

_HOMES = {
    "rota.world.availability": ["Availability"],
    "rota.data": ["Federation", "from_arrays", "from_clients", "partition"],
    "rota.world.devices": ["Devices"],
    "rota.admission": ["Admission"],
    "rota.errors": ["BadInput"],
    "rota.running.run": ["Run", "run"],
    "rota.notebook.compare": ["compare"],
    "rota.notebook.progress": ["Progress"],
    "rota.experiment": ["Experiment"],
    "rota.plan": ["Chunk", "Job", "Local", "Model", "Plan", "Seen", "Task"],
}


def __getattr__(name: str) -> Any:
    """Load things when they are first used: torch takes seconds, and `rota --help` needs none."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name in __all__:
        return importlib.import_module(f"rota.{name}")
    raise AttributeError(f"module 'rota' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
