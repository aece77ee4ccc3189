"""The checks before the first round. Every mistake is one sentence that says what to change."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch

import rota
from rota.data import fit
from rota.data.federation import Federation
from rota.data.roster import Roster
from rota.errors import BadInput, first_line
from rota.estimate import SERVERS, Correcting, Expecting, Recalling, Server
from rota.experiment import Experiment
from rota.files import filename
from rota.hints import called, check_fields, shown
from rota.metrics import check as check_metrics
from rota.plan import Task
from rota.policies import KINDS, Watching
from rota.running.record import same_score
from rota.sampling import asks
from rota.scores import top1
from rota.world.availability import Availability

LARGE = 1e30
"""The most that a learning rate or a factor may be: sums with it have to be floats, too."""
LONGEST = 200
"""The most bytes of a model's file name: file systems take 255, with what is added to it."""


def check(experiment: Experiment) -> None:
    """Raise BadInput for the first mistake found."""
    check_kinds(experiment)
    check_types(experiment)
    by_accuracy = all(task.score is top1 for task in experiment.tasks)
    numbers = vars(experiment)
    if not by_accuracy:  # then a target may be any number
        numbers = {key: value for key, value in numbers.items() if key != "target"}
    check_numbers("", numbers)
    check_names(experiment)
    if experiment.target is not None and not same_score(experiment.tasks):
        raise BadInput(
            "target is one number for all models, but the tasks have different scores: leave "
            "target out, or give all tasks the same score"
        )
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        check_numbers(f"task '{name}': ", vars(task))
        times = len(task.lr_steps) or experiment.rounds - 1
        if math.log(task.lr) + times * math.log(task.lr_decay) > math.log(LARGE):
            raise BadInput(f"task '{name}': lr_decay is {task.lr_decay:g}: lr grows too large")
    fit.check_sizes(experiment.tasks, experiment.names)
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        if isinstance(task.data, Federation):
            fit.check(task, name, f"task '{name}'" if len(experiment.tasks) > 1 else "")
    check_clients(experiment.tasks, experiment.names)
    for policy in experiment.policies.values():
        if hasattr(policy, "check"):
            policy.check()
        for task, name in zip(experiment.tasks, experiment.names, strict=True):
            if hasattr(policy, "check_task"):
                policy.check_task(task, name)
    check_server(experiment.server)
    check_together(experiment)
    check_metrics(experiment.metrics, experiment.sampler, experiment.shares, experiment.rounds)


SELDOM = 1e-3
"""Warn if fewer clients than this are expected to be reached in the whole run ..."""
TINY = 1e-12
"""... and if a learning rate is smaller than this."""


def warn(experiment: Experiment) -> None:
    """Warn about what is allowed, but rarely intended."""
    say = logging.getLogger("rota").warning
    availability, clients = experiment.availability, experiment.shares.shape[1]
    chance = getattr(availability, "chance", 1.0)
    if isinstance(availability, Availability) and chance * clients * experiment.rounds < SELDOM:
        say(
            f"availability.chance is {chance:g}: with {clients} clients and {experiment.rounds} "
            "rounds hardly any client can ever be reached"
        )
    lr = getattr(experiment.server, "lr", 1.0)
    if isinstance(lr, float | int) and 0 < lr < TINY:
        say(f"server.lr is {lr:g}: the models will not change")
    for task, name in zip(experiment.tasks, experiment.names, strict=True):
        if task.lr < TINY:
            say(f"task '{name}': lr is {task.lr:g}: its model will not change")
        if task.steps is not None and task.epochs != 1:
            say(
                f"task '{name}' has steps and epochs: steps ({task.steps}) decides, and epochs "
                f"({task.epochs}) is not used"
            )


def check_kinds(experiment: Experiment) -> None:
    """Tasks are tasks, and every policy has the methods of its kind."""
    tasks = experiment.tasks
    if not isinstance(tasks, list | tuple) or not all(isinstance(task, Task) for task in tasks):
        raise BadInput("tasks are a list of rota.Task: give one, such as [rota.Task(model, data)]")
    if not tasks:
        raise BadInput("there is no task: give at least one")
    for name, kind in KINDS.items():
        policy = experiment.policies[name]
        able = all(hasattr(policy, method) for method in kind.methods)
        if isinstance(policy, type) or not able:
            member = kind.members[kind.default]
            public = member.__name__ in rota.__all__
            home = "rota" if public else ".".join(member.__module__.split(".")[:2])
            example = f"{home}.{member.__name__}()"
            raise BadInput(f"{name} is {shown(policy)}: give an object such as {example}")
    if not isinstance(experiment.target, float | int | None):
        raise BadInput(f"target is {experiment.target!r}: it must be one number, for all models")


def check_types(experiment: Experiment) -> None:
    """Every field holds what its type hint says; a recipe's always do."""
    check_fields("", experiment)
    for kind, policy in experiment.policies.items():
        check_fields(f"{kind}.", policy)
    tasks = experiment.tasks
    # a task without a name is named after its data
    named = all(isinstance(task.data, Federation | Roster) for task in tasks)
    for task, name in zip(tasks, experiment.names if named else range(len(tasks)), strict=True):
        check_fields(f"task '{name}': ", task)
        if isinstance(task.data, Federation):  # a roster checks itself
            check_fields(f"task '{name}': data.", task.data)


