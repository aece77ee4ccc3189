"""A run of Weights & Biases in the project "rota", with its files in FOLDER/wandb.

It is offline, and nothing leaves the machine, unless WANDB_MODE says otherwise. Later
`wandb sync FOLDER/wandb/offline-run-*` uploads it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import wandb

from rota.running.record import Record
from rota.track.numbers import kept, numbers


class WandB:
    """The configuration, and the numbers of every round along `round`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, config: dict[str, Any]) -> None:
        identity = kept(self.folder / "wandb" / "run.txt", lambda: secrets.token_hex(4))
        offline = os.environ.get("WANDB_MODE", "offline") == "offline"
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rota"),
            name=self.folder.resolve().name,
            id=identity,
            mode=None if "WANDB_MODE" in os.environ else "offline",
            resume=None if offline else "allow",  # offline parts are joined when they are uploaded
            dir=str(self.folder),
            config=config,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="round")

    def round(self, record: Record) -> None:
        self.run.log(numbers(record))

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        if isinstance(ended, BaseException):
            self.run.finish(exit_code=1)
            return
        self.run.summary.update({key: v for key, v in ended.items() if isinstance(v, int | float)})
        self.run.finish(exit_code=0)
