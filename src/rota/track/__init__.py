"""Trackers: watchers that write a run's numbers where other tools show them.

numbers.py      a round's record as plain numbers
tensorboard.py  TensorBoard's event files
mlflow.py       a run of MLflow, in a local database or on a server
wandb.py        a run of Weights & Biases, offline unless you choose otherwise
table.py        rounds.csv or rounds.parquet
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.errors import BadInput, did_you_mean

if TYPE_CHECKING:  # the command line names the trackers without loading torch
    from rota.running.record import Record
    from rota.running.watch import Watcher

__all__ = ["TRACKERS", "tracker"]

TRACKERS = {
    "tensorboard": "rota.track.tensorboard:TensorBoard",
    "mlflow": "rota.track.mlflow:MLflow",
    "wandb": "rota.track.wandb:WandB",
    "csv": "rota.track.table:as_csv",
    "parquet": "rota.track.table:as_parquet",
}
"""Name -> where its class is. Most need an extra of the same name: pip install 'rota[mlflow]'."""


def tracker(name: str, folder: str | Path) -> Watcher:
    """A watcher that tracks the run in this folder: `rota.run(..., watch=tracker("mlflow", out))`.

    A resumed run goes on where it was. If the tracker fails during the run, a warning says so and
    the run goes on without it.
    """
    if name not in TRACKERS:
        raise BadInput(f"unknown tracker '{name}': {did_you_mean(name, TRACKERS)}")
    module, _, attribute = TRACKERS[name].partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)(Path(folder))
    except ImportError as error:
        needs = f"the tracker '{name}' needs {error.name}"
        raise BadInput(f"{needs}: pip install 'rota[{name}]'") from error
    return Expendable(name, made)


class Expendable:
    """A watcher whose failure does not end the run, once it has begun."""

    def __init__(self, name: str, inner: Watcher) -> None:
        self.name, self.inner, self.lost = name, inner, False

    def begin(self, config: dict[str, Any]) -> None:
        self.inner.begin(config)

    def round(self, record: Record) -> None:
        self._try(self.inner.round, record)

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        self._try(self.inner.end, ended)

    def _try(self, call: Callable[[Any], None], news: Any) -> None:
        if self.lost:
            return
        try:
            call(news)
        except Exception as error:
            self.lost = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            logging.getLogger("rota").warning(
                f"the tracker '{self.name}' failed ({why:.200}): the run goes on without it"
            )
