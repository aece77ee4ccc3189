"""What a reproduction gives: paper against measured, and the page it is published on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from rota_lab.machine import described
from rota_lab.reproduce.chart import Chart, svg


class Row(TypedDict):
    """One number of the source and ours; `paper` is None where the source gives none."""

    quantity: str
    paper: float | None
    measured: float
    low: float
    high: float
    seeds: int


def over_seeds(quantity: str, paper: float | None, values: Sequence[float]) -> Row:
    """A row from one value a seed: `measured` is their mean, `low` and `high` the smallest and the largest."""
    low, high = float(min(values)), float(max(values))
    mean = min(
        max(float(sum(values) / len(values)), low), high
    )  # a mean of equal numbers may round past them
    return Row(quantity=quantity, paper=paper, measured=mean, low=low, high=high, seeds=len(values))


@dataclass(frozen=True)
class Result:
    """A reproduction's outcome. `text` (Markdown) says what was run and how to read the rows."""

    name: str
    title: str
    text: str
    rows: list[Row]
    charts: list[Chart] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    """What the source claims, in a sentence each, and whether it held."""
    quick: bool = False
    device: str = "cpu"

    @property
    def ok(self) -> bool:
        """Whether every claim held."""
        return all(self.checks.values())


def table(result: Result) -> list[str]:
    """The result for people: a line a quantity, and whether each claim held."""
    columns = ("paper", "measured", "low", "high", "seeds")
    lines = ["".join(f"{column:>10}" for column in columns) + "  quantity"]
    for row in result.rows:
        values = dict(row)
        numbers = ("-" if values[column] is None else f"{values[column]:.4g}" for column in columns)
        lines.append("".join(f"{number:>10}" for number in numbers) + f"  {row['quantity']}")
    return lines + [f"{'yes' if held else 'NO'}: {claim}" for claim, held in result.checks.items()]


def write_page(result: Result, folder: Path | str) -> Path:
    """Write NAME.md and its charts (NAME-CHART.svg) into a folder; the page's path. A short version is NAME-quick."""
    folder, name = Path(folder), result.name + "-quick" * result.quick
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {result.title}", "", result.text.strip(), ""]
    lines += [f"- {'yes' if held else '**no**'}: {claim}" for claim, held in result.checks.items()]
    lines += [""] if result.checks else []
    for chart in result.charts:
        file = f"{name}-{chart.name}.svg"
        (folder / file).write_text(svg(chart), encoding="utf-8")
        lines += [f"![{chart.title}]({file})", ""]
    lines += [
        "| quantity | source | measured | low | high | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result.rows:
        numbers = (_number(row[key]) for key in ("paper", "measured", "low", "high"))
        lines.append(f"| {row['quantity']} | {' | '.join(numbers)} | {row['seeds']} |")
    command = f"rota reproduce {result.name}{' --quick' if result.quick else ''}"
    lines += ["", "`measured` is the mean over the seeds, `low` and `high` their extremes.", ""]
    lines += [f"Written by `{command}` on {described(result.device)}."]
    page = folder / f"{name}.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
