"""What an estimator with a memory learns from updates that came after their round.

Such an update is not added to any sum: its round is over. But it is newer than what is remembered
of its client, and what is remembered may be anything that does not depend on the draws to come.
"""

from __future__ import annotations

import torch

from rota.estimate import FedVarp, StaleVre, memory
from rota.estimate.memory import Tensors
from rota.plan import Chunk, Plan


def remember(estimator: FedVarp, state: Tensors, plan: Plan, chunk: Chunk) -> Tensors:
    """The state in which the chunk's updates are the last ones of their clients."""
    memory.settle(state)
    s, came = chunk.model, chunk.ok
    clients, kept = plan.client[chunk.rows[came]], state[f"memory.{chunk.model}"]
    fresh: memory.Fresh = [[] for _ in range(len(state["share"]))]
    fresh[s].append((clients, chunk.update[came].to(kept.device)))
    norm = state["norm"].clone()
    norm[s, clients] = torch.from_numpy(chunk.norm[came])
    new = memory.remember(state, fresh) | {"norm": norm}
    if isinstance(estimator, StaleVre):  # as after a round in which the client was drawn
        for name, value in (("beta", estimator.start), ("age", 0.0)):
            new[name] = state[name].clone()
            new[name][s, clients] = value
    return new
