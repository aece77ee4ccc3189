"""rota as a plain Flower app: it runs on anybody's SuperLink and SuperNodes, by `flwr run`.

`server` and `client` are a ServerApp and a ClientApp, made with Flower's stable interface alone. A
SuperNode names its data by --node-config 'data="/path"', and the modules that it allows beyond
rota's own by 'allow="a,b"'. The run's configuration has `recipe`, a file on the server's machine,
`clients`, how many must be there, and `out`, the folder of the run.

Flower starts a process for each message, so a round takes seconds even if the work is short. Nodes
by `rota client` stay alive and are faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from rota.flower.letter import Letter, Refused
from rota.flower.records import from_message, read, refusal, to_records

client = ClientApp()
server = ServerApp()


class GridWire:
    """Letters over the Grid of a ServerApp."""

    pause = 1.0
    """A Grid waits for the rest of a reply that has come in part, at first for a second. Who looks
    more often sees more of those."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def send(self, letters: list[tuple[int, Letter]], seconds: float) -> list[str]:
        messages = [
            Message(to_records(letter), dst_node_id=node, message_type=letter.kind, ttl=seconds)
            for node, letter in letters
        ]
        return list(self.grid.push_messages(messages))

    def replies(self, keys: list[str]) -> Iterator[tuple[str, Letter | str]]:
        for message in self.grid.pull_messages(keys):
            yield message.metadata.reply_to_message_id, read(message)

    def renew(self) -> None:
        """Flower itself holds the run."""

    def close(self) -> None:
        """Flower itself ends the run."""


def answer(message: Message, context: Context) -> Message:
    """What a ClientApp does with any letter."""
    from rota.flower.worker import Work

    config = context.node_config
    try:
        folder = Path(str(config.get("data", "")))
        if "data" not in config or not folder.is_dir():
            raise Refused("the node does not name its data: start it with --node-config data=...")
        allow = tuple(filter(None, str(config.get("allow", "")).split(",")))
        reply = Work(folder, allow).answer(from_message(message))
    except Refused as why:
        reply = refusal(why)
    return Message(to_records(reply), reply_to=message)


client.query()(answer)
client.query("losses")(answer)
client.train()(answer)


def main(grid: Grid, context: Context) -> None:
    """Run the recipe that the run's configuration names."""
    from rota import recipe
    from rota.errors import BadInput
    from rota.flower.fleet import Fleet
    from rota.flower.serve import Meeting
    from rota.running.run import execute

    given: dict[str, Any] = dict(context.run_config)
    if "recipe" not in given:
        raise BadInput('the run\'s configuration names no recipe: give recipe="FILE.toml"')
    config = recipe.resolve(recipe.read(str(given["recipe"])))
    out = Path(str(given.get("out", f"runs/flower-{time.strftime('%Y%m%d-%H%M%S')}")))
    meeting = Meeting(Fleet(GridWire(grid)))
    file = out.with_name(f"{out.name}.clients.json")
    experiment = meeting.build(config, int(given.get("clients", 1)), 600.0, file)
    execute(experiment, engine=meeting, device="cpu", out=out, config=config)


server.main()(main)
