"""A node's worker: a process with torch and the data, which its transport may kill and restart.

It reads requests from a pipe, and answers each one. `answer` is all that it does; it needs no
Flower.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.channel import address
from rota.data.memory import total as all_memory
from rota.engine.machine import cores
from rota.engine.nested import NESTED
from rota.engine.sequential import Sequential
from rota.errors import BadInput, what_and_where
from rota.flower import lean, spec, store
from rota.flower.codec import pack, unpack, vector
from rota.flower.letter import LOSSES, OWN, VERSION, Letter, Refused, number, read_head
from rota.plan import Duty, Job, Local, Model, Plan, Task
from rota.submodel.cut import Cut, SubModel, keep
from rota.submodel.units import Units, find_units
from rota.weights import Weights
from rota.world.devices import Profile

COPIES = 8
"""Training takes about this many copies of a model: itself, its gradient, moments, the reply."""
PARENT_DEATH = 1
"""Linux's PR_SET_PDEATHSIG."""
MOST = 10_000_000
"""The most clients of a run."""


@dataclass
class Built:
    """What a node keeps of an experiment: the engine, and each task's units."""

    engine: Sequential
    units: dict[int, Units] = field(default_factory=dict)


@dataclass
class Work:
    """What a worker works with."""

    folder: Path
    allow: tuple[str, ...] = ()
    memory: float = field(default_factory=all_memory)
    """The most bytes that training may take."""
    built: dict[str, Built] = field(default_factory=dict)

    def answer(self, letter: Letter) -> Letter:
        """Answer a letter; Refused says why not."""
        try:
            if letter.kind == "query":
                return self._query(letter.head)
            if letter.kind == "train":
                return self._train(letter)
            if letter.kind == LOSSES:
                return self._losses(letter)
        except BadInput as mistake:
            raise Refused(str(mistake)) from mistake
        except Refused:
            raise
        except Exception as error:  # a network or a loss may raise anything
            raise Refused(what_and_where(error)) from error
        raise Refused(f"this client does not know the kind of letter {letter.kind!r:.40}")

    def _query(self, head: dict[str, Any]) -> Letter:
        """Who is here, with how many examples of each task, and how strong the machine is."""
        tasks = _texts(head, "tasks")
        found = store.sizes(self.folder, tasks)
        machine = {"memory": min(self.memory, 1e18), "cores": cores(), "gflops": _speed()}
        return Letter("reply", {"version": VERSION, "clients": found, **machine})

    def _train(self, letter: Letter) -> Letter:
        began = time.perf_counter()
        channel = spec.rebuild_channel(letter.head.get("channel"), self.allow)
        built, job, rows = self._job(letter)
        told, out = [], dict[str, Tensor]()
        last = time.perf_counter()
        for chunk in built.engine.train(job):
            now = time.perf_counter()
            row = rows[int(chunk.rows[0])]
            told.append(
                {
                    "row": row,
                    "loss": float(chunk.loss[0]),
                    "steps": int(chunk.steps[0]),
                    "examples": int(chunk.examples[0]),
                    "lr": chunk.lr,
                    "reason": chunk.reason[0],
                    "computing": now - last,
                }
            )
            if not chunk.reason[0]:
                sent = {"whole": chunk.update[0]}
                if channel is not None:
                    stream = address(job, built.engine.seed, int(chunk.rows[0]))
                    sent = channel.encode(chunk.update[0], stream)
                out |= {f"update.{row}.{key}": value for key, value in sent.items()}
                out[f"buffers.{row}"] = chunk.buffers[0]
            last = time.perf_counter()
        head = {
            "version": VERSION,
            "round": job.now,
            "rows": told,
            "seconds": time.perf_counter() - began,
        }
        return Letter("reply", head, {OWN: pack(out)})

    def _losses(self, letter: Letter) -> Letter:
        most = letter.head.get("examples")
        if most is not None and (not _whole(most) or most < 1):
            raise Refused("'examples' is not a number from 1 on")
        built, job, rows = self._job(letter)
        models = list(job.models)
        for place, s in enumerate(job.plan.model.tolist()):  # losses are of whole models
            assert job.local.start is not None
            params, buffers = job.local.start(np.array([place]))
            models[s] = replace(models[s], weights=Weights(params[0], buffers[0]))
        job = replace(job, models=models)
        began = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            seen = built.engine.losses(job, most)
        seconds = (time.perf_counter() - began) / max(1, len(rows))
        told = [
            {
                "row": row,
                "loss": float(seen.loss[place]),
                "examples": int(seen.examples[place]),
                "reason": seen.reason[place],
                "computing": seconds,
            }
            for place, row in enumerate(rows)
        ]
        return Letter("reply", {"version": VERSION, "round": job.now, "rows": told})

    def _job(self, letter: Letter) -> tuple[Built, Job, list[int]]:
        """The job that a letter describes, and its rows' numbers on the server."""
        head = letter.head
        now, seed, clients = (_number(head, key) for key in ("round", "seed", "clients"))
        if now < 1 or clients < 1 or clients > MOST:
            raise Refused("the round or the number of clients is wrong")
        mine, tasks = _table(head, "mine"), _list(head, "tasks")
        if not all(_whole(each) and 0 <= each < clients for each in mine.values()):
            raise Refused("a client's number is wrong")
        built = self._build(tasks, mine, clients, seed)
        rows, models = _list(head, "rows"), _list(head, "models")
        if not all(_whole(task) and 0 <= task < len(tasks) for task in models):
            raise Refused("a model is of an unknown task")
        first = built.engine.initial()
        held = [first[task] for task in models]
        cuts = tuple(self._cut(built, held, each) for each in _list(head, "cuts"))
        plan, numbers = _plan(rows, mine, len(models), cuts)
        owns = [
            bool(built.engine.tasks[models[s]].roster.sizes[c])
            for c, s in zip(plan.client.tolist(), plan.model.tolist(), strict=True)
        ]
        if not all(owns):
            raise Refused("a client is asked to train a task that it has no data for")
        duty = Duty(*np.ones((4, len(plan))))
        how = head.get("how")
        if how not in ("plain", *NESTED, "scaled"):
            raise Refused("how parts train is unknown")
        local = self._local(letter, held, plan, numbers)
        return built, Job(now, held, plan, duty, local, how=how), numbers

    def _build(self, told: list[Any], mine: dict[str, int], clients: int, seed: int) -> Built:
        """The engine for these tasks and clients; the last one is kept."""
        key = json.dumps([told, mine, clients, seed], sort_keys=True)
        if key not in self.built:
            self.built.clear()
            tasks = [self._task(each, mine, clients) for each in told]
            flops = [number(each.get("flops"), 0) for each in told]
            if not np.isfinite(flops).all():
                raise Refused("a task does not say what training it costs")
            # the engine's own idea of costs is not used: the row's time is measured
            pace = np.broadcast_to(np.ones(1), clients)
            lean.optimisers()
            profile = Profile(pace, pace, pace)
            engine = Sequential(tasks, profile, seed, torch.device("cpu"), flops=flops)
            self.built[key] = Built(engine)
        return self.built[key]

    def _task(self, told: Any, mine: dict[str, int], clients: int) -> Task:
        if not isinstance(told, dict):
            raise Refused("a task is not a table")
        shape, classes, dtype = told.get("shape"), told.get("classes"), told.get("dtype")
        sound = isinstance(shape, list) and all(_whole(n) and 0 < n < 1 << 24 for n in shape)
        if not sound or not _whole(classes) or classes < 0 or dtype not in spec.DTYPES:
            raise Refused("a task's shape, classes or dtype is wrong")
        assert isinstance(shape, list)
        if 16.0 * prod(shape) > self.memory:
            raise Refused("an example would not fit into this client's memory")
        assert isinstance(dtype, str)
        blank = store.federation(self.folder, "", {}, 1, (shape, dtype, classes))
        task = spec.rebuild(told, blank, self.allow)
        params, buffers = spec.params_of(task)
        needed = 4.0 * COPIES * (params + buffers)
        if needed > self.memory:
            raise Refused(
                f"the model of task '{task.name}' takes about {needed / 1e6:,.0f} MB to train, and "
                f"this client may use {self.memory / 1e6:,.0f} MB"
            )
        like = (shape, dtype, classes)
        data = store.federation(self.folder, task.name, mine, clients, like)
        return replace(task, data=data)

    def _cut(self, built: Built, models: list[Model], told: Any) -> SubModel:
        """A part of a model, from the units that it keeps."""
        if not isinstance(told, dict):
            raise Refused("a part of a model is not a table")
        s, kept, width = told.get("model"), told.get("kept"), told.get("width")
        sound = isinstance(width, float) and 0 < width < 1 and isinstance(kept, list)
        if not _whole(s) or not 0 <= s < len(models) or not sound:
            raise Refused("a part of a model is wrong")
        task = models[s].task
        if task not in built.units:
            module, x = built.engine.modules[task], built.engine.data[task][0]
            built.units[task] = find_units(module, x[:2])
        try:
            units = [np.array(each, np.int64) for each in kept or ()]
            cut: Cut = keep(built.units[task], units)
        except (TypeError, ValueError, OverflowError) as error:
            raise Refused(f"a part of a model is wrong ({error})") from error
        return SubModel(s, float(width or 1), 0.0, cut)

    def _local(self, letter: Letter, models: list[Model], plan: Plan, rows: list[int]) -> Local:
        """Where rows begin, what anchors them and what shifts their gradients."""
        own = unpack(letter.parts[OWN]) if letter.parts.get(OWN) else {}
        shared: dict[tuple[int, int], Weights] = {}

        def like(place: int) -> Weights:
            model, part = models[int(plan.model[place])].weights, plan.held(place)
            return model if part is None else part.of(model)

        def begin(place: int) -> Weights:
            name = f"start.{rows[place]}"
            if name in own:
                return Weights(
                    vector(own, name, like(place).params),
                    vector(own, f"buffers.{rows[place]}", like(place).buffers),
                )
            key = int(plan.model[place]), 0 if plan.cut is None else int(plan.cut[place])
            if key not in shared:
                tensors = unpack(letter.parts.get(f"model.{key[0]}.{key[1]}"))
                params, buffers = like(place)
                shared[key] = Weights(
                    vector(tensors, "params", params), vector(tensors, "buffers", buffers)
                )
            return shared[key]

        starts = [begin(place) for place in range(len(plan))]
        for params, _ in starts:
            if not torch.isfinite(params).all():
                raise Refused("the model is not finite")

        table: dict[str, Any] = {"start": lambda some: _wide(models, plan, some, starts)}
        for what in ("anchor", "shift"):
            names = [f"{what}.{row}" for row in rows]
            if any(name in own for name in names):
                given = zip(names, starts, strict=True)
                each = [Weights(vector(own, n, start.params), start.buffers) for n, start in given]
                table[what] = lambda some, each=each: _wide(models, plan, some, each).params
        return Local(**table)


