"""What the sources claim, and what rota measured: python -m rota_lab.claims docs/results.

It writes README.md into a folder of results. The verdicts are those of the reproductions' pages:
each page is made again from its finished parts, and its claims are taken as they are. Nothing is
run, except for the reproductions that keep no parts, which are short.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rota_lab import reproduce
from rota_lab.claimed import SOURCES, Said, Source
from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS, Claim
from rota_lab.reproduce.result import Result, wrapped

COMMAND = "python -m rota_lab.claims docs/results"
NOT_MEASURED = "not measured"
UNFINISHED = re.compile(r"all (parts|runs|cells .*) are (finished|run) \(")
"""A page's check of itself, which is no claim of a source."""

Judged = dict[str, list[Claim]]
"""The claims of each page."""


def finished(folder: Path) -> list[str]:
    """The reproductions that have a page in this folder."""
    return [name for name in reproduce.REPRODUCTIONS if (folder / f"{name}.md").exists()]


def judged(folder: Path) -> Judged:
    """The claims of all pages in a folder, by the code that writes the pages."""
    out = {}
    for name in finished(folder):
        minutes = None if reproduce.is_short(name) else 0
        out[name] = claims(reproduce.run(name, out=folder, minutes=minutes))
    return out


def claims(result: Result) -> list[Claim]:
    """A result's claims; a check that holds or not is a claim without an interval."""
    plain = []
    for words, held in result.checks.items():
        if not UNFINISHED.match(words):
            plain.append(Claim(words, HOLDS if held else FAILS))
    return [*plain, *result.claims]


def page(found: Judged) -> str:
    """The page, in Markdown."""
    lines = ["# What the sources claim, and what rota measured", "", wrapped(TEXT), ""]
    sections, counts = [], []
    for source in SOURCES:
        rows = _rows(source, found)
        verdicts = Counter(verdict for _, _, verdict, _ in rows if verdict in VERDICTS)
        numbers = [str(verdicts[verdict]) for verdict in VERDICTS]
        counts.append(f"| {source.name} | {' | '.join(numbers)} |")
        sections += [f"## {source.name}", "", wrapped(source.about), ""]
        sections += ["| where | claim | verdict | measured by |", "|---|---|---|---|"]
        sections += [
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
        ]
        sections += [""]
    lines += [f"| source | {' | '.join(VERDICTS)} |", "|---|" + "---:|" * len(VERDICTS)]
    return "\n".join([*lines, *counts, "", *sections[:-1]]) + "\n"


VERDICTS = (HOLDS, FAILS, CANNOT_TELL, NOT_MEASURED)
TEXT = f"""\
Each line in bold is a claim of a source: a theorem, a number of a table, what a figure shows, or a
sentence. The lines below it are what rota measured of it, with the verdict of the page that has
the measurement. The command of such a line writes that page.

- **holds** and **fails**: the measurement says so. Where seeds or cells differ, it is a test with
  Holm's correction over the claims of its page, and the brackets are the claim's own 95 % interval.
  Where nothing is drawn at random, it is a comparison.
- **cannot tell**: the measurement is compatible with both. Where the page can say how many seeds
  would tell, it does.
- **not measured**: no reproduction measures the claim, and no page of its measurement is finished.

`{COMMAND}` writes this page from the finished results in that folder. No verdict is typed. The
numbers below count verdicts on measurements; a claim may have several.
"""


def _rows(source: Source, found: Judged) -> list[tuple[str, str, str, str]]:
    """The source's claims with their measurements, then the other claims of its pages."""
    rows = []
    pages = {*source.pages, *(said.page for said in source.claims)}
    left = {name: list(found[name]) for name in found if name in pages}
    for said in source.claims:
        mine = _of(said, left)
        if not mine:
            rows.append((said.place, f"**{said.words}**", NOT_MEASURED, said.why or "nothing"))
            continue
        verdicts = Counter(each.verdict for each in mine)
        rows.append((said.place, f"**{said.words}**", _summary(verdicts), _link(said.page)))
        rows += _measured(said.page, mine)
    for name, (place, words) in source.pages.items():
        others = left.get(name)
        if others:
            verdicts = Counter(each.verdict for each in others)
            rows.append((place, f"**{words}**", _summary(verdicts), _link(name)))
            rows += _measured(name, others)
    return rows


def _of(said: Said, left: Judged) -> list[Claim]:
    """The measurements of a claim, which are taken out of those that are left."""
    mine = [each for each in left.get(said.page, []) if re.search(said.find, each.words)]
    if mine:
        left[said.page] = [each for each in left[said.page] if each not in mine]
    return mine


def _summary(verdicts: Counter[str]) -> str:
    return ", ".join(f"{verdicts[one]} × {one}" for one in VERDICTS if verdicts[one])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _link(name: str) -> str:
    return f"[{name}]({name}.md)"


def _measured(name: str, some: Iterable[Claim]) -> list[tuple[str, str, str, str]]:
    command = f"`rota reproduce {name}`"
    return [("", each.words, each.verdict, command) for each in some]


def main(words: Sequence[str]) -> None:
    if len(words) != 1 or not Path(words[0]).is_dir():
        sys.exit(f"give the folder of the results: {COMMAND}")
    folder = Path(words[0])
    (folder / "README.md").write_text(page(judged(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
