"""The engine whose clients are other machines: it sends jobs as letters, and reads the replies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rota.admission import admit
from rota.channel import address
from rota.data.federation import Federation, Part
from rota.engine import nested, parts
from rota.engine.score import Score
from rota.engine.sequential import Sequential
from rota.errors import BadInput
from rota.estimate import FedVarp
from rota.estimate.memory import Tensors
from rota.flower import overdue, spec
from rota.flower.codec import pack, unpack, vector
from rota.flower.fleet import Answer, Ask, Fleet
from rota.flower.letter import LOSSES, OWN, VERSION, Letter, Refused, number, plain
from rota.grouping import One
from rota.hints import called
from rota.personal import PERSONALS
from rota.plan import Chunk, Costs, Job, Model, Seen
from rota.weights import Weights

if TYPE_CHECKING:
    from rota.engine import Options
    from rota.experiment import Experiment


COUNTED = 1e15
"""More steps than any client takes."""
PORTION = 16 << 20
"""A node with many clients replies in letters of about so many bytes, so that the server's memory
does not grow with the cohort."""
ROOM, LINE, TIMES = 8 << 20, 1000, 4
"""A reply has at most so many bytes; and more for each row, and its model so many times."""


class Remote:
    """Trains on the nodes of a fleet.

    What needs no client is done here by the reference engine: the first models, and the tests.
    """

    def __init__(
        self, experiment: Experiment, fleet: Fleet, options: Options, tests: Sequence[Federation]
    ) -> None:
        fleet.rules.check()
        personal = called(experiment.policies["personal"], PERSONALS)
        refuse_simulated(personal, experiment.policies["drift"].every)
        self.fleet, self.seed, self.stack = fleet, experiment.seed, ExitStack()
        pairs = zip(experiment.tasks, experiment.names, strict=True)
        self.tasks = [
            replace(task, name=name, data=tests[t] if tests else task.federation)
            for t, (task, name) in enumerate(pairs)
        ]
        self.ids = experiment.tasks[0].roster.ids
        profile = experiment.devices.profile(len(self.ids), self.seed)
        self.local = Sequential(self.tasks, profile, self.seed, options.device)
        costs = zip(self.tasks, self.local.flops, strict=True)
        self.told = [{**spec.tell(task, task.name), "flops": flops} for task, flops in costs]
        self.numbers = {name: i for i, name in enumerate(self.ids)}
        self.newest: dict[tuple[int, int], int] = {}
        """Each client's and model's last round with an update."""
        estimator, grouping = experiment.estimator, experiment.policies["grouping"]
        self.remembers = isinstance(estimator, FedVarp) and isinstance(grouping, One)

    def close(self) -> None:
        """Stop what was started for this engine."""
        self.stack.close()

    def initial(self) -> list[Model]:
        """The models before the first round, one per task."""
        return self.local.initial()

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        """The test losses and scores of all models, or of those with the numbers `which`."""
        return self.local.evaluate(models, which)

    def train(self, job: Job) -> Iterator[Chunk]:
        """Send the rows of a job to where their clients are, and give what comes back."""
        chunks = self._chunks(job)
        yield from in_order(chunks, len(job.plan)) if self.fleet.rules.ordered else chunks

    def _chunks(self, job: Job) -> Iterator[Chunk]:
        asks, absent = self._asks(job, "train", {})
        for row, why in absent:
            yield self._failed(job, row, why, 0)
        fine: dict[str, bool] = {}
        for answer in self.fleet.exchange(asks):
            for chunk in self._read(job, answer):
                client = int(job.plan.client[chunk.rows[0]])
                name, good = self.ids[client], not chunk.reason[0]
                fine[name] = fine.get(name, True) and good
                if good:
                    self.newest[client, chunk.model] = job.now
                yield chunk
        for name, good in fine.items():
            self.fleet.judge(name, good, job.now)

    def late(self, estimator: Any, state: Tensors) -> Tensors:
        """What an estimator with a memory knows, with the replies that came after their rounds."""
        answers, self.fleet.overdue = self.fleet.overdue, []
        for answer in answers if self.remembers else ():
            job = answer.ask.job
            if not isinstance(job, Job):
                continue
            for each in self._read(job, answer):
                chunk = admit(each, job, Seen.nothing(len(job.plan)))
                if chunk is None or not chunk.ok.all():
                    continue
                pair = int(job.plan.client[chunk.rows[0]]), chunk.model
                if self.newest.get(pair, 0) < job.now:
                    state = overdue.remember(estimator, state, job.plan, chunk)
                    self.newest[pair] = job.now
                    self.fleet.counts["remembered"] += 1
        return state

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        """Each row's mean loss over its client's training examples, or over some at random."""
        seen = Seen.nothing(len(job.plan))
        seen.examples[:] = 0
        job = replace(job, plan=replace(job.plan, cut=None, cuts=()))  # of whole models
        asks, absent = self._asks(job, LOSSES, {"examples": examples})
        for row, why in absent:
            seen.reason[row] = why
        for answer in self.fleet.exchange(asks):
            rows, up, down = answer.ask.rows, 0, answer.ask.nbytes // len(answer.ask.rows)
            seen.costs.down[rows] = down
            try:
                told = _rows(answer, job.now)
            except Refused as why:
                for row in rows.tolist():
                    seen.reason[row] = str(why)
                continue
            assert isinstance(answer.reply, Letter)
            up = answer.reply.nbytes // len(rows)
            for row, each in told.items():
                loss = number(each.get("loss"))
                computing = _computing(each, answer)
                seen.loss[row], seen.examples[row] = loss, number(each.get("examples"), 0)
                seen.reason[row] = "" if np.isfinite(loss) else "the loss is not finite"
                seen.costs.up[row], seen.costs.computing[row] = up, computing
                seen.costs.seconds[row] = answer.seconds / len(rows)
        seen.loss[~np.isfinite(seen.loss)] = np.nan
        return seen

    # --- what is asked

    def _asks(
        self, job: Job, kind: str, more: dict[str, Any]
    ) -> tuple[list[Ask], list[tuple[int, str]]]:
        """The nodes' letters, and the rows that nobody can be asked for."""
        self.fleet.refresh()
        groups: dict[int, list[int]] = {}
        absent = []
        for row, client in enumerate(job.plan.client.tolist()):
            why = self.fleet.absent(self.ids[client], job.now)
            if why:
                absent.append((row, why))
            else:
                groups.setdefault(self.fleet.home[self.ids[client]], []).append(row)
        shared: dict[tuple[int, int], bytes] = {}
        asks = []
        portions = [(n, some) for n, rows in groups.items() for some in portioned(job, rows, kind)]
        for node, rows in portions:
            names = [self.ids[client] for client in job.plan.client[rows].tolist()]

            def make(node: int, rows: list[int] = rows) -> Letter:
                return self._letter(job, kind, more, node, rows, shared)

            kept = job if kind == "train" and self.remembers else None
            asks.append(Ask(node, np.array(rows), names, make, kept))
        return asks, absent

    def _letter(
        self,
        job: Job,
        kind: str,
        more: dict[str, Any],
        node: int,
        rows: list[int],
        shared: dict[tuple[int, int], bytes],
    ) -> Letter:
        """What a node must know to train these rows."""
        plan, sent, own = job.plan, dict[str, bytes](), dict[str, Tensor]()
        used = sorted({int(plan.cut[row]) for row in rows} - {0}) if plan.cut is not None else []
        if job.how in nested.NESTED:  # mini-batches train narrower parts, too
            used = list(range(1, len(plan.cuts) + 1))
        place = {0: 0, **{k: i for i, k in enumerate(used, start=1)}}
        told = []
        for row in rows:
            s, k = int(plan.model[row]), 0 if plan.cut is None else int(plan.cut[row])
            told.append([row, self.ids[int(plan.client[row])], s, place[k]])
            one = np.array([row])
            if job.local.start is not None:
                params, buffers = parts.started(job, one, job.local.start)
                own[f"start.{row}"], own[f"buffers.{row}"] = params[0], buffers[0]
            else:
                if (s, k) not in shared:
                    shared[s, k] = _pack(job, s, k)
                sent[f"model.{s}.{place[k]}"] = shared[s, k]
            for what in ("anchor", "shift"):
                vectors = getattr(job.local, what)
                if vectors is not None:
                    own[f"{what}.{row}"] = parts.taken(plan, one, vectors(one))[0]
        mine = self.fleet.members.get(node, {})
        head = {
            "version": VERSION,
            "round": job.now,
            "seed": self.seed,
            "clients": len(self.ids),
            "tasks": self.told,
            "mine": {name: self.numbers[name] for name in mine if name in self.numbers},
            "models": [model.task for model in job.models],
            "cuts": [
                {
                    "model": plan.cuts[k - 1].model,
                    "width": plan.cuts[k - 1].width,
                    "kept": [each.tolist() for each in plan.cuts[k - 1].cut.kept],
                }
                for k in used
            ],
            "how": job.how,
            "rows": told,
            "channel": spec.tell_channel(job.channel) if kind == "train" else None,
            **more,
        }
        most = ROOM + sum(LINE + TIMES * job.models[int(plan.model[row])].nbytes for row in rows)
        return Letter(kind, head, {OWN: pack(own) if own else b"", **sent}, most)

    # --- what came back

    def _read(self, job: Job, answer: Answer) -> Iterator[Chunk]:
        """The rows of a reply; those that it should have, and does not, are failed rows."""
        rows, reply = answer.ask.rows.tolist(), answer.reply
        down = answer.ask.nbytes // len(rows)
        try:
            told = _rows(answer, job.now)
            assert isinstance(reply, Letter)
            tensors = unpack(reply.parts.get(OWN))
        except Refused as why:
            for row in rows:
                yield self._failed(job, row, str(why), down)
            return
        computing = {row: _computing(each, answer) for row, each in told.items()}
        transfer = max(0.0, answer.seconds - float(np.nansum(list(computing.values()))))
        up = reply.nbytes // len(rows)
        for row in rows:
            if row not in told:
                yield self._failed(job, row, "its reply does not have this row", down)
                continue
            each, reason = told[row], plain(told[row].get("reason") or "")
            like = self._like(job, row)
            update, buffers = torch.zeros_like(like.params), like.buffers
            if not reason:
                try:
                    update = self._decoded(job, row, tensors, like.params)
                    buffers = vector(tensors, f"buffers.{row}", like.buffers)
                except Refused as why:
                    reason = str(why)
            steps, seen = number(each.get("steps"), 0), number(each.get("examples"), 0)
            if not (steps.is_integer() and seen.is_integer() and max(steps, seen) < COUNTED):
                steps, seen, reason = 0, 0, reason or "its numbers of steps and examples are wrong"
            seconds = computing[row] + transfer / len(rows)
            yield self._chunk(
                job,
                row,
                Weights(update, buffers),
                (number(each.get("loss")), int(steps), int(seen)),
                Costs(*(np.array([v]) for v in (seconds, computing[row], up, down))),
                reason,
            )

    def _decoded(self, job: Job, row: int, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
        """A row's update, from what its channel sent."""
        if job.channel is None:
            return vector(tensors, f"update.{row}.whole", like)
        start = f"update.{row}."
        sent = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        came = sum(each.nbytes for each in sent.values())
        if came != (right := job.channel.nbytes(len(like), like.itemsize)):
            raise Refused(f"the update has {came} bytes, and its channel sends {right}")
        try:
            return job.channel.decode(sent, address(job, self.seed, row), like)
        except Exception as error:  # what was sent may be anything
            raise Refused(f"the update cannot be decoded ({type(error).__name__})") from error

    def _like(self, job: Job, row: int) -> Weights:
        model, part = job.models[int(job.plan.model[row])].weights, job.plan.held(row)
        return model if part is None else part.of(model)

    def _failed(self, job: Job, row: int, why: str, down: int) -> Chunk:
        like = self._like(job, row)
        costs = Costs(np.array([np.nan]), np.array([np.nan]), np.array([0]), np.array([down]))
        empty = Weights(torch.zeros_like(like.params), like.buffers)
        return self._chunk(job, row, empty, (float("nan"), 0, 0), costs, why)

    def _chunk(
        self,
        job: Job,
        row: int,
        end: Weights,
        told: tuple[float, int, int],
        costs: Costs,
        reason: str,
    ) -> Chunk:
        s = int(job.plan.model[row])
        loss, steps, examples = told
        return Chunk(
            rows=np.array([row]),
            model=s,
            now=job.now,
            lr=self.tasks[job.models[s].task].lr_at(job.now),
            update=end.params[None],
            buffers=end.buffers[None],
            loss=np.array([loss]),
            steps=np.array([steps]),
            examples=np.array([examples]),
            costs=costs,
            reason=[reason],
        )


def portioned(job: Job, rows: list[int], kind: str) -> list[list[int]]:
    """A node's rows, in portions whose replies are not much larger than PORTION."""
    if kind != "train":
        return [rows]
    sizes = np.array([job.models[int(job.plan.model[row])].nbytes for row in rows])
    number = (np.cumsum(sizes) - sizes) // PORTION
    return [some.tolist() for some in np.split(rows, np.flatnonzero(np.diff(number)) + 1)]


def _pack(job: Job, s: int, k: int) -> bytes:
    """A model, or a part of it, as bytes."""
    model = job.models[s].weights
    params, buffers = model if k == 0 else job.plan.cuts[k - 1].of(model)
    return pack({"params": params, "buffers": buffers})


def _rows(answer: Answer, now: int) -> dict[int, dict[str, Any]]:
    """What a reply says of each of the rows that were asked for."""
    if isinstance(answer.reply, str):
        raise Refused(answer.reply)
    head, asked = answer.reply.head, set(answer.ask.rows.tolist())
    told = head.get("rows")
    if head.get("round") != now or not isinstance(told, list):
        raise Refused("the reply is not one of this round")
    found: dict[int, dict[str, Any]] = {}
    for each in told:
        row = each.get("row") if isinstance(each, dict) else None
        if type(row) is int and row in asked and row not in found:
            found[row] = each
    return found


def _computing(told: dict[str, Any], answer: Answer) -> float:
    """How long a client says that it computed: at most as long as it had the question."""
    return min(number(told.get("computing"), 0), time.monotonic() - answer.ask.begun)  # NaN stays


def refuse_simulated(personal: str, every: int | None) -> None:
    """Refuse what only a simulation can do: keep clients' own models, and change their data."""
    if personal != "none":
        raise BadInput(
            f"personal.name is '{personal}', but personal models are for simulations: on real "
            "devices set it to 'none'"
        )
    if every is not None:
        raise BadInput(
            "drift.every is given, but only a simulation can change clients' data: leave it out on "
            "real devices"
        )


def in_order(chunks: Iterator[Chunk], rows: int) -> Iterator[Chunk]:
    """Chunks of one row each, in the order of the rows."""
    held: dict[int, Chunk] = {}
    following = 0
    for chunk in chunks:
        held[int(chunk.rows[0])] = chunk
        while following in held:
            yield held.pop(following)
            following += 1
    for row in sorted(held):
        yield held[row]


def await_clients(fleet: Fleet, ids: Sequence[str], seconds: float) -> None:
    """Wait until all these clients are there."""
    wanted = set(ids)
    if not fleet.wait(lambda: wanted <= fleet.home.keys(), seconds):
        missing = sorted(wanted - fleet.home.keys())
        names = ", ".join(f"'{name}'" for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise BadInput(
            f"{len(missing)} of {len(wanted)} clients have not come within {seconds:.0f} seconds "
            f"({names}{more}): start them with `rota client`"
        )


def stand_in(name: str, test: tuple[Tensor, Tensor], classes: int) -> Federation:
    """A federation of test examples alone, for a server that has no others."""
    x, y = test
    if not len(y):
        raise BadInput(f"the test examples of '{name}' are empty: give at least one")
    end = np.array([0, len(y)], np.int64)
    return Federation(name, Part(x[:2], y[:2], np.zeros(2, np.int64)), Part(x, y, end), classes)
