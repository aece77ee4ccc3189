"""TensorBoard's event files in FOLDER/tensorboard: tensorboard --logdir FOLDER."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
from torch.utils.tensorboard import SummaryWriter

from rota.running.record import Record
from rota.track.numbers import numbers


class TensorBoard:
    """Scalars of every round, and the configuration as text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: SummaryWriter | None = None

    def begin(self, config: dict[str, Any]) -> None:
        self.text = f"```\n{tomli_w.dumps(config)}\n```"

    def round(self, record: Record) -> None:
        now = record["round"]
        if self.writer is None:  # what an interrupted run wrote from this round on is forgotten
            self.writer = SummaryWriter(str(self.folder), purge_step=now, flush_secs=5)
            self.writer.add_text("config", self.text, now)
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, now)

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        if self.writer is not None:
            self.writer.close()
