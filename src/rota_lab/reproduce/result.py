"""What a reproduction returns (paper against measured), and the page that publishes it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from rota_lab.machine import described
from rota_lab.reproduce.chart import Chart, svg
from rota_lab.reproduce.interval import FAILS, Claim


class Row(TypedDict):
    """One number of the source and ours; `paper` is None where the source gives no number."""

    quantity: str
    paper: float | None
    measured: float
    low: float
    high: float
    seeds: int


def over_seeds(quantity: str, paper: float | None, values: Sequence[float]) -> Row:
    """A row from one value per seed: their mean, and the smallest and the largest of them."""
    low, high = float(min(values)), float(max(values))
    mean = float(sum(values) / len(values))
    mean = min(max(mean, low), high)  # rounding may push a mean of equal numbers past them
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
    """The source's claims, one sentence each, and whether each one held."""
    quick: bool = False
    device: str = "cpu"
    claims: Sequence[Claim] = ()
    """The source's claims that are judged by intervals: each holds, fails, or cannot be told."""
    listed: bool = True
    """Whether the page lists these claims below its text; if not, the text has them."""

    @property
    def ok(self) -> bool:
        """Whether no claim failed."""
        return all(self.checks.values()) and all(each.verdict != FAILS for each in self.claims)


def table(result: Result) -> list[str]:
    """The result for people: one line per quantity, and whether each claim held."""
    columns = ("paper", "measured", "low", "high", "seeds")
    lines = ["".join(f"{column:>10}" for column in columns) + "  quantity"]
    for row in result.rows:
        values = dict(row)
        line = ""
        for column in columns:
            number = "-" if values[column] is None else f"{values[column]:.4g}"
            line += f"{number:>10}"
        lines.append(f"{line}  {row['quantity']}")
    lines += [f"{'yes' if held else 'NO'}: {claim}" for claim, held in result.checks.items()]
    return lines + [f"{each.verdict}: {each.words}" for each in result.claims]


def write_page(result: Result, folder: Path | str) -> Path:
    """Write NAME.md and its charts (NAME-CHART.svg) to a folder, and return the page's path.

    The files of a short version are called NAME-quick.
    """
    folder, name = Path(folder), result.name + "-quick" * result.quick
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"# {result.title}", "", wrapped(result.text.strip()), ""]
    for claim, held in result.checks.items():
        lines.append(wrapped(f"- {'yes' if held else '**no**'}: {claim}"))
    for each in result.claims if result.listed else ():
        lines.append(wrapped(f"- **{each.verdict}**: {each.words}"))
    if result.checks or (result.claims and result.listed):
        lines.append("")
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
    lines += ["", "`measured` is the mean over the seeds; `low` and `high` are their extremes.", ""]
    lines += [wrapped(f"`{command}` wrote this page on {described(result.device)}.")]
    page = folder / f"{name}.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def wrapped(text: str) -> str:
    """Markdown whose paragraphs and list items are wrapped at 100 columns."""
    filler = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    out: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            filler.subsequent_indent = "  " if paragraph[0].startswith("- ") else ""
            words = " ".join(line.strip() for line in paragraph)
            words = re.sub(r" (=|<=|-|\*) ", "\0\\1\0", words)  # a formula stays in one line
            out.append(filler.fill(words).replace("\0", " "))
            paragraph.clear()

    for line in text.splitlines():
        alone = not line or line.startswith(("|", "#", "!["))
        if alone or line.startswith("- "):
            flush()
        if alone:
            out.append(line)
        else:
            paragraph.append(line)
    flush()
    return "\n".join(out)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
