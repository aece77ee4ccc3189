"""Rounds of a fleet that end: deadlines, k of n, late replies; and the limits of owners."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import federation, linear
from fleets import posted

from rota import loop
from rota.engine import make
from rota.errors import BadInput
from rota.estimate import FedVarp, Mifa
from rota.estimate.memory import settle
from rota.experiment import Experiment
from rota.flower import engine as engine_of_fleets
from rota.flower import fleet as fleet_of_nodes
from rota.flower.fleet import FIRST, LOT, SLACK, Fleet, Rules
from rota.flower.letter import Letter, Refused
from rota.flower.limits import Limits
from rota.flower.present import Present
from rota.plan import Task, whole
from rota.running.check import check
from rota.sampling import Full
from rota.sampling.draw import everybody

SIZES = [5, 6, 7, 4]


def rounds(root: Path, rules: Rules, spoil: Any, number: int) -> tuple[list[dict[int, str]], Any]:
    """Each round's failures by client, and the engine. Node 0 has clients 0 and 2."""
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")], sampler=Full(), seed=1, rounds=50
    )
    engine = posted(experiment, root, 2, rules, spoil)
    state, found = loop.begin(experiment, engine), []
    for _ in range(number):
        state, line = loop.play(experiment, engine, state)
        found.append({each["client"]: each["reason"] for each in line["failures"]})
    return found, engine


def silent(node: int, reply: Letter) -> Letter | None:
    return None if node == 0 else reply


def test_a_deadline(tmp_path: Path) -> None:
    (found,), _ = rounds(tmp_path, Rules(deadline=0.3), silent, 1)
    assert found == dict.fromkeys([0, 2], "no reply within 0.3 seconds")


class Clock:
    """A clock that goes on only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_server_that_waits_for_long_looks_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes time of the SuperLink, and of clients on the same machine."""
    looks = {5.0: 0, 500.0: 0}
    for seconds in looks:
        monkeypatch.setattr(fleet_of_nodes, "time", Clock())
        experiment = Experiment([Task(linear, federation(SIZES), batch=3, name="a")])
        engine = posted(experiment, tmp_path / f"{seconds}", 2, Rules(deadline=seconds), silent)
        wire: Any = engine.fleet.wire
        found, replies = 0, wire.replies

        def counted(keys: Any, replies: Any = replies) -> Any:
            nonlocal found
            found += 1
            return replies(keys)

        wire.replies = counted
        job = whole(engine.initial(), everybody(experiment.shares), 1)
        assert sum(not chunk.reason[0] for chunk in engine.train(job)) == 2  # of the other node
        looks[seconds] = found
    assert 80 < looks[5.0] < 260
    assert looks[500.0] < 1200


def test_k_of_n(tmp_path: Path) -> None:
    """A round that has enough rows does not wait for the rest."""
    (found,), _ = rounds(tmp_path, Rules(deadline=60, enough=0.5), silent, 1)
    assert found == dict.fromkeys([0, 2], "the round did not wait for it")


def keep_first(kept: list[Letter]) -> Any:
    """Keep back the first reply of node 0."""

    def spoil(node: int, reply: Letter) -> Letter | None:
        if node == 0 and not kept:
            kept.append(reply)
            return None
        return reply

    return spoil


def test_a_late_reply_is_counted_and_dropped(tmp_path: Path) -> None:
    kept: list[Letter] = []
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")], sampler=Full(), seed=1
    )
    engine = posted(experiment, tmp_path, 2, Rules(deadline=0.5), keep_first(kept))
    state = loop.begin(experiment, engine)
    state, line = loop.play(experiment, engine, state)
    assert {each["client"] for each in line["failures"]} == {0, 2}
    wire: Any = engine.fleet.wire
    ((key, _),) = engine.fleet.late.items()
    wire.box[key] = kept[0]
    state, line = loop.play(experiment, engine, state)
    assert not line["failures"]
    assert line["models"]["a"]["trained"] == 4
    assert engine.fleet.counts["late"] == 1
    assert not engine.fleet.late


def test_a_memory_learns_from_a_late_reply(tmp_path: Path) -> None:
    """MIFA remembers the update that came too late as if it had come in time; a sum drops it."""
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")],
        sampler=Full(),
        estimator=Mifa(),
        seed=1,
    )
    kept: list[Letter] = []
    engine = posted(experiment, tmp_path / "late", 2, Rules(deadline=0.5), keep_first(kept))
    plain = posted(experiment, tmp_path / "plain", 2)
    wire: Any = engine.fleet.wire
    state, whole = loop.begin(experiment, engine), loop.begin(experiment, plain)
    state, line = loop.play(experiment, engine, state)
    whole, _ = loop.play(experiment, plain, whole)
    assert {each["client"] for each in line["failures"]} == {0, 2}
    memory, full = (each.policies["estimator"] for each in (state, whole))
    settle(memory), settle(full)  # type: ignore[func-returns-value]
    lost, others = [0, 2], [1, 3]
    assert not memory["memory.0"][lost].any()
    assert torch.equal(memory["memory.0"][others], full["memory.0"][others])
    (key,) = engine.fleet.late
    wire.box[key] = kept[0]
    engine.fleet.wait(lambda: bool(engine.fleet.overdue), 10)
    for _ in engine.fleet._replies({}):
        pass
    memory = engine.late(experiment.estimator, memory)
    settle(memory)
    assert torch.equal(memory["memory.0"], full["memory.0"])
    assert torch.equal(memory["norm"], full["norm"])
    assert engine.fleet.counts["remembered"] == 2
    assert not engine.fleet.overdue
    wire.box[key] = kept[0]  # a second time it is nobody's reply
    for _ in engine.fleet._replies({}):
        pass
    assert not engine.fleet.overdue


