"""rota's samplers in a ServerApp of your own: a strategy of Flower with unbiased weights.

    strategy = Sampled(KVib(budget=3))
    strategy.start(grid=grid, initial_arrays=..., num_rounds=10)

Your ClientApp is as for Flower's FedAvg: it replies with its arrays, and with a metric
"num-examples". The new model is the old one minus the weighted sum of what the drawn clients moved
it by, and the weights make that an estimate of what all clients together would have done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from rota import rng
from rota.errors import BadInput
from rota.flower.letter import number
from rota.plan import Plan, Seen
from rota.policies import Observing, sees, speaks
from rota.sampling import Asking, Sampler


class Sampled(FedAvg):  # type: ignore[misc, unused-ignore]
    """FedAvg in which a sampler of rota draws the nodes, and learns from what they reply.

    Until a node has told how many examples it has, it counts as one with as many as the others
    have on average. A reply whose arrays have other shapes, or are not finite, is left out. A
    sampler that asks clients before it draws cannot be used here.
    """

    def __init__(self, sampler: Sampler, seed: int = 0, rounds: int = 100, **more: Any) -> None:
        super().__init__(**more)
        self.sampler, self.seed, self.rounds = sampler, seed, rounds
        self.nodes: list[int] = []
        self.sizes: dict[int, float] = {}
        self.state: dict[str, Any] = {}
        self.plan: Plan | None = None
        self.drawn: Any = None
        """The shares that the plan was drawn with."""
        self.before: ArrayRecord | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's nodes."""
        online = set(grid.get_node_ids())
        known = set(self.nodes)
        if not self.nodes:  # who is there in the first round takes part in the run
            self.nodes = sorted(online)
            shares = self.shares(set(self.nodes))
            if speaks(self.sampler, Asking):
                raise BadInput(
                    f"{type(self.sampler).__name__} asks clients before it draws: use a sampler "
                    "that does not, such as KVib"
                )
            self.state = self.sampler.init(shares, self.rounds)
        elif not online & known:
            return []
        self.drawn = self.shares(online)
        generator = rng.generator(rng.key(self.seed, "draw", server_round))
        self.plan, self.before = self.sampler.draw(self.state, self.drawn, generator), arrays
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        drawn = [self.nodes[client] for client in self.plan.client.tolist()]
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in drawn
        ]

    def shares(self, online: set[int]) -> Any:
        """Each node's share of the examples: one row; 0 where it is not online."""
        usual = float(np.mean(list(self.sizes.values()))) if self.sizes else 1.0
        sizes = np.array([self.sizes.get(node, usual) for node in self.nodes])
        here = np.array([node in online for node in self.nodes])
        return (sizes / sizes.sum() * here)[None]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the drawn nodes' updates with the plan's weights, and let the sampler learn."""
        good, _ = self._check_and_log_replies(replies, is_train=True)
        plan, before = self.plan, self.before
        if plan is None or before is None or not good:
            return None, None
        old = before.to_numpy_ndarrays()
        row_of = {self.nodes[client]: row for row, client in enumerate(plan.client.tolist())}
        seen, total = Seen.nothing(len(plan)), [np.zeros(each.shape) for each in old]
        contents = []
        for message in good:
            node = message.metadata.src_node_id
            row = row_of[node]
            (record,) = message.content.array_records.values()
            (metrics,) = message.content.metric_records.values()
            came, size = record.to_numpy_ndarrays(), number(metrics.get(self.weighted_by_key), 0)
            if [each.shape for each in came] != [each.shape for each in old] or not size > 0:
                continue
            update = [a - b for a, b in zip(old, came, strict=True)]
            norm = float(np.sqrt(sum(np.sum(np.square(each, dtype=float)) for each in update)))
            if not np.isfinite(norm):
                continue
            seen.norm[row], seen.reason[row], self.sizes[node] = norm, "", size
            seen.loss[row] = number(metrics.get("train_loss"))
            contents.append(message.content)
            for sum_, each in zip(total, update, strict=True):
                sum_ += plan.weight[row] * each
        if speaks(self.sampler, Observing):
            known = seen.only(sees(self.sampler))
            self.state = self.sampler.observe(self.state, self.drawn, plan, known)
        new = [(a - b).astype(a.dtype) for a, b in zip(old, total, strict=True)]
        named = dict(zip(before.keys(), ArrayRecord(new).values(), strict=True))
        told = self.train_metrics_aggr_fn(contents, self.weighted_by_key) if contents else None
        return ArrayRecord(named), told
