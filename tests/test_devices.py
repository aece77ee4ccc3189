"""Devices: how long a row takes, how that changes from round to round, and files of devices."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call
from torch import nn

import rota
from rota.cli import profile
from rota.engine.footprint import footprint
from rota.errors import BadInput
from rota.estimate import FedAvg
from rota.plan import Task
from rota.sampling import Full
from rota.submodel import Fixed
from rota.world.devices import DEVICES, PHONES, Conditions, Devices, Phones, Profile, Trace
from rota.world.trace import NUMBERS, USUAL

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "devices.jsonl"


def make(name: str, **options: Any) -> Any:
    return DEVICES[name](**({"file": EXAMPLE} if name == "trace" else {}), **options)


def computing(profile: Profile, clients: int, now: int) -> Any:
    """The seconds of one GFLOP on each client's device."""
    who = np.arange(clients)
    return profile.seconds(who, np.full(clients, 1e9), np.zeros(clients), now)[1]


@pytest.mark.parametrize("name", DEVICES)
def test_every_member_has_a_device_for_each_client(name: str) -> None:
    devices = make(name, load=(0.5,), busy=0.5, noise=0.1, spell=3)
    devices.check()
    for clients in (1, 7, 40):
        first, again = (devices.profile(clients, 3) for _ in range(2))
        for now in (1, 3, 4, 30):
            seconds = computing(first, clients, now)
            assert seconds.shape == (clients,)
            assert (np.isfinite(seconds) & (seconds > 0)).all()
            np.testing.assert_array_equal(seconds, computing(again, clients, now))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_file_of_devices_is_a_file(tmp_path: Path, kind: str) -> None:
    """Or a run would wait for ever, or fill its memory."""
    path = Path(os.devnull) if kind == "device" else tmp_path / "devices.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(BadInput, match=r"cannot read the devices of .* \(it is not a file\)"):
        Trace(file=path).profile(2, 0)


@pytest.mark.parametrize("name", DEVICES)
def test_a_clients_time_does_not_depend_on_the_others(name: str) -> None:
    profile = make(name, load=(0.25, 0.75), busy=0.5, noise=0.1, spell=2).profile(50, 1)
    for now in (1, 5):
        every = computing(profile, 50, now)
        some = np.array([41, 3, 3, 17])
        few = profile.seconds(some, np.full(4, 1e9), np.zeros(4), now)[1]
        np.testing.assert_array_equal(few, every[some])


def test_seconds_are_work_bytes_and_one_round_trip() -> None:
    profile = Devices(gflops=2.0, mbps=8.0, latency=0.25).profile(3, 0)
    work, nbytes = np.array([4e9, 0.0, 4e9]), np.array([3e6, 3e6, 0.0])
    seconds, alone = profile.seconds(np.arange(3), work, nbytes, 1)
    assert alone.tolist() == [2.0, 0.0, 2.0]
    assert seconds.tolist() == [2.0 + 3.0 + 0.25, 3.0 + 0.25, 2.0]


def test_a_spread_of_four() -> None:
    speed = make("spread-of-4", gflops=4.0).profile(9, 5).speed / 1e9
    assert sorted(speed)[:: len(speed) - 1] == pytest.approx([2.0, 8.0])
    np.testing.assert_allclose(np.diff(np.log(sorted(speed))), np.log(4) / 8)
    assert speed.tolist() != make("spread-of-4", gflops=4.0).profile(9, 6).speed.tolist()


def test_five_phones_take_turns() -> None:
    speed = Phones(gflops=3.0).profile(12, 0).speed / 1e9
    peak = np.array([sum(ghz * flops for ghz, flops in cores) for cores in PHONES.values()])
    assert [len(cores) for cores in PHONES.values()] == [8] * 5
    assert np.median(speed[:5]) == 3.0
    np.testing.assert_allclose(speed, 3.0 * (peak / np.median(peak))[np.arange(12) % 5])
    # what docs/devices.md says
    slowest, following, *_, fastest = sorted(peak)
    page = " ".join((ROOT / "docs" / "devices.md").read_text().split())
    assert f"{100 * (1 - slowest / following):.0f} % slower than the next one" in page
    assert f"{fastest / slowest:.1f} times as fast" in page


# --- conditions


def test_background_load_comes_and_goes_in_spells() -> None:
    loads, clients = (0.25, 0.5, 0.75), 4000
    quiet = computing(Devices(spread=0.3).profile(clients, 2), clients, 1)
    profile = Devices(spread=0.3, load=loads, busy=0.3, spell=5).profile(clients, 2)
    shares = []
    for now in range(1, 31):
        left = quiet / computing(profile, clients, now)
        shares.append(1 - left)
    assert not np.any(shares[:5])
    for start in range(5, 30, 5):
        for now in range(start, start + 5):
            np.testing.assert_array_equal(shares[now], shares[start])
        assert not np.array_equal(shares[start], shares[start - 1])
        found = np.round(shares[start], 6)
        assert set(found.tolist()) == {0.0, *loads}
        for level in loads:  # five standard deviations
            assert abs((found == level).mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / clients)


