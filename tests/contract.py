"""An engine whose data live elsewhere: clients are threads with own data, costs and faults."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rota.engine import Engine, Score
from rota.plan import Chunk, Costs, Job, Model, Seen


class Threads:
    """Sends every row to its client's thread, and passes on what comes back until a deadline."""

    def __init__(self, clients: list[Engine], faults: dict[int, str], deadline: float) -> None:
        self.clients, self.faults, self.deadline = clients, faults, deadline
        self.replies: queue.SimpleQueue[tuple[Job, Chunk]] = queue.SimpleQueue()
        self.reported: dict[tuple[int, int, int], float] = {}

    def initial(self) -> list[Model]:
        return self.clients[0].initial()

    def train(self, job: Job) -> Iterator[Chunk]:
        for row in range(len(job.plan)):
            threading.Thread(target=self.work, args=(job, row)).start()
        seen, end = set[int](), time.monotonic() + self.deadline
        while len(seen) < len(job.plan):
            try:
                asked, reply = self.replies.get(timeout=max(0.001, end - time.monotonic()))
            except queue.Empty:
                return
            if asked is job or asked.now != job.now:  # a probe and the training have one round
                good = asked is job and reply.now == job.now
                seen |= set(reply.rows.tolist()) & set(range(len(job.plan))) if good else set()
                yield reply

    def work(self, job: Job, row: int) -> None:
        """What a client does: train its row, measure its costs, and reply as well as it can."""
        client, place = int(job.plan.client[row]), np.array([row])
        (chunk,) = self.clients[client].train(job.of(place))
        seconds = np.array([1000.0 + client + row / 8])
        costs = Costs(seconds, seconds / 2, job.duty.up[place] + 7, job.duty.down[place] + 3)
        self.reported[job.now, client, chunk.model] = float(seconds[0])
        self.reply(job, replace(chunk, rows=place, costs=costs), self.faults.get(client, ""))

    def reply(self, job: Job, chunk: Chunk, fault: str) -> None:
        replies = [chunk]
        time.sleep(1.5 * self.deadline if fault == "late" else 0)
        if fault == "shape":
            replies = [replace(chunk, update=chunk.update[:, 1:])]
        if fault == "dtype":
            replies = [replace(chunk, update=chunk.update.double())]
        if fault in ("nan", "huge"):
            spoiled = chunk.update.clone()
            spoiled[0, 0] = {"nan": float("nan"), "huge": 3e38}[fault]
            replies = [replace(chunk, update=spoiled)]
        if fault == "twice":
            replies = [chunk, replace(chunk, update=chunk.update + 100)]
        if fault == "stranger":
            replies = [replace(chunk, rows=chunk.rows + 1000), replace(chunk, now=chunk.now - 1)]
        for each in replies if fault != "silent" else []:
            self.replies.put((job, each))

    def evaluate(self, models: list[Model], which: Sequence[int] | None = None) -> list[Score]:
        return self.clients[0].evaluate(models, which)

    def losses(self, job: Job, examples: int | None = None) -> Seen:
        answers = Seen.nothing(len(job.plan))
        for row, client in enumerate(job.plan.client.tolist()):
            one = self.clients[client].losses(job.of(np.array([row])), examples)
            answers.loss[row], answers.examples[row] = one.loss[0], one.examples[0]
            answers.reason[row] = one.reason[0]
        return answers
