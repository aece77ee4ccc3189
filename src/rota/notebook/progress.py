"""Progress in Python, in a terminal and in a notebook."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rota.running.record import Record


class Progress:
    """A watcher that shows a run's rounds: `rota.run(..., watch=rota.Progress())`.

    In a terminal it is one line that moves; elsewhere, as in a notebook, it is a new line every few
    seconds. The lines go to standard error.
    """

    def __init__(self, title: str = "") -> None:
        self.title, self.open = title, ExitStack()

    def begin(self, config: dict[str, Any]) -> None:
        """Show the run's name, or else its tasks' names."""
        from rota.cli.progress import rounds
        from rota.scores import of_all, title

        tasks = config["task"]
        word = title(of_all(task["score"] for task in tasks))
        name = self.title or ", ".join(task["name"] for task in tasks)
        self.show = self.open.enter_context(rounds(name, config["rounds"], word))

    def round(self, record: Record) -> None:
        """Show a round's score, its loss and how many clients trained."""
        self.show(record)

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        """Leave the last line where it is."""
        self.open.close()
