"""Nine nodes in three partitions of MNIST: what `selective` and `complexity` have in common.

The seeds of a part train as the tasks of one run, which costs a GPU little more than one seed does.
Each seed has its own data, first weights and mini-batches, and these are the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from torch import nn

import rota
from rota.data import partition
from rota.data.federation import Examples, Federation, Partition, federate
from rota.data.mnist import read
from rota.estimate import FedAvg
from rota.grouping.gets import over
from rota.running.record import Record, tested
from rota.sampling import Full
from rota.world.devices import Devices
from rota_lab.reproduce.parts import Found

NODES = 9
THIRDS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@dataclass(frozen=True)
class Data:
    """Which data a part needs: the percentage of balanced data, or all data on one node.

    There is one federation for each of `seeds` seeds, from `first` on.
    """

    source: str
    balance: int
    central: bool
    seeds: int
    validation: int = 10_000
    first: int = 0


@dataclass(frozen=True)
class Work:
    """The local work of the nodes and the number of rounds, which the paper does not give."""

    lr: float
    rounds: int
    batch: int = 32
    epochs: int = 1


@cache
def images() -> tuple[Examples, Examples]:
    """MNIST, which is read once."""
    return read()


def load(data: Data) -> list[Federation]:
    """One federation per seed."""
    return [_federation(data, data.first + k) for k in range(data.seeds)]


def _federation(data: Data, seed: int) -> Federation:
    split: Partition = partition.three_way(data.balance / 100, NODES)
    if data.central:
        split = partition.iid(1)
    options = {"matched_test": not data.central, "validation": data.validation, "seed": seed}
    if data.source == "digits":
        return rota.data.digits(split, **options)  # type: ignore[arg-type]
    return federate("mnist", *images(), split, classes=10, **options)  # type: ignore[arg-type]


def play(
    model: Callable[..., nn.Module],
    data: Mapping[str, tuple[Federation, float]],
    work: Work,
    grouping: Any,
    device: str,
    precision: str,
    tests: int = 1,
    devices: Devices | None = None,
    seed: int = 0,
) -> Found:
    """Train on several federations at once, each with its learning rate: the numbers of each.

    The models are tested `tests` times, after equal numbers of rounds. `seed` is the run's.
    """
    tasks = [
        rota.Task(model, data=each, lr=lr, batch=work.batch, epochs=work.epochs, name=name)
        for name, (each, lr) in data.items()
    ]
    run = rota.run(
        tasks,
        Full(),
        estimator=FedAvg(),
        grouping=grouping,
        rounds=work.rounds,
        evaluate=max(1, work.rounds // tests),
        devices=devices,
        seed=seed,
        device=device,
        precision=precision,
    )
    told = [record for record in run.records if tested(record)]
    curves = {name: [_numbers(record, name) for record in told] for name in data}
    return {
        "runs": {name: curve[-1] for name, curve in curves.items()},
        **({"curves": curves} if tests > 1 else {}),
        "rounds": [record["round"] for record in told],
        "bytes": (run.state.bytes_up + run.state.bytes_down) / len(tasks),
        "client_seconds": run.summary["client_seconds"] / len(tasks),
        "virtual_seconds": run.state.seconds / len(tasks),
    }


def _numbers(record: Record, name: str) -> Found:
    """What the nodes of one task get. Everybody trains, so a model's cohort is its group."""
    groups_of = [name, *(f"{name}.{g}" for g in range(NODES))]
    mine = [model for model in groups_of if record["cohort"].get(model)]
    members = [record["cohort"][model] for model in mine]
    accuracies = [record["models"][model]["accuracy"] for model in mine]
    found: Found = {"shared": float(np.average(accuracies, weights=list(map(len, members))))}
    groups = record.get("groups_of_clients", {})
    own = [list(groups[model].get("own", {}).values()) for model in mine if model in groups]
    found |= over(np.array([value for values in own for value in values]))
    return found | {"groups": len(members), "recovered": sorted(members) == THIRDS}
