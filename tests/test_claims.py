"""The page of all claims, and published pages: no number on them is typed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rota_lab import claims, reproduce
from rota_lab.claimed import SOURCES, Said, Source
from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS, Claim
from rota_lab.reproduce.result import Result

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PUBLISHED = claims.finished(RESULTS)
SLOW = ("gd-bound", "worst-local-loss")
"""They compute their pages again."""
MACHINE = re.compile(r"^`rota reproduce .*` wrote this page on .*\.$", re.MULTILINE | re.DOTALL)
ROUNDING = re.compile(r"\d(\.\d+)?e-1[3-9]")
"""A number that is nothing but rounding, which differs between processors."""


def same(page: str) -> str:
    return ROUNDING.sub("rounding", MACHINE.sub("the machine", page))


def again(name: str, folder: Path) -> str:
    """The page as the reproduction writes it now, without the machine's line."""
    for path in RESULTS.glob("*.jsonl"):
        shutil.copy(path, folder)
    minutes = None if reproduce.is_short(name) else 0
    result = reproduce.run(name, out=folder, minutes=minutes)
    return same(reproduce.write_page(result, folder).read_text(encoding="utf-8"))


def cases() -> list[object]:
    return [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in PUBLISHED]


@pytest.mark.parametrize("name", cases())
def test_a_page_is_what_its_command_writes(name: str, tmp_path: Path) -> None:
    """Byte for byte, with its charts, from the finished parts beside it."""
    published = same((RESULTS / f"{name}.md").read_text(encoding="utf-8"))
    assert again(name, tmp_path) == published, f"run: rota reproduce {name} --out docs/results"
    if name not in SLOW:
        for chart in tmp_path.glob("*.svg"):
            assert chart.read_bytes() == (RESULTS / chart.name).read_bytes(), chart.name


def test_a_typed_number_is_seen() -> None:
    page = "| a | 0.5 |\n`rota reproduce x` wrote this page on a machine,\nand torch 2.\n"
    assert same(page) == same(page.replace("a machine", "another one"))
    assert same(page) != same(page.replace("0.5", "0.6"))
    assert same("7.4e-16") == same("4.44e-16") != same("4.44e-12")


def test_every_published_page_has_a_source() -> None:
    known = {name for source in SOURCES for name in source.pages}
    known |= {said.page for source in SOURCES for said in source.claims}
    assert set(reproduce.REPRODUCTIONS) <= known
    for source in SOURCES:
        for said in source.claims:
            assert (said.page in reproduce.REPRODUCTIONS) or not said.page
            assert said.page or said.why, said.words


@pytest.mark.slow
def test_the_page_of_claims_is_up_to_date() -> None:
    written = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert same(written) == same(claims.page(claims.judged(RESULTS))), f"run: {claims.COMMAND}"


def test_the_published_page_of_claims_has_all_pages() -> None:
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    for name in set(PUBLISHED) - {"mmfl-faults"}:  # which has no claims
        assert f"| `rota reproduce {name}` |" in text, f"run: {claims.COMMAND}"


SMALL = Source(
    "A source",
    "About it.",
    (
        Said("Theorem 1", "it is so", "gd-bound", "^so"),
        Said("Theorem 2", "and so", "gd-bound", "^and"),
        Said("Theorem 3", "|x| > 0", why="nobody asks"),
    ),
    {"gd-bound": ("section 9", "More")},
)


def test_rows_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SOURCES", (SMALL,))
    found = {
        "gd-bound": [
            Claim("so, +1.00", HOLDS),
            Claim("so, -1.00", FAILS),
            Claim("so |x|", HOLDS),
            Claim("else", CANNOT_TELL),
        ]
    }
    text = claims.page(found)
    command = "`rota reproduce gd-bound`"
    for line in (
        "| A source | 2 | 1 | 1 | 2 |",
        "| Theorem 1 | **it is so** | 2 × holds, 1 × fails | [gd-bound](gd-bound.md) |",
        f"|  | so, +1.00 | holds | {command} |",
        f"|  | so, -1.00 | fails | {command} |",
        f"|  | so \\|x\\| | holds | {command} |",
        "| Theorem 2 | **and so** | not measured | nothing |",
        "| Theorem 3 | **\\|x\\| > 0** | not measured | nobody asks |",
        "| section 9 | **More** | 1 × cannot tell | [gd-bound](gd-bound.md) |",
        f"|  | else | cannot tell | {command} |",
    ):
        assert text.splitlines().count(line) == 1, line


def test_checks_of_a_page_on_itself_are_no_claims() -> None:
    checks = {
        "all parts are finished (1 of 2)": False,
        "all runs are finished (1 of 2)": False,
        "all cells that the source reached are run (3 are not)": False,
        "the moon is a cheese": False,
        "water is wet": True,
    }
    result = Result("x", "X", "", [], checks=checks, claims=[Claim("fire is hot", HOLDS)])
    assert claims.claims(result) == [
        Claim("the moon is a cheese", FAILS),
        Claim("water is wet", HOLDS),
        Claim("fire is hot", HOLDS),
    ]
