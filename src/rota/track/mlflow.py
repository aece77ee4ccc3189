"""A run of MLflow, in the experiment "rota" of the store that MLFLOW_TRACKING_URI names.

Without that variable it is MLflow's own default, a database in the current folder.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rota.recipe.differences import flat
from rota.running.record import Record
from rota.track.numbers import kept, numbers

MOST = 100
"""MLflow takes this many parameters at once."""
LONGEST = 500
"""A longer value is cut off."""


class MLflow:
    """The configuration as parameters, the numbers of every round as metrics."""

    def __init__(self, folder: Path) -> None:
        for talkative in ("mlflow", "alembic"):  # their notes would disturb the progress line
            logging.getLogger(talkative).setLevel(logging.WARNING)
        self.folder = folder

    def begin(self, config: dict[str, Any]) -> None:
        self.client = MlflowClient()
        self.run = kept(self.folder / "mlflow.txt", self._create)
        self.client.update_run(self.run, status="RUNNING")
        known = self.client.get_run(self.run).data.params
        told = {_name(key): str(value)[:LONGEST] for key, value in flat(config).items()}
        # a parameter cannot change: a resumed run with more rounds says so in its folder
        new = [Param(key, value) for key, value in told.items() if key not in known]
        for start in range(0, len(new), MOST):
            self.client.log_batch(self.run, params=new[start : start + MOST])

    def _create(self) -> str:
        found = self.client.get_experiment_by_name("rota")
        if found is None:
            try:
                number = self.client.create_experiment("rota")
            except MlflowException:  # another run has just made it
                found = self.client.get_experiment_by_name("rota")
        number = found.experiment_id if found is not None else number
        tags = {"folder": str(self.folder.resolve())}
        made = self.client.create_run(number, run_name=self.folder.resolve().name, tags=tags)
        return str(made.info.run_id)

    def round(self, record: Record) -> None:
        now, step = int(time.time() * 1000), record["round"]
        told = numbers(record).items()
        metrics = [Metric(_name(key), value, now, step) for key, value in told]
        self.client.log_batch(self.run, metrics=metrics)

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        stopped = "KILLED" if isinstance(ended, KeyboardInterrupt) else "FAILED"
        status = stopped if isinstance(ended, BaseException) else "FINISHED"
        self.client.set_terminated(self.run, status)


def _name(name: str) -> str:
    """A name in the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