def test_noise_is_lognormal_and_new_in_every_round() -> None:
    clients = 20000
    profile = Devices(noise=0.05).profile(clients, 0)
    first, second = (np.log(computing(profile, clients, now) * 5.0) for now in (1, 2))
    for noise in (first, second):
        assert abs(noise.mean()) < 5 * 0.05 / np.sqrt(clients)
        assert noise.std() == pytest.approx(0.05, rel=0.03)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(clients)
    seconds, alone = profile.seconds(np.arange(2), np.full(2, 5e9), np.full(2, 2.5e6), 1)
    np.testing.assert_allclose(seconds, 2 * alone)  # the link's time is noisy, too


def test_a_run_takes_longer_under_load() -> None:
    clocks = []
    for devices in (Devices(gflops=1e-5), Devices(gflops=1e-5, load=(0.5,), busy=1.0, spell=3)):
        task = Task(linear, federation([12] * 4))
        run = rota.run([task], Full(), rounds=5, devices=devices, engine="sequential")
        assert run.summary["failures"] == 0
        clocks.append(np.diff([0.0, *run.rounds["seconds"]]))
    np.testing.assert_allclose(clocks[0][:3], clocks[1][:3])
    assert (clocks[1][3:] > 1.5 * clocks[0][3:]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load": (1.0,)}, "devices.load is [1.0]: give shares of a device's speed"),
        ({"load": (0.0, 0.5)}, "devices.load is [0.0, 0.5]: give shares"),
        ({"load": 0.5}, "devices.load is 0.5, but it takes a list, such as [0.5]"),
        ({"busy": 1.5}, "devices.busy is 1.5: it must be from 0 to 1"),
        ({"spell": 0}, "devices.spell is 0 rounds: it must be at least 1"),
        ({"noise": -0.1}, "devices.noise is -0.1: it must be from 0 to 20"),
    ],
)
@pytest.mark.parametrize("name", DEVICES)
def test_conditions_that_mean_nothing(name: str, options: dict[str, Any], words: str) -> None:
    task = Task(linear, federation([12] * 4))
    with pytest.raises(BadInput) as caught:
        rota.run([task], Full(), rounds=1, devices=make(name, **options))
    assert words in str(caught.value)


@pytest.mark.parametrize("latency", [-1.0, 1e9, float("nan")])
def test_latency_that_no_clock_can_tell(latency: float) -> None:
    for name in ("lognormal", "spread-of-4", "phones"):
        with pytest.raises(BadInput, match=r"devices.latency is .*: it must be from 0 to 1e\+06"):
            make(name, latency=latency).check()


# --- files of devices


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "fleet.jsonl"
    told = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(told), encoding="utf-8")
    return file


def test_the_example_is_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "devices.md").read_text()
    assert f"```json\n{EXAMPLE.read_text()}```" in page
    profile = Trace(file=str(EXAMPLE)).profile(6, 0)
    assert computing(profile, 6, 1) == pytest.approx([0.4, 0.1, 0.125, 0.25, 0.4, 0.1])
    assert computing(profile, 6, 9) == pytest.approx([0.4, 0.1, 0.125, 0.25, 0.4, 0.1])
    assert computing(profile, 6, 10) == pytest.approx([0.4, 0.1, 0.25, 0.25, 0.4, 0.1])
    assert computing(profile, 6, 20) == pytest.approx([0.4, 0.1, 0.125, 0.25, 0.4, 0.1])
    nbytes = np.array([1e6])
    (before,), _ = profile.seconds(np.array([3]), np.zeros(1), nbytes, 14)
    (after,), _ = profile.seconds(np.array([3]), np.zeros(1), nbytes, 15)
    assert (before, after) == pytest.approx((0.4, 8.3))


def number(key: str) -> st.SearchStrategy[float]:
    low, high = NUMBERS[key]
    return st.floats(low, high)


SOME = st.fixed_dictionaries({}, optional={key: number(key) for key in NUMBERS})
CHANGES = st.lists(st.tuples(st.integers(1, 60), SOME), max_size=4, unique_by=lambda each: each[0])