def check_names(experiment: Experiment) -> None:
    """No two tasks have the same name, and every name can name a file."""
    for names in ([task.name for task in experiment.tasks if task.name], experiment.names):
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise BadInput(f"two tasks share the name '{twice}': give each task its own name")
    for name in experiment.names:
        if len(filename(name)) > LONGEST:
            raise BadInput(
                f"the task's name {shown(name)} is too long for a file's name: give it a shorter "
                "name"
            )


def check_numbers(prefix: str, values: Mapping[str, Any]) -> None:
    """The numbers of an experiment, a task or a server; `prefix` goes before their names."""
    for key in ("rounds", "evaluate", "batch", "epochs", "steps", "lr_cosine"):
        if isinstance(value := values.get(key), Integral) and int(value) < 1:
            raise BadInput(f"{prefix}{key} is {value}: it must be at least 1")
    if values.get("lr_steps") and values.get("lr_decay") == 1:
        raise BadInput(
            f"{prefix}lr_steps is given, but lr_decay is 1: set lr_decay, for example to 0.1"
        )
    for key in ("lr", "lr_decay", "lr_local_decay", "clip"):
        if (value := values.get(key)) is not None and not 0 < value <= LARGE:
            raise BadInput(f"{prefix}{key} is {value}: it must be above 0 and at most {LARGE:g}")
    for key in ("prox", "weight_decay", "eps", "lr_warmup"):
        if (value := values.get(key)) is not None and not 0 <= value <= LARGE:
            raise BadInput(f"{prefix}{key} is {value}: it must be at least 0, at most {LARGE:g}")
    for key in ("momentum", "beta1", "beta2"):
        if (value := values.get(key)) is not None and not 0 <= value < 1:
            raise BadInput(f"{prefix}{key} is {value}: it must be at least 0 and below 1")
    if values.get("nesterov") and not values.get("momentum"):
        raise BadInput(
            f"{prefix}nesterov is true, but momentum is 0: set momentum, for example to 0.9"
        )
    target = values.get("target")
    if target is not None and not 0 < target <= 1:
        raise BadInput(
            f"{prefix}target is {target:g}: it must be an accuracy above 0 and at most 1 "
            "(97 % is 0.97)"
        )


def check_clients(tasks: list[Task], names: list[str]) -> None:
    """All tasks have the same clients; with a single task, each client has data."""
    counts = [task.roster.clients for task in tasks]
    if len(set(counts)) > 1:
        have = [f"'{name}' {count}" for name, count in zip(names, counts, strict=True)]
        have[0] = f"'{names[0]}' has {counts[0]} clients"
        raise BadInput(
            f"task {', '.join(have)}: all tasks of a run must have the same clients, so set "
            "partition.clients to the same number"
        )
    for task, name in zip(tasks, names, strict=True):
        if not task.roster.sizes.any():
            raise BadInput(f"task '{name}': no client has training examples: give at least one")
    empty = np.flatnonzero(tasks[0].roster.sizes == 0)
    if len(tasks) == 1 and len(empty):
        raise BadInput(
            f"client {empty[0]} has no training examples ({len(empty)} of {counts[0]} clients have "
            "none): leave such clients out, or lower partition.missing"
        )


def check_together(experiment: Experiment) -> None:
    """The sampler and the estimator work together."""
    sampler, estimator = experiment.sampler, experiment.estimator
    mine = f"'{called(estimator, KINDS['estimator'].members)}'"
    other = f"'{called(sampler, KINDS['sampler'].members)}'"
    asked = asks(sampler, experiment.shares, experiment.rounds)
    if getattr(estimator, "fits", False) and asked != "norm":
        raise BadInput(
            f"the estimator {mine} needs the norms of all clients: use a sampler that asks for "
            "them, such as mmfl-gvr"
        )
    if asked == "expected" and not isinstance(estimator, Expecting):
        raise BadInput(
            f"the sampler {other} draws by the norms that an estimator expects, and {mine} "
            "cannot tell them: use stale-vre"
        )
    if experiment.units and not getattr(estimator, "parts", False):
        raise BadInput(
            f"the estimator {mine} works on whole models only: use unbiased or fedavg, or leave "
            "capacity out"
        )
    if experiment.units and isinstance(sampler, Watching):
        raise BadInput(
            f"the sampler {other} compares whole updates: use another one, or leave capacity out"
        )
    sgd = all(
        task.optimizer == "sgd" and not task.momentum and task.lr_local_decay == 1
        for task in experiment.tasks
    )
    if getattr(estimator, "plain_sgd", False) and not sgd:
        raise BadInput(
            f"the estimator {mine} is made for plain SGD: set optimizer to 'sgd', momentum to 0 "
            "and lr_local_decay to 1, or use another estimator"
        )
    measured = any(isinstance(each, str) for each in experiment.metrics)
    if measured and isinstance(estimator, Correcting | Recalling):
        raise BadInput(
            f"metrics measure the updates themselves, but the estimator {mine} weighs something "
            "else: leave metrics out"
        )


def check_server(server: Server) -> None:
    """The numbers of rota's own optimisers; another one is tried on one step of zeros."""
    if isinstance(server, tuple(SERVERS.values())):
        check_numbers("server.", vars(server))
    try:
        server.step(torch.zeros(1), torch.zeros(1), {})
    except ValueError as error:
        raise BadInput(f"server: {first_line(error)}") from error