def test_a_late_reply_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")],
        sampler=Full(),
        estimator=FedVarp(),
        seed=1,
    )
    kept: list[Letter] = []
    engine = posted(experiment, tmp_path, 2, Rules(deadline=0.5), keep_first(kept))
    wire: Any = engine.fleet.wire
    state, _ = loop.play(experiment, engine, loop.begin(experiment, engine))
    (key,) = engine.fleet.late
    wire.box[key] = kept[0]
    state, line = loop.play(experiment, engine, state)
    assert not line["failures"]
    assert len(engine.fleet.overdue) == 1
    settle(state.policies["estimator"])
    before = state.policies["estimator"]["memory.0"].clone()
    after = engine.late(experiment.estimator, state.policies["estimator"])
    settle(after)
    assert torch.equal(after["memory.0"], before)
    assert not engine.fleet.counts["remembered"]


def test_who_is_away_is_not_drawn_and_counts_more_when_it_is_back(tmp_path: Path) -> None:
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")], sampler=Full(), seed=1
    )
    engine = posted(experiment, tmp_path, 2)
    fleet, wire = engine.fleet, cast(Any, engine.fleet.wire)
    experiment = experiment.using(availability=Present(experiment.availability, fleet, engine.ids))
    check(experiment)
    state, weights = loop.begin(experiment, engine), []
    for there in ([0, 1], [1], [1], [0, 1]):  # node 0 has clients 0 and 2
        wire.nodes = lambda there=there: there
        fleet.refresh()
        fleet.offline = dict.fromkeys(fleet.offline, -1e9)  # for longer than a moment
        now = state.round + 1
        shares, _ = experiment.availability.step(
            state.policies["availability"], state.shares, 1, now
        )
        weights.append((shares / experiment.shares)[0].tolist())
        state, line = loop.play(experiment, engine, state)
        assert not line["failures"]
        assert line["models"]["a"]["trained"] == 2 * len(there)
    assert weights[:3] == [[1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1]]
    assert weights[3] == [2, 1, 2, 1]  # it was there in two of four rounds


def test_a_node_that_is_new_is_judged_by_the_speed_that_it_told(tmp_path: Path) -> None:
    wire: Any = None
    fleet = Fleet(wire, machines={1: {"gflops": 20.0}, 2: {"gflops": 5.0}, 3: {"gflops": 0.0}})
    assert fleet.usual(2) is None  # nobody has replied yet
    fleet.times[1] += [3.0, 2.0, 4.0]
    assert fleet.usual(1) == 3.0
    assert fleet.usual(2) == 12.0
    assert fleet.usual(3) is None


def test_a_client_that_keeps_failing_is_put_aside_for_a_while(tmp_path: Path) -> None:
    def broken(node: int, reply: Letter) -> Letter | str:
        return "it is broken" if node == 0 else reply

    found, engine = rounds(tmp_path, Rules(strikes=2, rest=2), broken, 6)
    aside = "put aside until round 4, because it kept failing"
    reasons = ["it is broken", "it is broken", aside, aside, "it is broken", "it is broken"]
    assert [each[0] for each in found] == [each[2] for each in found] == reasons
    assert all(each.keys() == {0, 2} for each in found)
    assert len(engine.fleet.wire.sent) == 2 + 6 + 4  # queries, the other node, this one


def test_one_success_begins_the_count_again(tmp_path: Path) -> None:
    calls = [0]

    def now_and_then(node: int, reply: Letter) -> Letter | str:
        calls[0] += node == 0
        return "it is broken" if node == 0 and calls[0] % 2 else reply

    found, _ = rounds(tmp_path, Rules(strikes=2), now_and_then, 6)
    assert [bool(each) for each in found] == [True, False] * 3


def test_the_deadline_comes_from_what_was_measured() -> None:
    rules = Rules(patience=3, quantile=1)
    assert rules.limit([2.0, 4.0]) == 12 + SLACK
    assert rules.limit([2.0, None]) == FIRST  # somebody's speed is not known yet
    assert replace(rules, quantile=0.5).limit([1.0, 3.0, 50.0]) == 9 + SLACK
    assert replace(rules, deadline=7.0).limit([1.0, None]) == 7
    for wrong in ({"deadline": 0}, {"patience": 0.5}, {"enough": 0}, {"quantile": 1.1}):
        with pytest.raises(BadInput):
            replace(rules, **wrong).check()


