"""The round. Read this first.

    groups  = who learns with whom                   regroup
    shares  = who has what, and can be reached       availability.step
    plan    = who trains what                        sampler.ask, sampler.draw
    chunks  = what came back, as it comes            engine.train, admit
    models  = models - estimate of the full update   estimator, server
    state   = what the next round decides from       observe

`State` (experiment.py) is everything that a run remembers, so a checkpoint is a State, and resuming
is `play` from it. Every random number is addressed by (seed, purpose, round, client, task), so
nothing depends on how far a generator has been used.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota import plan as nouns
from rota import rng
from rota.admission import admit
from rota.engine import Engine
from rota.estimate import Estimate, Server
from rota.experiment import Experiment, State
from rota.grouping.gets import gets
from rota.grouping.regroup import regroup
from rota.metrics import Meter
from rota.metrics.own import own
from rota.personal.home import Home
from rota.plan import Job, Model, Plan, Seen, checked
from rota.policies import KINDS, Observing, Opening, Watching, sees, speaks
from rota.probe import Setting, price, probe, whole_times
from rota.running.record import Record, record, same_score
from rota.submodel.parts import hold
from rota.weights import Weights


def begin(experiment: Experiment, engine: Engine) -> State:
    """The state before the first round."""
    models = [each for each in engine.initial() if each.task < len(experiment.tasks)]
    opening = Opening(experiment, models, experiment.shares, experiment.rounds)
    states = {k: kind.begin(experiment.policies[k], opening) for k, kind in KINDS.items()}
    return State(0, opening.models, opening.shares, states)


def play(
    experiment: Experiment, engine: Engine, state: State, meter: Meter | None = None
) -> tuple[State, Record]:
    """One round: the new state, and the round's record, with what `meter` measures."""
    state, toll = regroup(experiment, engine, state)
    now, sampler, estimator = state.round + 1, experiment.sampler, experiment.estimator
    new = dict(state.policies)
    shares, new["availability"] = experiment.availability.step(
        new["availability"], state.shares, experiment.seed, now
    )
    if hasattr(engine, "late"):  # a memory learns from replies that came after their rounds
        new["estimator"] = engine.late(estimator, new["estimator"])
    rates = np.array([experiment.tasks[model.task].lr_at(now) for model in state.models])
    pace = rates / rates.max()
    held = hold(
        experiment.policies, experiment.units, state.models, state.shares, new, experiment.seed, now
    )
    shares = shares if held is None else held.present(shares)
    setting = Setting(
        engine, estimator, state.models, now, experiment.seed, pace, held, experiment.channel
    )
    new["sampler"], new["estimator"], asked = probe(
        setting, sampler, new["sampler"], shares, new["estimator"]
    )
    memory = new["sampler"]
    generator = rng.generator(rng.key(experiment.seed, "draw", now))
    plan = checked(sampler.draw(memory, shares, generator), shares)

    job = toll.rest(setting.job(plan, new["estimator"], asked), asked)
    plan = job.plan
    home = Home(experiment, engine, new["personal"])
    seen, sums = collect(experiment, home, job, new)
    new["personal"] = home.kept()
    estimates, new["estimator"] = estimator.finish(new["estimator"], sums)
    models, new["server"] = apply(experiment.server, job, seen, estimates, new["server"])
    timed = whole_times(plan, seen, asked, len(models))
    for kind, policy in experiment.policies.items():
        if speaks(policy, Observing):
            new[kind] = policy.observe(new[kind], shares, plan, timed.only(sees(policy)))

    cost = price(plan, seen, asked)
    after = State(
        round=now,
        models=models,
        shares=state.shares,
        policies=new,
        seconds=state.seconds + cost.seconds,
        bytes_up=state.bytes_up + cost.bytes_up,
        bytes_down=state.bytes_down + cost.bytes_down,
    )
    totals = {
        "seconds": after.seconds,
        "client_seconds": cost.client_seconds + toll.cost.client_seconds,
        "bytes_up": after.bytes_up,
        "bytes_down": after.bytes_down,
        "server_bytes": after.nbytes,
        **toll.told,
        **(meter(memory, shares, state.models, now) if meter else {}),
    }
    scores = None
    if now % experiment.evaluate == 0 or now == experiment.rounds:
        with rng.addressed(rng.key(experiment.seed, "evaluate", now)):
            totals |= own(experiment, models, now)
            scores = replace(home, state=new["personal"]).scores(models, state.shares, now)
    names, alike = experiment.models(models), same_score(experiment.tasks)
    totals |= gets(names, state.shares, scores, alike)
    return after, record(now, names, plan, seen, scores, totals, asked, alike)