def _wide(models: list[Model], plan: Plan, rows: Array, each: list[Weights]) -> Weights:
    """The weights of some rows, a line per row; those of parts at their places in the whole."""
    lines = []
    for row in rows.tolist():
        part, whole = plan.held(row), models[int(plan.model[row])].weights
        params, buffers = each[row]
        if part is not None:
            params = torch.zeros_like(whole.params).index_copy_(0, part.places, params)
            buffers = torch.zeros_like(whole.buffers).index_copy_(0, part.buffer_places, buffers)
        lines.append((params, buffers))
    return Weights(*map(torch.stack, zip(*lines, strict=True)))


def _plan(
    rows: list[Any], mine: dict[str, int], models: int, cuts: tuple[SubModel, ...]
) -> tuple[Plan, list[int]]:
    """The plan of a letter's rows, and their numbers on the server."""
    for row in rows:
        fine = isinstance(row, list) and len(row) == 4 and isinstance(row[1], str)
        if not fine or not all(_whole(n) for n in (row[0], row[2], row[3])):
            raise Refused("a row is wrong")
        if row[1] not in mine or not 0 <= row[2] < models or not 0 <= row[3] <= len(cuts):
            raise Refused("a row names a client, a model or a part that is unknown")
        if row[3] and cuts[row[3] - 1].model != row[2]:
            raise Refused("a row has a part of another model")
    client = np.array([mine[row[1]] for row in rows], np.int64)
    model, cut = (np.array([row[k] for row in rows], np.int64) for k in (2, 3))
    ones = np.ones(len(rows))
    plan = Plan(client, model, ones, ones, cut if cuts else None, cuts)
    return plan, [row[0] for row in rows]


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(head: dict[str, Any], key: str) -> int:
    value = head.get(key)
    if not _whole(value):
        raise Refused(f"'{key}' is not a whole number")
    return value


