"""The rounds as a table for spreadsheets and data frames: FOLDER/rounds.csv, rounds.parquet."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rota.files import replacing
from rota.running.record import Record
from rota.track.numbers import numbers

SECONDS = 5.0
"""The file is written again after this time."""
Row = dict[str, Any]


def as_csv(folder: Path) -> Table:
    """rounds.csv: empty cells where a round does not have a number."""

    def read(path: Path) -> list[Row]:
        with path.open(encoding="utf-8", newline="") as file:
            return [{**row, "round": int(row["round"])} for row in csv.DictReader(file)]

    def write(path: Path, columns: list[str], rows: list[Row]) -> None:
        with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
            out = csv.DictWriter(file, columns)
            out.writeheader()
            out.writerows(rows)

    return Table(folder / "rounds.csv", read, write)


def as_parquet(folder: Path) -> Table:
    """rounds.parquet: null where a round does not have a number."""
    import pyarrow
    from pyarrow import parquet

    def read(path: Path) -> list[Row]:
        rows: list[Row] = parquet.read_table(path).to_pylist()
        return rows

    def write(path: Path, columns: list[str], rows: list[Row]) -> None:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
        parquet.write_table(table, path)

    return Table(folder / "rounds.parquet", read, write)


class Table:
    """One row per round, one column per number, under the names that `run.rounds` has."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], list[Row]],
        write: Callable[[Path, list[str], list[Row]], None],
    ) -> None:
        self.path, self.read, self.write = path, read, write
        self.rows: list[Row] = []

    def begin(self, config: dict[str, Any]) -> None:
        self.rows = self.read(self.path) if self.path.exists() else []
        self.written = time.monotonic()

    def round(self, record: Record) -> None:
        while self.rows and self.rows[-1]["round"] >= record["round"]:
            self.rows.pop()  # a resumed run plays these again
        self.rows.append(numbers(record, "."))
        if time.monotonic() - self.written > SECONDS:
            self._save()

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        self._save()

    def _save(self) -> None:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as aside:
            self.write(aside, columns, self.rows)
        self.written = time.monotonic()
