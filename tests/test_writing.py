"""Files are replaced in one step, and JSON is read with a sentence for what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota.errors import BadInput
from rota.files import read_json, replacing, write


@pytest.mark.parametrize("shared", [False, True])
def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "page.html"
    write(path, "old")

    def fail() -> None:
        with replacing(path, shared) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    with replacing(path, shared) as aside:
        assert aside != path
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_do_not_share_a_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, shared=True) as mine, replacing(path, shared=True) as theirs:
        assert mine != theirs
        mine.write_text("mine")
        theirs.write_text("theirs")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it holds a list, not an object"),
        ("[" * 100_000, "recursion"),
        (b"\xff{}", "codec can't decode"),
        (None, "No such file"),
    ],
    ids=["half", "a list", "deep", "bytes", "missing"],
)
def test_json_that_is_none(tmp_path: Path, text: str | bytes | None, words: str) -> None:
    path = tmp_path / "data.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=rf"data\.json is damaged \(.*{words}.*\): replace it"):
        read_json(path, "replace it")