def at(hour: int, day: int = 1) -> datetime.datetime:
    return datetime.datetime(2030, 1, day, hour, 30)


@pytest.mark.parametrize(
    ("hours", "good", "bad"),
    [("22-6", (22, 23, 0, 5), (6, 12, 21)), ("9-17", (9, 16), (8, 17, 0)), ("0-24", (0, 23), ())],
)
def test_hours(hours: str, good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    for hour in good:
        Limits(hours, clock=lambda hour=hour: at(hour)).check("train", 1)  # type: ignore[misc]
    for hour in bad:
        limits = Limits(hours, clock=lambda hour=hour: at(hour))  # type: ignore[misc]
        limits.check("query", 1)
        with pytest.raises(Refused, match="hours"):
            limits.check("train", 1)
    with pytest.raises(BadInput, match="two hours"):
        Limits("nine to five")


def test_bytes_per_day(tmp_path: Path) -> None:
    today = [1]
    file = tmp_path / "traffic.json"
    limits = Limits(bytes=100, clock=lambda: at(12, today[0]), file=file)
    limits.check("train", 60)
    limits.count(60)
    with pytest.raises(Refused, match="100 bytes per day"):
        limits.check("train", 60)
    again = Limits(bytes=100, clock=lambda: at(12, today[0]), file=file)
    with pytest.raises(Refused, match="100 bytes per day"):  # a restart begins no new day
        again.check("train", 60)
    today[0] = 2
    limits.check("train", 60)
    again.check("train", 60)
    file.write_text("{")
    Limits(bytes=100, clock=lambda: at(12, today[0]), file=file).check("train", 60)


def test_a_battery(tmp_path: Path) -> None:
    limits = Limits(battery=50, power=tmp_path)
    limits.check("train", 1)  # no battery
    (tmp_path / "BAT0").mkdir()
    for charge, state in ((80, "Discharging"), (30, "Charging")):
        (tmp_path / "BAT0" / "capacity").write_text(f"{charge}\n")
        (tmp_path / "BAT0" / "status").write_text(f"{state}\n")
        limits.check("train", 1)
    (tmp_path / "BAT0" / "status").write_text("Discharging\n")
    with pytest.raises(Refused, match="at 30 %"):
        limits.check("train", 1)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")], sampler=Full(), seed=1
    )
    engine = posted(experiment, tmp_path)
    wire: Any = engine.fleet.wire
    wire.works[1].memory = 100.0
    _, line = loop.play(experiment, engine, loop.begin(experiment, engine))
    reasons = {each["client"]: each["reason"] for each in line["failures"]}
    assert reasons.keys() == {1, 3}
    assert all("would not fit" in why or "may use" in why for why in reasons.values())


def test_the_servers_memory_does_not_grow_with_the_cohort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few letters are under way, and each reply has the rows of few clients, of however many."""
    data = federation([4] * 60)
    experiment = Experiment([Task(linear, data, batch=4, name="a")], sampler=Full(), seed=1)
    rules = Rules(ordered=True)
    plain = make("sequential", experiment, "cpu")
    whole, _ = loop.play(experiment, plain, loop.begin(experiment, plain))
    each = whole.models[0].nbytes
    monkeypatch.setattr(engine_of_fleets, "PORTION", 3 * each)
    for nodes in (3, 20):
        engine = posted(experiment, tmp_path / str(nodes), nodes, rules)
        wire: Any = engine.fleet.wire
        send, most = wire.send, [0, 0]

        def watched(letters: Any, seconds: float) -> Any:
            keys = send(letters, seconds)  # noqa: B023
            most[0] = max(most[0], len(wire.box))  # noqa: B023
            rows = [len(reply.head["rows"]) for reply in wire.box.values()]  # noqa: B023
            most[1] = max(most[1], *rows)  # noqa: B023
            return keys

        wire.send = watched
        state, line = loop.play(experiment, engine, loop.begin(experiment, engine))
        assert not line["failures"]
        assert most == [min(nodes, LOT), 3]
        assert torch.equal(state.models[0].params, whole.models[0].params)


def test_a_client_that_moves_to_another_node(tmp_path: Path) -> None:
    """As long as the old node is there it has the client; then the new one is asked again."""
    experiment = Experiment(
        [Task(linear, federation(SIZES), batch=3, name="a")], sampler=Full(), seed=1
    )
    engine = posted(experiment, tmp_path, 2)
    fleet, wire = engine.fleet, cast(Any, engine.fleet.wire)
    wire.works.append(wire.works[0])
    fleet.wait(lambda: len(fleet.members) == 3, 10)
    assert [fleet.home[name] for name in "0123"] == [0, 1, 0, 1]
    wire.nodes = lambda: [1, 2]
    fleet.wait(lambda: fleet.home["0"] == 2, 10)
    assert [fleet.home[name] for name in "0123"] == [2, 1, 2, 1]
    wire.nodes = lambda: [0, 1, 2]  # what comes back finds its place taken
    fleet.wait(lambda: len(fleet.members) == 3, 10)
    assert fleet.home["0"] == 2
