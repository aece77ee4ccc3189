"""The file of finished parts: what is read back after stops, and from several writers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rota.errors import BadInput
from rota_lab.reproduce import REPRODUCTIONS
from rota_lab.reproduce.parts import Found, append, left, read, results, run_parts, start


@dataclass(frozen=True)
class Piece:
    name: str


def kept(path: Path) -> list[str]:
    """The names of the lines of a file."""
    return [json.loads(line)["part"] for line in path.read_text().splitlines()]


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "some" / "x.jsonl"
    assert read(path) == {}
    parts: list[Found] = [{"part": name, "numbers": [0.1, 1e-300, None]} for name in ("b", "a")]
    for part in parts:
        append(path, part)
    assert read(path) == {"b": parts[0], "a": parts[1]}
    assert list(read(path)) == ["b", "a"]


def test_of_several_lines_for_a_part_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for number in range(3):
        append(path, {"part": "a", "number": number})
    assert read(path) == {"a": {"part": "a", "number": 2}}
    assert kept(path) == ["a"] * 3


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_writer_may_be_stopped_within_its_line(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, {"part": "a", "number": 1})
    whole = path.read_bytes()
    append(path, {"part": "b", "text": "line"})
    path.write_bytes(path.read_bytes()[:-cut])
    assert path.read_bytes() != whole
    assert list(read(path)) == ["a"]
    append(path, {"part": "c"})
    assert path.read_bytes() == whole + b'{"part": "c"}\n'


@pytest.mark.parametrize("line", ["{", '{"name": "a"}', "[1, 2]", "7", "", '"part"', "\xff"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, {"part": "a"})
    path.write_bytes(path.read_bytes() + line.encode("latin1") + b"\n" + path.read_bytes())
    with pytest.raises(
        BadInput,
        match=r"line 2 of .*x\.jsonl is not a finished part \(.+\): remove the line",
    ):
        read(path)


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .* \(Is a directory\)"):
        read(tmp_path)


def test_a_number_that_json_does_not_have_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, {"part": "a"})
    with pytest.raises(ValueError, match="Out of range"):
        append(path, {"part": "b", "number": float("nan")})
    assert list(read(path)) == ["a"]


def test_several_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    code = f"""
import pathlib, sys
from rota_lab.reproduce.parts import append
for number in range(40):
    part = {{"part": f"{{sys.argv[1]}}-{{number}}", "text": "x" * 20_000}}
    append(pathlib.Path({str(path)!r}), part)
"""
    words = [sys.executable, "-c", code]
    writers = [subprocess.Popen([*words, name]) for name in "abc"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    names = kept(path)
    assert len(names) == len(set(names)) == 120
    for name in "abc":
        mine = [each for each in names if each.startswith(name)]
        assert mine == [f"{name}-{number}" for number in range(40)]
    assert all(len(part["text"]) == 20_000 for part in read(path).values())


def test_parts_of_another_reproduction_are_read_and_not_written(tmp_path: Path) -> None:
    own, other = results(tmp_path, "own", "other")
    append(other, {"part": "a", "of": "other"})
    append(other, {"part": "b", "of": "other"})
    append(own, {"part": "b", "of": "own"})
    parts = [Piece(name) for name in "abc"]
    assert left([own, other], parts) == [Piece("c")]
    runner = start([own, other], ["b", "a", "c"], None, "cpu", "fp32", lambda _: None)
    assert {name: part["of"] for name, part in runner.found.items()} == {"b": "own", "a": "other"}
    assert list(runner.found) == ["b", "a"], "in the order of the names"
    before = other.read_bytes()
    run_parts(runner, parts, lambda _: None, lambda _: None, lambda _, part: ({"of": "work"}, ""))
    assert kept(own) == ["b", "c"]
    assert other.read_bytes() == before
    assert read(own)["c"].keys() == {"part", "of", "seconds", "precision", "machine", "rota"}


def test_without_a_folder_nothing_is_kept() -> None:
    assert results(None, "own", "other") == []
    runner = start([], ["a"], None, "cpu", "fp32", lambda _: None)
    run_parts(
        runner, [Piece("a")], lambda _: None, lambda _: None, lambda _, part: ({"of": "work"}, "")
    )
    assert runner.found["a"]["of"] == "work"


def test_the_results_of_the_repository_are_whole() -> None:
    files = sorted((Path(__file__).parents[1] / "docs" / "results").glob("*.jsonl"))
    names = {path.stem for path in files}
    assert names <= REPRODUCTIONS.keys()
    assert {"fedavg-table1", "kvib-theory", "mmfl-table1", "fluid-table2", "selective"} <= names
    for path in files:
        assert len(read(path)) == len(kept(path)), "no part twice"
        assert path.read_text().endswith("\n")