@given(st.lists(st.tuples(number("gflops"), SOME, CHANGES), min_size=1, max_size=4), st.data())
def test_the_numbers_of_a_file_hold_from_their_rounds_on(
    tmp_path_factory: pytest.TempPathFactory, fleet: list[Any], data: st.DataObject
) -> None:
    """Against a walk through each device's changes, one after the other."""
    lines = []
    for gflops, given_, changes in fleet:
        told = [{"round": first, **values} for first, values in sorted(changes, key=lambda c: c[0])]
        lines.append({**given_, "gflops": gflops, **({"changes": told} if told else {})})
    profile = Trace(file=write(tmp_path_factory.mktemp("fleet"), *lines)).profile(9, 0)
    now, client = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 8))
    values = dict(USUAL)
    line = lines[client % len(lines)]
    for entry in (line, *(c for c in line.get("changes", []) if c["round"] <= now)):
        values |= {key: entry[key] for key in NUMBERS if key in entry}
    seconds, alone = profile.seconds(np.array([client]), np.array([1e9]), np.array([1e6]), now)
    expected = 1 / values["gflops"] / (1 - values["load"])
    assert alone[0] == pytest.approx(expected)
    assert seconds[0] == pytest.approx(expected + 8 / values["mbps"] + values["latency"])


