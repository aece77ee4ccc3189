"""Watchers: each of them is told how a run begins, every round, and how it ends."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import federation, linear
from test_loop import fragile, sick

import rota
from rota.errors import BadInput
from rota.plan import Task
from rota.running.run import Interrupted
from rota.running.summary import Stuck
from rota.sampling import Full, Uniform


class Notes:
    """Writes down what it is told, and fails at one of the calls if it is asked to."""

    def __init__(self, fails_at: str = "", error: BaseException | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails_at, self.error = fails_at, error or RuntimeError("the tracker broke")

    def note(self, what: str, news: Any) -> None:
        self.told.append((what, news))
        if what == self.fails_at:
            raise self.error

    def begin(self, config: dict[str, Any]) -> None:
        self.note("begin", config)

    def round(self, record: dict[str, Any]) -> None:
        self.note(f"round {record['round']}", record)

    def end(self, ended: dict[str, Any] | BaseException) -> None:
        self.note("end", ended)

    @property
    def calls(self) -> list[str]:
        return [what for what, _ in self.told]

    @property
    def ended(self) -> Any:
        assert self.calls[-1] == "end"
        assert self.calls.count("end") == 1
        return self.told[-1][1]


def task() -> Task:
    return Task(linear, federation([6, 7, 8]))


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal it is lines; the last round is always among them."""
    play([rota.Progress(), rota.Progress("mine")])
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["blobs", "mine"]
    assert all("round 3/3  accuracy " in line and "2 clients" in line for line in lines)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    play(rota.Progress())
    assert "round 3/3" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="broke"):  # a run that ends early leaves nothing open
        play([rota.Progress(), Notes("round 2")])
    assert "round" in capsys.readouterr().err


def play(watch: Any, rounds: int = 3, **more: Any) -> rota.Run:
    return rota.run([task()], Uniform(2), rounds=rounds, watch=watch, **more)


@pytest.mark.parametrize("out", [False, True], ids=["in memory", "in a folder"])
def test_a_watcher_is_told_everything(tmp_path: Path, out: bool) -> None:
    notes = Notes()
    run = play(notes, out=tmp_path / "run" if out else None)
    assert notes.calls == ["begin", "round 1", "round 2", "round 3", "end"]
    assert [record for _, record in notes.told[1:-1]] == run.records
    assert notes.ended == run.summary
    config = notes.told[0][1]
    assert (config["rounds"], config["sampler"]["name"]) == (3, "uniform")
    if out:
        assert config == tomllib.loads((tmp_path / "run" / "config.toml").read_text())


def test_functions_and_watchers_together() -> None:
    """In the order in which they are given; a function is called with each round's record."""
    order: list[Any] = []
    one, two = Notes(), Notes()
    one.note = lambda what, news: order.append(("one", what))  # type: ignore[method-assign]
    play((one, lambda record: order.append(("function", record["round"])), two), rounds=1)
    told = [("one", "begin"), ("one", "round 1"), ("function", 1), ("one", "end")]
    assert order == told
    assert two.calls == ["begin", "round 1", "end"]
    seen: list[Any] = []
    run = play(seen.append)
    assert seen == run.records
    assert play(None).records == play([]).records == run.records


def test_a_resumed_run_begins_again_and_tells_the_rounds_that_are_left(tmp_path: Path) -> None:
    first, again, more, last = (Notes() for _ in range(4))
    stopping = Notes("round 2", KeyboardInterrupt())
    with pytest.raises(Interrupted):
        play([stopping, first], out=tmp_path)
    play(again, out=tmp_path, resume=True)
    play(more, rounds=4, out=tmp_path, resume=True)
    run = play(last, rounds=4, out=tmp_path, resume=True)
    assert first.calls == ["begin", "round 1", "round 2", "end"]
    assert again.calls == ["begin", "round 3", "end"]
    assert more.calls == ["begin", "round 4", "end"]
    assert [notes.told[0][1]["rounds"] for notes in (first, again, more)] == [3, 3, 4]
    assert last.calls == ["begin", "end"]
    assert last.ended == run.summary
    assert {**last.ended, "wall_seconds": 0} == {**more.ended, "wall_seconds": 0}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the screen broke")], ids=repr)
@pytest.mark.parametrize("out", [False, True], ids=["in memory", "in a folder"])
def test_all_are_told_of_an_interrupted_run(
    tmp_path: Path, place: int, error: BaseException, out: bool
) -> None:
    """Whichever of them it is that fails; and the round that it failed at can be resumed from."""
    notes = [Notes(), Notes()]
    notes.insert(place, Notes("round 2", error))
    raised = Interrupted if isinstance(error, KeyboardInterrupt) else RuntimeError
    with pytest.raises(raised):
        play(notes, out=tmp_path / "run" if out else None)
    for each in notes:
        assert each.calls == ["begin", "round 1", "round 2", "end"]
        assert each.ended is error
    if out:
        rest = Notes()
        play(rest, out=tmp_path / "run", resume=True)
        assert rest.calls == ["begin", "round 3", "end"]


def test_all_are_told_of_a_run_that_is_stuck() -> None:
    """The last round, too, which is the one that shows it."""
    notes = [Notes(), Notes()]
    with pytest.raises(Stuck) as stuck:
        rota.run([Task(fragile, sick([0, 1, 2]))], Full(), rounds=2, watch=notes)
    for each in notes:
        assert each.calls == ["begin", "round 1", "round 2", "end"]
        assert each.told[2][1]["failures"][0]["reason"] == "the update is not finite"
        assert each.ended is stuck.value


def test_all_are_told_when_an_engine_or_a_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(None, out=tmp_path)
    (tmp_path / "rounds.jsonl").write_text("")
    notes = Notes()
    with pytest.raises(BadInput, match="has 0 lines"):
        play(notes, out=tmp_path, resume=True)
    assert notes.calls == ["begin", "end"]
    assert isinstance(notes.ended, BadInput)

    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(rota.engine.Sequential, "train", broken)
    notes = Notes()
    with pytest.raises(MemoryError):
        play(notes, engine="sequential")
    assert notes.calls == ["begin", "end"]
    assert isinstance(notes.ended, MemoryError)


def test_a_run_that_may_not_begin_tells_nobody(tmp_path: Path) -> None:
    play(None, out=tmp_path)
    notes = Notes()
    with pytest.raises(BadInput, match="already in use"):
        play(notes, out=tmp_path)
    assert notes.told == []


def test_one_that_fails_at_the_beginning_or_the_end_keeps_it_from_no_other() -> None:
    notes = [Notes(), Notes("begin"), Notes()]
    with pytest.raises(RuntimeError, match="the tracker broke"):
        play(notes)
    assert [each.calls for each in notes] == [["begin", "end"], ["begin"], []]
    assert notes[0].ended is notes[1].error
    notes = [Notes("end"), Notes(), Notes("end", ValueError("so did the other"))]
    with pytest.raises(ValueError, match="so did the other"):
        play(notes, rounds=1)
    assert [each.calls for each in notes] == [["begin", "round 1", "end"]] * 3
    assert notes[1].ended["rounds"] == 1


@pytest.mark.parametrize("wrong", [3, "print", [print, 3], Notes, [None]], ids=repr)
def test_what_cannot_watch_is_refused(wrong: Any) -> None:
    said = "give functions of a round's record, or objects with begin, round and end"
    with pytest.raises(BadInput, match=f"watch has a (int|str|type|NoneType): {said}"):
        play(wrong)