def _list(head: dict[str, Any], key: str) -> list[Any]:
    value = head.get(key)
    if not isinstance(value, list):
        raise Refused(f"'{key}' is not a list")
    return value


def _texts(head: dict[str, Any], key: str) -> list[str]:
    found = _list(head, key)
    if not all(isinstance(each, str) for each in found):
        raise Refused(f"'{key}' is not a list of texts")
    return found


def _table(head: dict[str, Any], key: str) -> dict[str, Any]:
    value = head.get(key)
    if not isinstance(value, dict):
        raise Refused(f"'{key}' is not a table")
    return value


def _speed() -> float:
    """GFLOP/s of a product of two matrices, measured for a moment."""
    matrix, best = torch.ones(256, 256), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return 2 * 256**3 / best / 1e9


def ends_with(parent: int) -> None:
    """End this process when its parent has ended, even by kill -9."""
    if sys.platform == "linux":  # also if this process is stopped, as one that plays a slow device
        ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answer what comes through the pipe, until its other end is closed."""
    options = json.loads(sys.argv[1])
    ends_with(options["parent"])
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    memory = options["memory"] or all_memory()
    work = Work(Path(options["folder"]), tuple(options["allow"]), memory)
    pipe = Connection(options["pipe"])
    pipe.send_bytes(b"ready")
    while True:
        try:
            kind, text = pipe.recv_bytes().decode(), pipe.recv_bytes().decode()
            names = json.loads(pipe.recv_bytes())
            parts = {name: pipe.recv_bytes() for name in names}
        except (EOFError, OSError):
            return
        try:
            reply = work.answer(Letter(kind, read_head(text), parts))
            out = (b"1", reply.text.encode(), reply.parts.get(OWN, b""))
        except Refused as why:
            out = (b"0", str(why).encode(), b"")
        try:
            for each in out:
                pipe.send_bytes(each)
        except OSError:
            return


if __name__ == "__main__":
    main()
