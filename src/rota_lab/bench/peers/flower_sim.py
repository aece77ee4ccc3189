"""FedAvg in Flower's simulation: its FedAvg strategy, with one Ray worker of one thread per core.

The clients' arrays come from a cache in an imported module. Ray unpickles the client app for every
message, so a global of this script would be filled each time, and Flower would look several times
slower than it is.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata

import torch
import work as shared
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER = sys.argv[1]
client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    work = shared.load(message.content["config"]["folder"])
    rows = work.rows(message.content["config"]["client"])
    x = torch.from_numpy(work.x[rows]).to(work.device)
    y = torch.from_numpy(work.y[rows]).to(work.device)
    module = shared.network(work)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    module.to(work.device)
    shared.train(module, x, y, work)
    arrays = ArrayRecord({name: value.cpu() for name, value in module.state_dict().items()})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Given(FedAvg):
    """FedAvg that tells each sampled node which client it is, and notes when a round ends."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        cohort = shared.load(FOLDER).cohorts[server_round - 1].tolist()
        for message, c in zip(messages, cohort, strict=True):
            who = ConfigRecord({"client": c, "folder": FOLDER})
            message.content = RecordDict({"arrays": arrays, "config": who})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise RuntimeError(failed[0])
        result = super().aggregate_train(server_round, replies)
        ends.append(shared.now("cpu"))
        return result


ends: list[float] = []


@server.main()
def main(grid: Grid, context: Context) -> None:
    work = shared.load(FOLDER)
    rounds, cohort = work.cohorts.shape
    strategy = Given(
        fraction_train=cohort / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=cohort,
        min_available_nodes=work.clients,
    )
    module = shared.network(work)
    start = ArrayRecord(module.state_dict())
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
    module.load_state_dict(result.arrays.to_torch_state_dict())
    shared.report(work, ends, shared.score(module.to(work.device), work), metadata.version("flwr"))


if __name__ == "__main__":
    prepared = shared.load(FOLDER)
    resources = {"num_cpus": 1, "num_gpus": 0.25 if prepared.device == "cuda" else 0.0}
    config = {"client_resources": resources}
    run_simulation(server, client, prepared.clients, backend_config=config)
