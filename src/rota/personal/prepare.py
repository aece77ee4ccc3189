"""What an engine is made for: a run's tasks, and what clients train for themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rota.data.federation import Federation
from rota.errors import BadInput
from rota.grouping import Ifca
from rota.hints import called
from rota.sampling import Asking, asks

if TYPE_CHECKING:
    from rota.experiment import Experiment


def prepared(experiment: Experiment) -> Experiment:
    """The experiment with the clients' own work as further tasks, which have no models of the run.

    Raises BadInput for what does not go together with personal models.
    """
    from rota.personal import PERSONALS, Nothing, Personal

    personal: Personal = experiment.policies["personal"]
    if isinstance(personal, Nothing):
        return experiment
    name = f"personal.name is '{called(personal, PERSONALS)}'"
    if experiment.units:
        raise BadInput(f"{name}, but clients may hold parts of models: leave out one of the two")
    for task, named in zip(experiment.tasks, experiment.names, strict=True):
        if not isinstance(task.data, Federation):
            raise BadInput(
                f"{name}, but task '{named}' has its data elsewhere: personal models are for "
                "simulations"
            )
        if task.data.shared_test:
            raise BadInput(
                f"{name}, but task '{named}' has one test set for all clients: set "
                "data.matched_test to true, so that each client has its own"
            )
    if experiment.policies["drift"].every is not None:
        raise BadInput(f"{name}, but drift.every is given: leave out one of the two")
    if personal.layers:
        _check_heads(experiment, name)
    further = [personal.work(task) for task in experiment.tasks]
    each = [
        replace(task, name=f"{named}, personal {number}")
        for number, works in enumerate(zip(*further, strict=True), start=1)
        for task, named in zip(works, experiment.names, strict=True)
    ]
    return replace(experiment, tasks=[*experiment.tasks, *each]) if each else experiment


def _check_heads(experiment: Experiment, name: str) -> None:
    """The server has no whole model that a client could try or send."""
    sampler = experiment.sampler
    asked = asks(sampler, experiment.shares, experiment.rounds)
    if isinstance(sampler, Asking) and asked != "expected":
        raise BadInput(
            f"{name}, but the sampler asks clients about a whole model, and heads stay with "
            "clients: use a sampler that asks nothing, such as uniform or kvib"
        )
    if isinstance(experiment.policies["grouping"], Ifca):
        raise BadInput(
            f"{name}, but ifca asks clients for losses of whole models, and heads stay with "
            "clients: use another grouping"
        )
    if experiment.channel is not None:
        raise BadInput(
            f"{name}, but channel encodes updates of whole models, and heads stay with clients: "
            "leave out one of the two"
        )
    if any(isinstance(each, str) for each in experiment.metrics):
        raise BadInput(
            f"{name}, but metrics measure updates of whole models, and heads stay with clients: "
            "leave out one of the two"
        )
