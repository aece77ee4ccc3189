"""Evaluation: a model's loss and score on the shared test set, or on every client's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rota.data.federation import Array
from rota.plan import Task

BATCH = 1000


@dataclass(frozen=True)
class Score:
    """Means over the test examples; `by_client` is each client's own mean score where the clients have test sets (NaN: none)."""

    loss: float
    accuracy: float
    by_client: Array | None = None


@torch.no_grad()
def score_parts(task: Task, module: nn.Module, device: torch.device) -> Score:
    """Score a loaded module on the task's test part."""
    module.eval()
    test = task.data.test
    loss, hits = np.empty(len(test.y)), np.empty(len(test.y))
    for start in range(0, len(test.y), BATCH):
        rows = slice(start, start + BATCH)
        outputs, y = module(test.x[rows].to(device)), test.y[rows].to(device)
        loss[rows] = task.loss(outputs, y).double().cpu().numpy()
        hits[rows] = task.score(outputs, y).double().cpu().numpy()
    if task.data.shared_test:
        return Score(float(loss.mean()), float(hits.mean()))
    owners = np.repeat(np.arange(test.clients), test.sizes)
    with np.errstate(invalid="ignore"):
        by_client = np.bincount(owners, weights=hits, minlength=test.clients) / test.sizes
    return Score(float(loss.mean()), float(hits.mean()), by_client)
