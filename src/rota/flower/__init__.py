"""The same experiment on real devices, through Flower.

    server                                   a client's machine
    rota's loop                              node.py    a transport process, without torch
      engine.py   asks nodes, as an engine     |
        link.py   Flower's SuperLink  <----->  |        Flower's Fleet API, over TLS
                                             worker.py  a process with torch and the data

`letter.py` says what travels: texts, numbers and tensors, and never code. `inside.py` holds all
imports from the inside of flwr. `superlink.py` starts the SuperLink, and `keys.py` makes
certificates and keys.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.engine import Options
    from rota.experiment import Experiment
    from rota.flower.engine import Remote

HERE = "127.0.0.1:9092"
"""The default address of the server."""
ARRIVAL = 120.0
"""Seconds to wait for the clients of a run before its first round."""


class Flower:
    """Trains on real devices, through Flower."""

    @staticmethod
    def make(experiment: Experiment, options: Options) -> Remote:
        """Start a SuperLink on this machine, and wait for all clients of the experiment.

        ROTA_SERVER is where it listens. `rota serve` does the same, and has more options.
        """
        from rota.flower.engine import Remote, await_clients
        from rota.flower.serve import fleet_at

        with ExitStack() as stack:
            fleet = stack.enter_context(fleet_at(os.environ.get("ROTA_SERVER", HERE)))
            fleet.tasks = experiment.names
            await_clients(fleet, list(experiment.tasks[0].roster.ids), ARRIVAL)
            engine = Remote(experiment, fleet, options, ())
            engine.stack = stack.pop_all()
        return engine
