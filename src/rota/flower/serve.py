"""A server: a SuperLink, and rota's loop on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rota import recipe
from rota.data.federation import Federation
from rota.data.folder import SHARED, in_order, pair_of, read
from rota.data.roster import Roster
from rota.engine import Engine, Options
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.files import write
from rota.flower import keys as made
from rota.flower.engine import Remote, await_clients, refuse_simulated, stand_in
from rota.flower.fleet import Fleet, Rules
from rota.flower.present import Present
from rota.flower.superlink import installed, started

Config = dict[str, Any]


@contextmanager
def fleet_at(
    listen: str,
    keys: Path | None = None,
    insecure: bool = False,
    rules: Rules | None = None,
    database: Path | None = None,
) -> Iterator[Fleet]:
    """A SuperLink that nodes reach at `listen`, and the fleet that meets there."""
    installed()
    known = made.known(keys) if keys else []
    with started(listen, keys, insecure, database) as door:
        from rota.flower.link import Link

        link = Link(door, known)
        try:
            yield Fleet(link, rules or Rules())
        finally:
            link.close()


class Meeting:
    """Makes the engine for a fleet that has met; `tests` are the server's own test examples."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.tests = fleet, list[Federation]()

    def make(self, experiment: Experiment, options: Options) -> Engine:
        """The engine for an experiment."""
        return Remote(experiment, self.fleet, options, self.tests)

    def build(self, config: Config, clients: int, seconds: float, file: Path) -> Experiment:
        """The experiment of a resolved recipe, once its clients are there.

        Data in a folder are the clients' own: of the folder, the server reads test.npz alone, and
        the run is with all clients that have come when there are `clients`. They are written to a
        file, and a resumed run has the same. With other data the fleet rehearses: it must hold
        the clients that the recipe describes.
        """
        drift, personal = (config.get(kind, {}) for kind in ("drift", "personal"))
        refuse_simulated(personal.get("name", "none"), drift.get("every"))
        own = [table["data"]["name"] == "folder" for table in config["task"]]
        if not any(own):
            experiment = recipe.build(config)
            self.fleet.tasks = experiment.names
            await_clients(self.fleet, list(experiment.tasks[0].roster.ids), seconds)
            return self.watched(experiment)
        if not all(own):
            raise BadInput("some tasks have data in a folder, and some have not: use one kind")
        tests = [_test(table["data"]) for table in config["task"]]
        drafts = [recipe.task_of(*each) for each in zip(config["task"], tests, strict=True)]
        self.fleet.tasks = Experiment(drafts).names
        rosters = self._rosters(tests, clients, seconds, file)
        tasks = [replace(task, data=own) for task, own in zip(drafts, rosters, strict=True)]
        self.tests = [
            replace(test, train=replace(test.train, offsets=np.zeros(own.clients + 1, np.int64)))
            for test, own in zip(tests, rosters, strict=True)
        ]
        return self.watched(recipe.build(config, tasks))

    def watched(self, experiment: Experiment) -> Experiment:
        """The experiment, in which only clients that can be reached are drawn."""
        ids = experiment.tasks[0].roster.ids
        return experiment.using(availability=Present(experiment.availability, self.fleet, ids))

    def _rosters(
        self, tests: list[Federation], clients: int, seconds: float, file: Path
    ) -> list[Roster]:
        """Each task's roster: who has come, or who took part before."""
        if file.exists():
            before = json.loads(file.read_text())
            ids, sizes = before["ids"], before["sizes"]
            await_clients(self.fleet, ids, seconds)
        else:
            home = self.fleet.home
            if not self.fleet.wait(lambda: len(home) >= clients, seconds):
                raise BadInput(
                    f"{len(home)} of {clients} clients have come within {seconds:.0f} seconds: "
                    "start more with `rota client`, or ask for fewer with --clients"
                )
            ids = sorted(home, key=lambda name: in_order(Path(name)))
            found = [self.fleet.sizes(t) for t in range(len(tests))]
            sizes = [[each.get(name, 0) for name in ids] for each in found]
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, json.dumps({"ids": ids, "sizes": sizes}))
        return [
            Roster(test.name, np.array(each, np.int64), test.shape, test.classes, ids)
            for test, each in zip(tests, sizes, strict=True)
        ]


def _test(table: Config) -> Federation:
    """The server's test examples, in a federation without clients."""
    root = Path(table["path"]).expanduser()
    file = root / SHARED
    if not file.is_file():
        raise BadInput(f"{file} is missing: put the server's test examples there, as x and y")
    x, y = (torch.from_numpy(each) for each in pair_of(file, read(file, 0.0), "x", "y"))
    classes = table.get("classes")
    if classes is None:
        classes = 0 if y.is_floating_point() else int(y.max()) + 1
    return stand_in(root.resolve().name, (x, y), classes)
