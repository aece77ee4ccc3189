"""The nouns of a round.

Task      what is learned: a network, its data, and a client's local work
Model     a task and weights; a run may have several models of one task
Plan      who trains which model in this round
Question  what a sampler asks clients before it draws
Job       what an engine gets: models, a plan, and the work that each row has to do
Chunk     what an engine gives back for some rows
Seen      what the server learns about each row
"""

from __future__ import annotations

from typing import Any

from rota.plan.chunk import COLUMNS as COLUMNS
from rota.plan.chunk import NO_REPLY as NO_REPLY
from rota.plan.chunk import Chunk, Costs, Seen
from rota.plan.job import NUMBER as NUMBER
from rota.plan.job import Duty, Job, Local
from rota.plan.job import duty as duty
from rota.plan.job import whole as whole
from rota.plan.plan import Plan, Question
from rota.plan.plan import checked as checked
from rota.plan.task import Model, Task
from rota.plan.task import shares as shares

__all__ = [
    "Chunk",
    "Costs",
    "Duty",
    "Job",
    "Local",
    "Model",
    "Plan",
    "Question",
    "Seen",
    "State",
    "Task",
]

State = dict[str, Any]
"""What a policy remembers: named arrays and tensors and nothing else, so checkpoints hold it."""
