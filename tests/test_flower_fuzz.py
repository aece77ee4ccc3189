"""Replies and requests that may be anything: none reaches a model, none ends a node or a server."""

from __future__ import annotations

import copy
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear
from fleets import Post, posted

from rota.admission import admit
from rota.channel import CHANNELS
from rota.experiment import Experiment
from rota.flower.fleet import Answer, Ask
from rota.flower.letter import LOSSES, Letter, Refused, plain, read_head
from rota.plan import Job, Seen, Task, whole
from rota.sampling.draw import everybody

CASES = int(os.environ.get("ROTA_CASES", "400"))
SIZES = [5, 6, 7, 4]
ODD = (None, True, -1, 0, 1, 2, 3, 1e308, float("nan"), "", "x", "1", [], {}, [[]], [-1], {"a": 1})
"""What a fuzzed place of a JSON text may hold. No number is so large that work takes long."""
LYING = (*ODD, float("inf"), 10**30, 10**400, 1e15, "\ud800\x1b[2J\n")
"""The same in a reply, whose numbers nobody works with."""


def engine(root: Path, channel: str = "none") -> tuple[Any, Job, Post]:
    """An engine with two nodes, its job, and the wire."""
    task = Task(linear, federation(SIZES), batch=3, name="a")
    experiment = Experiment([task], seed=1, channel=CHANNELS[channel]())
    remote = posted(experiment, root)
    wire: Any = remote.fleet.wire
    job = whole(remote.initial(), everybody(experiment.shares), 2)
    return remote, replace(job, channel=experiment.channel), wire


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(place for key, each in items for place in places(each, (*path, key)))]


def changed(
    head: dict[str, Any], dice: random.Random, odd: tuple[Any, ...] = ODD
) -> dict[str, Any]:
    """A JSON object with one place changed, removed or doubled."""
    new = copy.deepcopy(head)
    *path, last = dice.choice(places(new)[1:])
    inside: Any = new
    for key in path:
        inside = inside[key]
    what = dice.randrange(3)
    if what == 0 and isinstance(inside, dict):
        del inside[last]
    elif what == 1 and isinstance(inside, list):
        inside.insert(last, inside[last])
    else:
        inside[last] = dice.choice(odd)
    return new


def spoilt(part: bytes, dice: random.Random) -> bytes:
    """Bytes of tensors with their header, or their length, changed."""
    end = 8 + int.from_bytes(part[:8], "little")
    what = dice.randrange(4)
    if what == 0:
        return part[: dice.randrange(len(part) + 1)]
    if what == 1:
        return part + dice.randbytes(dice.randrange(1, 9))
    if what == 2:
        return dice.randbytes(dice.randrange(60))
    place = dice.randrange(min(end, len(part)))
    return part[:place] + bytes([dice.randrange(256)]) + part[place + 1 :]


def fuzzed(letter: Letter, dice: random.Random, odd: tuple[Any, ...] = ODD) -> Letter:
    """A letter with its text or one of its parts changed."""
    parts = {name: part for name, part in letter.parts.items() if part}
    if parts and dice.random() < 0.4:
        name = dice.choice(list(parts))
        return Letter(letter.kind, letter.head, {**letter.parts, name: spoilt(parts[name], dice)})
    return Letter(letter.kind, changed(letter.head, dice, odd), letter.parts)


@pytest.mark.parametrize("channel", CHANNELS)
def test_replies(channel: str, tmp_path: Path) -> None:
    """A row of a fuzzed reply is the row that was sent, or a failed one; no time is made up."""
    remote, job, wire = engine(tmp_path, channel)
    asks, _ = remote._asks(job, "train", {})
    keys = wire.send([(ask.node, ask.make(ask.node)) for ask in asks], 10)
    replies = dict(wire.replies(keys))
    dice, used = random.Random(0), 0
    for case in range(CASES):
        ask: Ask = asks[case % len(asks)]
        ask.begun = time.monotonic() - 1.0
        reply = replies[keys[case % len(asks)]]
        assert isinstance(reply, Letter)
        good = {int(c.rows[0]): c for c in remote._read(job, Answer(ask, reply, 1.0))}
        assert not any(chunk.reason[0] for chunk in good.values())
        try:
            letter = fuzzed(reply, dice, LYING)
            letter = Letter("reply", read_head(letter.text), letter.parts)
        except Refused:
            continue
        rows, seen = [], Seen.nothing(len(job.plan))
        for chunk in remote._read(job, Answer(ask, letter, 1.0)):
            rows.append(int(chunk.rows[0]))
            assert chunk.reason[0].isprintable()
            assert not chunk.costs.seconds[0] > 60
            admitted = admit(chunk, job, seen)
            assert admitted is not None
            if not admitted.reason[0]:
                used += 1
                assert torch.equal(chunk.update, good[rows[-1]].update)
                assert torch.equal(chunk.buffers, good[rows[-1]].buffers)
        assert sorted(rows) == ask.rows.tolist()  # each row once, whatever the reply says
    assert used  # most changes leave some rows as they are


