"""What a round writes about sub-models, and what the report shows of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from test_cli import call, lines
from test_report import make, read_all, traces_of

import rota
from rota.estimate import FedAvg
from rota.report.history import read
from rota.report.page import render
from rota.sampling import Full, Uniform
from rota.submodel import Fixed, Ordered, Random, Stragglers, Whole
from rota.world.devices import Devices


def played(out: Path, capacity: Any, submodel: Any = None, seed: int = 0, **more: Any) -> Path:
    """A short run on handwritten digits; `more` may have a sampler."""
    given = {"sampler": Full(), "submodel": submodel or Ordered(), "rounds": 5, **more}
    task = rota.Task(rota.models.two_nn, rota.data.digits(), lr=0.1, steps=1, name="digits")
    devices = Devices(gflops=0.01, mbps=1e4, spread=0.5)
    rota.run(
        [task], seed=seed, estimator=FedAvg(), capacity=capacity, devices=devices, out=out, **given
    )
    return out


def test_a_round_writes_who_held_a_part_and_what_it_left_out(tmp_path: Path) -> None:
    capacity = Fixed(sizes=(1.0, 0.5, 0.25), parts=(2, 1, 1))
    width = capacity.init(np.ones((1, 20)), 0)["width"]
    for line in lines(played(tmp_path / "a", capacity)):
        held = line["held"]["digits"]
        assert held["client"] == np.flatnonzero(width < 1).tolist()
        assert held["width"] == width[width < 1].tolist()
        assert line["parts"] == 10
        assert line["narrowest"] == 0.25
        assert max(held["seconds"]) <= line["slowest"]["seconds"]
        assert line["slowest"]["width"] == width[line["slowest"]["client"]]
        # 200 units in 64 groups: the first quarter is in all parts, the second in half of them
        for layer in line["dropped"]["digits"].values():
            assert len(layer) == 64
            assert layer == [0] * 16 + [5] * 16 + [10] * 32


def test_a_round_of_whole_models_writes_nothing_of_this(tmp_path: Path) -> None:
    for line in lines(played(tmp_path / "a", Whole())):
        assert not line.keys() & {"parts", "narrowest", "slowest", "held", "dropped"}


def test_the_round_waits_for_the_slowest_client(tmp_path: Path) -> None:
    run = read(played(tmp_path / "a", Stragglers(share=0.2)))
    for line in run.rounds:
        assert np.isclose(line["round_seconds"], line["slowest"]["seconds"])
    first, last = run.rounds[0], run.rounds[-1]
    assert first["slowest"]["width"] == 1
    straggler = last["held"]["digits"]["client"].index(first["slowest"]["client"])
    assert last["held"]["digits"]["seconds"][straggler] < 0.9 * first["slowest"]["seconds"]
    assert last["round_seconds"] < 0.9 * first["round_seconds"]


def test_the_report_shows_one_run(tmp_path: Path) -> None:
    folder = played(tmp_path / "a", Stragglers(share=0.2), Random(), sampler=Uniform(12), rounds=8)
    run = read(folder)
    html = render(read_all(folder))
    shown = traces_of(html)["charts"]
    times = shown["round time"]["traces"]
    assert len(times[0]["y"]) == 8
    part = [line["slowest"]["width"] < 1 for line in run.rounds]
    assert [y is not None for y in times[1]["y"]] == part
    assert times[0]["text"][0] == f"client {run.rounds[0]['slowest']['client']}, width 1"
    holders = shown["holders 0"]["traces"][0]
    ever = {client for held in run.widths.values() for client in held if held[client] < 1}
    assert holders["y"] == [f"{client}" for client in sorted(ever)]
    for row, client in zip(holders["z"], sorted(ever), strict=True):
        for z, now in zip(row, holders["x"], strict=True):
            width = run.widths[now].get(client)
            assert z is None if width is None else np.isclose(z, 1 - width)
    units = shown["units 0 digits"]["traces"][0]
    parts = sum(line["parts"] for line in run.rounds)
    widths = [w for held in run.widths.values() for w in held.values() if w < 1]
    assert units["y"] == ["fc1", "fc2"]
    assert len(widths) == parts
    assert np.isclose(np.mean(units["z"]), 1 - np.mean(widths), atol=0.01)
    assert " with the whole model where the round waited for it, and " in html
    assert "accuracy against time" not in shown


def test_fluid_digits_shows_the_stragglers_time_before_and_after(tmp_path: Path) -> None:
    assert call("run", "fluid-digits", "--set", "rounds=6", "--out", tmp_path).status == 0
    words = (
        r"Client \d+ took ([\d.]+)\ss with the whole model where the round waited for it, "
        r"and ([\d.]+)\ss with parts"
    )
    found = re.search(words, (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert found
    assert float(found[2]) < 0.8 * float(found[1])


def test_the_report_compares_with_the_baseline(tmp_path: Path) -> None:
    for name, capacity in (("whole", Whole()), ("stragglers", Stragglers(share=0.2))):
        for seed in range(2):
            played(tmp_path / "all" / f"{name}-seed{seed}", capacity, seed=seed)
    page = traces_of(render(read_all(tmp_path / "all")))
    chart = page["charts"]["accuracy against time"]
    time = {trace["name"]: trace["x"] for trace in chart["traces"]}
    assert [len(x) for x in time.values()] == [5, 5]
    assert time["stragglers"][-1] < 0.9 * time["whole"][-1]
    runs = [read(tmp_path / "all" / f"stragglers-seed{seed}") for seed in range(2)]
    assert "(s)" in chart["layout"]["xaxis"]["title"]["text"]
    last = np.mean([run.rounds[-1]["seconds"] for run in runs])
    assert np.isclose(time["stragglers"][-1], last, rtol=1e-4)
    kept = {"round time", "accuracy against time", "holders 0", "units 0 digits"}
    assert kept < page["charts"].keys()
    for key in kept:
        go.Figure({"data": page["charts"][key]["traces"], "layout": page["charts"][key]["layout"]})


def test_without_parts_there_is_no_section(tmp_path: Path) -> None:
    assert "<h2>Sub-models</h2>" not in render(read_all(make(tmp_path / "a")))
    held = {"held": {"digits": {"client": [], "width": [], "seconds": []}}}
    none = {"slowest": None, **held, "dropped": {"digits": {}}, "parts": 0, "narrowest": 1.0}
    html = render(read_all(make(tmp_path / "b", more=none)))
    assert "<h2>Sub-models</h2>" in html
    assert {"holders 0", "units 0 digits"}.isdisjoint(traces_of(html)["charts"])
    for played_rounds in (0, 1):
        folder = make(tmp_path / f"c{played_rounds}", more=none, played=played_rounds)
        render(read_all(folder))