def collect(
    experiment: Experiment, home: Home, job: Job, states: dict[str, nouns.State]
) -> tuple[Seen, Any]:
    """Train the job's rows; returns what the server saw, and the estimator's sums.

    The new states of admission and of policies that watch are put into `states`.
    """
    plan, estimator, admission = job.plan, experiment.estimator, experiment.admission
    pace = np.array([experiment.tasks[model.task].lr_at(job.now) for model in job.models])
    seen = Seen.nothing(len(plan), pace=(pace / pace.max())[plan.model])
    watchers = {k: p for k, p in experiment.policies.items() if speaks(p, Watching)}
    watched = {kind: policy.watch(states[kind], job) for kind, policy in watchers.items()}
    sums = estimator.begin(states["estimator"], [model.weights for model in job.models], plan)
    for reply in home.train(job):
        most = admission.limit(states["admission"], reply.model)
        chunk = admit(reply, job, seen, most)
        if chunk is None:
            continue
        seen.add(chunk, estimator.add(sums, plan, chunk))
        norms = chunk.norm[chunk.ok]
        states["admission"] = admission.learn(states["admission"], chunk.model, norms)
        for kind, policy in watchers.items():
            policy.see(watched[kind], job, chunk)
    for kind, policy in watchers.items():
        states[kind] = policy.learn(states[kind], watched[kind])
    return seen, sums


def apply(
    server: Server, job: Job, seen: Seen, estimates: list[Estimate], memory: nouns.State
) -> tuple[list[Model], nouns.State]:
    """Take one server step per model; a model without an estimate stays as it is.

    `memory` has every model's moments under "s.name". A step that would make a model or a moment
    infinite is not taken, and the row with the largest weighted update becomes the failed one.
    """
    models, after = [], dict(memory)
    for s, (model, (update, buffers, owned)) in enumerate(zip(job.models, estimates, strict=True)):
        if update is not None:
            start = f"{s}."
            mine = {k.removeprefix(start): v for k, v in memory.items() if k.startswith(start)}
            params, moments = server.step(model.params, update, mine)
            if owned is not None:  # what nobody held stays as it is, and so do its moments
                params = torch.where(owned, params, model.params)
                moments = {k: keep(owned, v, mine.get(k)) for k, v in moments.items()}
            if all(map(finite, [params, *moments.values()])):
                new = old = model.buffers  # of a mask, and of what cannot be averaged
                if buffers is not None and len(old):
                    new = torch.where(buffers.isfinite(), buffers, old)
                model = replace(model, weights=Weights(params, new))
                after |= {start + name: value for name, value in moments.items()}
            else:
                blame(job.plan, seen, s)
        models.append(model)
    return models, after


def keep(owned: Tensor, moment: Tensor, before: Tensor | None) -> Tensor:
    """A moment of which only the owned scalars change; it was 0 in the beginning."""
    if moment.shape != owned.shape:
        return moment
    return torch.where(owned, moment, torch.zeros_like(moment) if before is None else before)


def finite(values: Tensor) -> bool:
    """Whether all numbers are finite; if their sum is, they are."""
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())


def blame(plan: Plan, seen: Seen, model: int) -> None:
    """Fail the row of a model whose weighted update was the largest."""
    rows = np.flatnonzero(seen.ok & (plan.model == model))
    if len(rows):
        worst = rows[np.argmax(np.abs(plan.weight[rows]) * seen.norm[rows])]
        seen.reason[worst] = "with this update the server's step was not finite"
        seen.norm[worst] = seen.loss[worst] = np.nan
    logging.getLogger("rota").warning("model %d: a step that was not finite was not taken", model)