def test_losses(tmp_path: Path) -> None:
    """The same of what clients say of their losses."""
    remote, job, wire = engine(tmp_path)
    dice = random.Random(2)
    good = remote.losses(job)
    assert good.ok.all()

    def spoil(node: int, reply: Letter) -> Letter | str:
        letter = fuzzed(reply, dice, LYING) if node == 0 else reply
        try:
            return Letter("reply", read_head(letter.text), letter.parts)
        except Refused as why:
            return plain(why)  # as the wire does

    wire.spoil = spoil
    mine = set(asked.rows.tolist()) if (asked := remote._asks(job, "train", {})[0][0]) else set()
    for _ in range(CASES // 4):
        seen = remote.losses(job)
        assert all(reason.isprintable() for reason in seen.reason)
        others = [row for row in range(len(job.plan)) if row not in mine]
        assert (seen.loss[others] == good.loss[others]).all()
        assert not (seen.seconds > 60).any()
        assert np.isfinite(seen.loss[seen.ok]).all()


def test_requests(tmp_path: Path) -> None:
    """A node does the work or refuses it, and does sound work afterwards."""
    remote, job, wire = engine(tmp_path)
    asks, _ = remote._asks(job, "train", {})
    node = wire.works[asks[0].node]
    letters = [asks[0].make(asks[0].node), Letter("query", {"version": 1, "tasks": ["a"]})]
    asks, _ = remote._asks(job, LOSSES, {"examples": 2})
    letters.append(asks[0].make(asks[0].node))
    dice, refused, done = random.Random(1), 0, 0
    for case in range(CASES):
        letter = fuzzed(letters[case % 3], dice)
        try:
            read_head(letter.text)
            reply = node.answer(letter)
        except Refused:
            refused += 1
        else:
            read_head(reply.text)
            done += 1
    assert refused
    assert done
    fine = node.answer(letters[0])  # and it still works
    assert all(not row["reason"] for row in fine.head["rows"])


@pytest.mark.faults
def test_ten_thousand_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CASES", 10_000)
    for channel in CHANNELS:
        test_replies(channel, tmp_path / channel)
    test_losses(tmp_path / "losses")
    test_requests(tmp_path / "requests")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"version": 2}', "[" * 100_000, '{"version": "1"}', 7]
)
def test_texts_that_are_no_letters(text: Any) -> None:
    with pytest.raises(Refused):
        read_head(text)


def test_a_reply_counts_for_its_own_rows_alone(tmp_path: Path) -> None:
    """What one node says of another node's rows is dropped."""
    remote, job, wire = engine(tmp_path)
    asks, _ = remote._asks(job, "train", {})
    keys = wire.send([(ask.node, ask.make(ask.node)) for ask in asks], 10)
    replies = dict(wire.replies(keys))
    other = replies[keys[1]]
    assert isinstance(other, Letter)
    chunks = list(remote._read(job, Answer(asks[0], other, 1.0)))
    assert [int(chunk.rows[0]) for chunk in chunks] == asks[0].rows.tolist()
    assert all(chunk.reason[0] for chunk in chunks)


def test_nobody_can_know_the_number_of_anothers_letter() -> None:
    """Flower numbers messages by what is in them, and takes replies from who knows the number."""
    pytest.importorskip("flwr")
    from rota.flower.records import to_records

    letter = Letter("train", {"version": 1})
    assert to_records(letter).object_id != to_records(letter).object_id