MISTAKES: dict[str, tuple[tuple[Any, ...], str]] = {
    "no line": ((), "has no device: give a line such as"),
    "only blank lines": (("", "  "), "has no device"),
    "not JSON": ((' {"gflops": 1}', "gflops=1"), "line 2 is not JSON: Expecting value"),
    "too deep": (("[" * 100_000,), "line 1 is not JSON"),
    "a list": (([1, 2],), "line 1 is [1, 2]: give an object in {...} per device"),
    "no speed": (({"mbps": 1},), "line 1 has no 'gflops': give the device's speed in GFLOP/s"),
    "a wrong key": (
        ({"gflops": 1, "mpbs": 2},),
        "line 1 has an unknown key 'mpbs': did you mean 'mbps'?",
    ),
    "a text": (({"gflops": "5"},), "line 1: gflops is '5', but it takes a number from 1e-12"),
    "true": (({"gflops": True},), "gflops is true, but it takes a number"),
    "zero": (({"gflops": 0},), "gflops is 0, but it takes a number from 1e-12 to 1e+12"),
    "NaN": (('{"gflops": NaN}',), "gflops is nan, but it takes a number"),
    "infinity": (('{"gflops": 1, "mbps": Infinity}',), "mbps is inf, but it takes a number"),
    "huge": (('{"gflops": 1' + "0" * 400 + "}",), "gflops is 1000"),
    "all of it": (({"gflops": 1, "load": 1},), "load is 1, but it takes a number from 0 to 0.9"),
    "a number as name": (({"gflops": 1, "name": 5},), "name is 5, but it takes a string"),
    "changes": (
        ({"gflops": 1, "changes": {"round": 2}},),
        'changes are {\'round\': 2}: give a list such as [{"round": 20, "load": 0.5}]',
    ),
    "a change without a round": (
        ({"gflops": 1, "changes": [{"load": 0.5}]},),
        "a change has the round None: give whole numbers from 1 on, in ascending order",
    ),
    "round 0": (({"gflops": 1, "changes": [{"round": 0}]},), "a change has the round 0"),
    "half a round": (({"gflops": 1, "changes": [{"round": 1.5}]},), "has the round 1.5"),
    "backwards": (
        ({"gflops": 1, "changes": [{"round": 5}, {"round": 3}]},),
        "a change has the round 3",
    ),
    "twice": (({"gflops": 1, "changes": [{"round": 5}, {"round": 5}]},), "has the round 5"),
    "a wrong change": (
        ({"gflops": 1, "changes": [{"round": 5, "speed": 2}]},),
        "line 1 has an unknown key 'speed': known: gflops, latency, load, mbps, memory, round",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_in_a_file_is_one_sentence(mistake: str, tmp_path: Path) -> None:
    lines, words = MISTAKES[mistake]
    file = write(tmp_path, *lines)
    task = Task(linear, federation([12] * 4))
    with pytest.raises(BadInput) as caught:
        rota.run([task], Full(), rounds=1, devices=Trace(file=file))
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    for name, why in (
        ("nowhere", "No such file or directory"),
        ("", "it is not a file"),
        ("photo.jpg", "can't decode byte 0xff"),
        ("a\0b", "embedded null byte"),
    ):
        with pytest.raises(BadInput, match="cannot read the devices of") as caught:
            Trace(file=str(tmp_path / name)).check()
        assert why in str(caught.value)


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: str | bytes
) -> None:
    file = tmp_path_factory.mktemp("fleet") / "any.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    try:
        profile = Trace(file=file).profile(3, 0)
    except BadInput:
        return
    assert len(computing(profile, 3, 1)) == 3


def test_conditions_have_the_same_options_everywhere() -> None:
    assert all(issubclass(member, Conditions) for member in DEVICES.values())


# --- rota doctor --profile


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is 4 seconds later whenever it is read."""
    ticks = itertools.count(0.0, 4.0)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: next(ticks))


@pytest.mark.usefixtures("clock")
def test_the_profile_counts_as_the_virtual_clock_does(tmp_path: Path) -> None:
    """One pass of 8 clients takes 4 seconds on this clock, and more than one is not needed."""
    out = tmp_path / "fleet.jsonl"
    words = ("doctor", "--profile", "fedavg-digits", "--out", out)
    outcome = call(*words, "--set", "task.steps=2", "--json")
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    rows = {(row["engine"], row["width"]): row for row in found["rows"]}
    assert set(rows) == {(e, w) for e in ("sequential", "batched") for w in profile.WIDTHS}
    batch, steps = 10, 2
    for (_, width), row in rows.items():
        hidden = int(200 * width)
        forward = 2 * (64 * hidden + hidden * hidden + hidden * 10)
        assert row["seconds"] == pytest.approx(4.0 / 8)
        assert row["gflops"] == pytest.approx(3 * forward * batch * steps * 8 / 4.0 / 1e9)
    assert found["device"]["gflops"] == float(f"{rows['sequential', 1.0]['gflops']:.4g}")
    assert json.loads(out.read_text()) == found["device"]
    lines = call(*words).out.splitlines()
    assert len(lines) == 1 + len(rows) + 1
    assert len(out.read_text().splitlines()) == 2  # a line more
    speed = Trace(file=out).profile(2, 0).seconds(np.arange(2), np.full(2, 1e9), np.zeros(2), 1)[1]
    assert 1 / speed[0] == pytest.approx(found["device"]["gflops"])


def test_mistakes_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.0)
    for words, sentence in (
        (("--set", "task.lr=1"), "--set, --allow and --out need --profile: name a recipe"),
        (("--out", tmp_path / "a"), "--set, --allow and --out need --profile: name a recipe"),
        (("--profile", "fedavg-digit"), "unknown recipe 'fedavg-digit': did you mean"),
        (("--profile", "fedavg-digits", "--set", "task.lr=0"), "lr is 0.0: it must be above 0"),
        (("--profile", "fedavg-digits", "--out", tmp_path), "choose another --out"),
    ):
        outcome = call("doctor", *words)
        assert (outcome.status, outcome.out) == (2, "")
        assert sentence in outcome.err


# --- memory


def test_the_footprint_counts_weights_moments_and_what_the_backward_pass_needs() -> None:
    """By hand: two linear layers and a ReLU save their inputs; the ReLU's output is one of them."""

    def two(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, classes))

    params = 4 * (4 * 50 + 50 + 50 * 3 + 3)
    x = torch.zeros(5, 4)
    for options, times in (({}, 2), ({"momentum": 0.9}, 3), ({"optimizer": "adam"}, 4)):
        task = Task(two, federation([12] * 4), **options)  # type: ignore[arg-type]
        found = footprint(task, lambda: two((4,), 3), x)
        assert found.fixed == times * params
        assert found.example == 4 * (4 + 50)
    assert found.of(10) == found.fixed + 10 * found.example


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_client_with_too_little_memory_fails_with_a_sentence(engine: str, tmp_path: Path) -> None:
    def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 500), nn.ReLU(), nn.Linear(500, classes))

    task = Task(wide, federation([12] * 4), batch=6)
    need = footprint(task, lambda: wide((4,), 3), torch.zeros(1, 4)).of(6) / 1e6
    file = write(
        tmp_path,
        {"gflops": 1, "memory": 1.01 * need},
        {"gflops": 1, "memory": 0.99 * need},
        {"gflops": 1},
        {"gflops": 1, "changes": [{"round": 2, "memory": 0.5 * need}]},
    )
    options: Any = {"devices": Trace(file=file), "rounds": 2, "engine": engine}
    run = rota.run([task], Full(), estimator=FedAvg(), **options)
    failed = [[each["client"] for each in record["failures"]] for record in run.records]
    assert failed == [[1], [1, 3]]
    reason = run.records[0]["failures"][0]["reason"]
    assert reason == f"training needs {need:.3g} MB, and the device has {0.99 * need:.3g} MB"
    capacity = Fixed(each=(1.0, 0.9, 1.0, 0.4))  # narrower parts fit
    run = rota.run([task], Full(), estimator=FedAvg(), capacity=capacity, **options)
    assert run.summary["failures"] == 0


def test_memory_that_means_nothing() -> None:
    for name in ("lognormal", "spread-of-4", "phones"):
        with pytest.raises(BadInput, match=r"devices\.memory is 0: it must be above 0, and "):
            make(name, memory=0.0).check()
        assert make(name, memory=2.5).profile(3, 0).room(np.arange(3), 1).tolist() == [2.5e6] * 3
        assert make(name).profile(3, 0).memory is None
