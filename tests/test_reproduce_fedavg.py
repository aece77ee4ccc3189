"""FedAvg's Table 1: its cells, the race between learning rates, resuming, and the page."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import federation, linear
from hypothesis import given
from hypothesis import strategies as st

from rota import data, rng
from rota.engine import Engine, make
from rota.errors import BadInput
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.plan import Job, Plan, Task
from rota_lab.reproduce import estimate, fedavg_cells, fedavg_claims, fedavg_page, run, write_page
from rota_lab.reproduce.fedavg_cells import (
    CELLS,
    DEAR,
    FRACTIONS,
    GRID,
    MIDDLE,
    Cell,
    Column,
    Network,
    chosen,
    client_steps,
    first,
    lane_seconds,
    order,
    tuning,
)
from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS
from rota_lab.reproduce.parts import TimeUp, read
from rota_lab.reproduce.race import (
    BEHIND,
    DIVERGED,
    LIMIT,
    REACHED,
    SLOWER,
    Cohorts,
    Lane,
    judge,
    mean_rounds,
    race,
    winner,
)

table1 = importlib.import_module(
    "rota_lab.reproduce.fedavg_table1"
)  # the package has a function of that name


# --- the cells


def test_the_table_has_40_cells_of_which_the_source_reached_35() -> None:
    cells = [cell for cell in CELLS.values() if not cell.column.raw]
    assert len(cells) == 40
    assert sum(cell.paper is not None for cell in cells) == 35
    assert {cell.fraction for cell in cells} == set(FRACTIONS)
    assert CELLS["2nn-iid-B10-C0.1"].paper == 87
    assert CELLS["2nn-shards-Binf-C0"].paper == 4278
    assert CELLS["2nn-iid-Binf-C0.5"].paper is None
    assert CELLS["cnn-shards-B10-C1"].paper == 97
    assert CELLS["cnn-iid-Binf-C0.5"].paper == 164
    assert CELLS["cnn-shards-Binf-C1"].paper is None
    assert all(cell.name == name for name, cell in CELLS.items())
    assert {cell.column for cell in CELLS.values()} == set(MIDDLE)


@pytest.mark.parametrize(
    ("name", "cohort", "steps", "all_steps"),
    [
        ("2nn-iid-B10-C0.1", 10, 60, 52_200),
        ("2nn-shards-Binf-C0", 1, 1, 4278),
        ("cnn-iid-B10-C1", 100, 300, 480_000),
        ("cnn-shards-Binf-C0.5", 50, 5, 266_750),
    ],
)
def test_the_work_of_a_cell(name: str, cohort: int, steps: int, all_steps: int) -> None:
    cell = CELLS[name]
    assert (cell.cohort, cell.steps, client_steps(cell)) == (cohort, steps, all_steps)


def test_cells_run_in_an_order_that_lets_them_learn_and_leaves_the_dear_ones_to_the_end() -> None:
    cells = chosen()
    assert len(cells) == 37
    assert {cell.name for cell in cells} == {cell.name for cell in CELLS.values() if cell.paper}
    dear = [lane_seconds(cell) >= DEAR for cell in cells]
    assert dear == sorted(dear)
    columns = [cell.column for cell in cells[: dear.index(True)]]
    assert len(
        {c for c, before in zip(columns, [None, *columns], strict=False) if c != before}
    ) == len(set(columns))
    done: set[Column] = set()
    for cell in cells:
        assert (cell.fraction == first(cell.column)) == (cell.column not in done), cell.name
        done.add(cell.column)
    assert order(cells[::-1]) == cells


def test_the_dearer_a_cell_the_fewer_models_it_has() -> None:
    cheap, middling, dear = (
        CELLS[name] for name in ("2nn-iid-B10-C0.2", "2nn-shards-B10-C1", "cnn-shards-Binf-C0.5")
    )
    assert [
        len(tuning(cell, known=True).rates) * tuning(cell, known=True).seeds
        for cell in (cheap, middling, dear)
    ] == [15, 3, 1]
    assert tuning(cheap, known=False).rates == tuple(range(-4, 5))
    assert tuning(CELLS["cnn-shards-Binf-C0.1"], known=True).rates == (0, 2)
    assert not tuning(dear, known=True).further


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            "2nn-iid-B10-C0.1,cnn-C0-Binf-iid",
            {"2nn-iid-B10-C0.1", "2nn-iid-B10-raw-C0.1", "cnn-iid-Binf-C0"},
        ),
        (
            "cnn-shards-binf",
            {
                "cnn-shards-Binf-C0",
                "cnn-shards-Binf-C0.1",
                "cnn-shards-Binf-C0.2",
                "cnn-shards-Binf-C0.5",
            },
        ),
        ("raw", {"2nn-iid-B10-raw-C0.1", "cnn-iid-B10-raw-C0.1"}),
    ],
)
def test_cells_are_chosen_by_parts_of_their_names(words: str, names: set[str]) -> None:
    assert {cell.name for cell in chosen(words)} == names


def test_a_part_that_no_cell_has_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--only names 'shard', .* did you mean 'shards'"):
        chosen("2nn-shard")


def test_the_estimate_has_a_line_a_cell() -> None:
    lines = estimate("fedavg-table1", "2nn-iid-B10")
    assert [line.split()[0] for line in lines[1:-2]] == [
        cell.name for cell in chosen("2nn-iid-B10")
    ]
    assert lines[1].split()[1:4] == ["87", "52,200", "522,000"]
    assert len(estimate("fedavg-table1")) == 37 + 3
    with pytest.raises(BadInput, match="--estimate is not for gd-bound"):
        estimate("gd-bound")


# --- the race


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.05, 1))
def test_rounds_are_where_the_monotonic_curve_crosses_the_target(
    accuracies: list[float], target: float
) -> None:
    """Against a search for the crossing on a fine grid of the best-so-far curve."""
    lane = Lane(0, 0, 0)
    lane.tested(0, 0.0, target)
    for now, accuracy in enumerate(accuracies, start=1):
        if lane.rounds is None:
            lane.tested(now, accuracy, target)
    best = np.maximum.accumulate([0.0, *accuracies])
    assert (lane.rounds is None) == (best[-1] < target)
    if lane.rounds is not None:
        assert lane.why == REACHED
        assert np.interp(lane.rounds, np.arange(len(best)), best) == pytest.approx(target, abs=1e-9)
        assert best[math.ceil(lane.rounds) - 1] <= target


def test_tests_are_rare_while_the_target_is_far() -> None:
    lane = Lane(0, 0, 0)
    assert [now for now in range(1, 12) if lane.due(now, 0.97)] == [5, 10]
    lane.tested(5, 0.941, 0.97)  # within twice the target's error
    assert all(lane.due(now, 0.97) for now in range(6, 12))


def test_a_level_is_the_best_of_the_rounds_before() -> None:
    lane = Lane(0, 0, 0)
    for now, accuracy in ((0, 0.1), (5, 0.6), (10, 0.5), (15, 0.8)):
        lane.tested(now, accuracy, 0.99)
    assert [lane.level(now) for now in (0, 4.9, 5, 12, 15, 99)] == [0.1, 0.1, 0.6, 0.6, 0.8, 0.8]
    assert lane.played == 15


def lanes(**curves: list[float]) -> list[Lane]:
    """A lane for each "rRATE_SEED", tested every round with these accuracies, to 90 %."""
    out = []
    for name, curve in curves.items():
        rate, seed = map(int, name[1:].split("_"))
        lane = Lane(rate, seed, len(out))
        for now, accuracy in enumerate(curve):
            if not lane.why:
                lane.tested(now, accuracy, 0.9)
        out.append(lane)
    return out


def test_a_rate_that_needs_more_rounds_than_the_best_is_out() -> None:
    slow, fast = field = lanes(r1_0=[0, 0.3, 0.5], r2_0=[0, 0.5, 1.0])
    judge(field, 1, 0.9, math.inf, lag=False)
    assert (slow.why, fast.why) == ("", REACHED)
    judge(field, 2, 0.9, math.inf, lag=False)
    assert slow.why == SLOWER
    (late,) = field = lanes(r1_0=[0, 0.3, 0.5])
    judge(field, 7, 0.9, 7.5, lag=False)
    assert late.why == ""
    judge(field, 8, 0.9, 7.5, lag=False)
    assert late.why == SLOWER


def test_seeds_are_judged_together() -> None:
    field = lanes(
        r1_0=[0, 1.0], r1_1=[0, 0.1, 0.1], r2_0=[0, 0.3, 0.6, 1.0], r2_1=[0, 0.3, 0.6, 1.0]
    )
    judge(field, 3, 0.9, math.inf, lag=False)
    assert field[1].why == ""  # the mean of .9 and 3 is below 2.75
    judge(field, 5, 0.9, math.inf, lag=False)
    assert field[1].why == SLOWER
    assert winner(field) == 2


def test_a_rate_that_is_far_behind_another_is_out_once_that_rule_holds() -> None:
    def field() -> list[Lane]:
        return lanes(r1_0=[0, 0.1, 0.2, 0.3], r2_0=[0, 0.2, 0.4, 0.6], r3_0=[0, 0.3, 0.5, 0.7])

    some = field()
    judge(some, 3, 0.9, math.inf, lag=False)
    assert [lane.why for lane in some] == ["", "", ""]
    judge(some, 3, 0.9, math.inf, lag=True)  # after 2 rounds the best had .5
    assert [lane.why for lane in some] == [BEHIND, "", ""]


def test_one_diverged_seed_takes_its_rate_out() -> None:
    field = lanes(r1_0=[0, 0.3], r1_1=[0, 0.3], r2_0=[0, 0.1])
    field[0].why = DIVERGED
    judge(field, 1, 0.9, math.inf, lag=False)
    assert [lane.why for lane in field] == [DIVERGED, DIVERGED, ""]


def test_the_winner() -> None:
    assert winner(lanes(r1_0=[0, 0.5, 1.0], r2_0=[0, 1.0], r3_0=[0, 0.8])) == 2
    some_seeds = lanes(r1_0=[0, 0.8], r1_1=[0, 0.8], r2_0=[0, 1.0], r2_1=[0, 0.1])
    assert winner(some_seeds) == 2
    assert mean_rounds(some_seeds[2:]) is None
    assert winner(lanes(r1_0=[0, 0.8], r2_0=[0, 0.7])) == 1


@pytest.mark.parametrize(
    ("curves", "rates"),
    [
        ({"r1_0": [0, 0.5, 1.0], "r2_0": [0, 1.0], "r3_0": [0, 0.5, 1.0]}, set()),
        ({"r1_0": [0, 0.5, 1.0], "r2_0": [0, 1.0]}, {3}),
        ({"r1_0": [0, 1.0]}, {0, 2}),
        (
            {"r1_0": [0, 0.5], "r2_0": [0, 0.6], "r4_0": [0, 0.4]},
            set(),
        ),  # none is there, and the best is in the middle
        ({"r1_0": [0, 0.5], "r2_0": [0, 0.6]}, {3}),
    ],
)
def test_races_go_on_to_neighbours_that_were_not_tried(
    curves: dict[str, list[float]], rates: set[int]
) -> None:
    assert table1.further(lanes(**curves)) == rates


def test_a_neighbour_that_was_dropped_as_too_slow_is_tried_once_more() -> None:
    field = lanes(r1_0=[0, 0.1], r2_0=[0, 1.0], r3_0=[0, 0.5, 1.0])
    field[0].why = BEHIND
    assert table1.further(field) == {1}


def test_a_models_cohort_does_not_depend_on_the_others() -> None:
    shares = np.full((3, 20), 1 / 20)

    def draw(*sizes: int) -> Plan:
        return Cohorts(sizes).draw({}, shares, rng.generator(7))

    whole, alone = draw(5, 20, 5), draw(0, 0, 5)
    assert alone.model.tolist() == [2] * 5
    assert (
        alone.client.tolist()
        == whole.client[whole.model == 2].tolist()
        != whole.client[whole.model == 0].tolist()
    )
    assert len(set(alone.client)) == 5
    assert (whole.model == 1).sum() == 20
    np.testing.assert_allclose(alone.weight, 1 / 5)


class Spy:
    """An engine that writes down what is asked of it."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.trained: list[set[int]] = []
        self.tested: list[list[int]] = []

    def initial(self) -> Any:
        return self.inner.initial()

    def train(self, job: Job) -> Any:
        self.trained.append(set(job.plan.model.tolist()))
        return self.inner.train(job)

    def evaluate(self, models: Any, which: Any = None) -> Any:
        self.tested.append(list(which))
        return self.inner.evaluate(models, which)


def course(*rates: float) -> tuple[Experiment, Spy]:
    blobs = federation([30] * 8, seed=3)
    tasks = [Task(linear, blobs, lr=lr, name=str(s)) for s, lr in enumerate(rates)]
    return Experiment(tasks, Cohorts((0,) * len(tasks)), FedAvg()), Spy(
        make("sequential", Experiment(tasks), "cpu")
    )


def test_who_is_out_costs_nothing() -> None:
    experiment, engine = course(0.1, 1e-5, 3e38, 0.1)
    field = [Lane(s, 0, s) for s in range(3)]
    race(experiment, engine, field, cohort=4, target=0.8, limit=40, lag_from=10)
    good, slow, wild = field
    assert (good.why, wild.why) == (REACHED, DIVERGED)
    assert slow.why == SLOWER
    assert good.rounds is not None
    assert good.rounds == pytest.approx(good.played, abs=5)
    assert engine.trained[0] == {0, 1, 2}
    assert engine.trained[-1] == {0, 1}
    assert len(engine.trained) == good.played  # nobody continues once the best is there
    assert engine.tested[0] == [0, 1, 2]
    assert all(2 not in which for which in engine.tested[1:])


def test_the_race_ends_at_its_limit_when_all_diverge_and_when_the_time_is_up() -> None:
    experiment, engine = course(1e-5, 3e38)
    field = [Lane(0, 0, 0)]
    race(experiment, engine, field, cohort=2, target=0.99, limit=3)
    assert (field[0].why, field[0].rounds, len(engine.trained)) == (LIMIT, None, 3)
    field = [Lane(1, 0, 1)]
    race(experiment, engine, field, cohort=2, target=0.99, limit=3)
    assert field[0].why == DIVERGED
    with pytest.raises(TimeUp):
        race(experiment, engine, [Lane(0, 0, 0)], cohort=2, target=0.99, limit=3, deadline=0.0)


def test_a_race_can_be_watched_and_has_a_time_to_beat() -> None:
    experiment, engine = course(1e-5)
    seen: list[int] = []
    field = [Lane(0, 0, 0)]
    race(experiment, engine, field, cohort=2, target=0.99, limit=9, beat=4.5, watch=seen.append)
    assert (field[0].why, seen) == (SLOWER, [1, 2, 3, 4, 5])


def test_a_repeated_race_is_the_same_whoever_else_runs() -> None:
    experiment, engine = course(0.01, 0.02, 0.03)
    alone, both = [Lane(1, 0, 1)], [Lane(0, 0, 0), Lane(1, 0, 1)]
    for field in (alone, both):
        race(experiment, engine, field, cohort=3, target=0.999, limit=10)
    assert alone[0].curve == both[1].curve


# --- the reproduction, on data that are learnt in a few rounds


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Blobs for images, a target within reach, three cells of a column; counts loaded columns."""
    loaded = {"columns": 0}

    def blobs(partition: Any, seed: int) -> data.Federation:
        loaded["columns"] += 1
        return federation([20] * 100, seed=5)

    monkeypatch.setattr(data, "mnist", blobs)
    monkeypatch.setitem(fedavg_cells.NETWORKS, "2nn", Network("2NN", linear, 1, 0.96))
    for fraction in (0.1, 0.2, 0.5):
        name = f"2nn-iid-B10-C{fraction:g}"
        monkeypatch.setitem(CELLS, name, replace(CELLS[name], paper=8))
    return loaded


def test_cells_are_kept_and_not_run_again(small: dict[str, int], tmp_path: Path) -> None:
    said: list[str] = []
    run("fedavg-table1", out=tmp_path, say=said.append, only="2nn-iid-B10-C0.1", device="cpu")
    path = tmp_path / "fedavg-table1.jsonl"
    kept = read(path)
    assert list(kept) == ["2nn-iid-B10-C0.1", "2nn-iid-B10-raw-C0.1"]
    cell = kept["2nn-iid-B10-C0.1"]
    assert len(cell["rounds"]) == 3
    assert all(0 < rounds < 8 * fedavg_cells.LIMIT for rounds in cell["rounds"])
    rates = sorted({lane["lr"] for lane in cell["lanes"]})
    assert rates[0] < cell["lr"] < rates[-1] or len(rates) == 2 * fedavg_cells.REACH + 1
    assert np.diff(np.log10(rates)) == pytest.approx(1 / 6)
    assert {lane["why"] for lane in cell["lanes"]} <= {REACHED, SLOWER, BEHIND, DIVERGED, LIMIT}
    assert said[0] == "2nn-iid-B10: loading"
    assert said[1].startswith("2nn-iid-B10-C0.1: ")

    columns = small["columns"]
    result = run(
        "fedavg-table1", out=tmp_path, only="2nn-iid-B10-C0.1,2nn-iid-B10-C0.2", device="cpu"
    )
    assert small["columns"] == columns + 1  # the one cell that was missing
    follower = read(path)["2nn-iid-B10-C0.2"]
    assert read(path) == kept | {"2nn-iid-B10-C0.2": follower}
    assert path.read_text().count("\n") == 3, "no line is written twice"
    assert cell["lr"] in {lane["lr"] for lane in follower["lanes"]}
    assert [row["quantity"] for row in result.rows if "rounds to" in row["quantity"]] == [
        "2NN, IID, B = 10, C = 0.1: rounds to 96 %",
        "2NN, IID, B = 10, C = 0.2: rounds to 96 %",
        "2NN, IID, B = 10, C = 0.1, pixels 0 to 1: rounds to 96 %",
    ]
    assert not result.ok  # 33 cells are missing


def test_without_minutes_nothing_is_run(small: dict[str, int], tmp_path: Path) -> None:
    result = run("fedavg-table1", out=tmp_path, minutes=0, device="cpu")
    assert small["columns"] == 0
    assert [row["quantity"] for row in result.rows] == ["cells that reach the target"]
    text = " ".join(write_page(result, tmp_path).read_text().split())
    assert text.count("not run / ") == 40
    standing = "reached: 0 reached, 0 not reached, 35 not run"
    assert f"**cannot tell**: all 35 cells that the source reached are {standing}" in text


def test_when_the_time_is_up_what_is_finished_stays(
    small: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, said = table1.race, list[str]()

    def once(*args: Any, **options: Any) -> None:
        if (tmp_path / "fedavg-table1.jsonl").exists():
            raise TimeUp
        plain(*args, **options)

    monkeypatch.setattr(table1, "race", once)
    run(
        "fedavg-table1", out=tmp_path, say=said.append, only="2nn-iid-B10", minutes=60, device="cpu"
    )
    assert list(read(tmp_path / "fedavg-table1.jsonl")) == ["2nn-iid-B10-C0.1"]
    assert said[-1] == "the time is up: finished parts are kept"
    assert small["columns"] == 1


def test_quick_keeps_nothing(small: dict[str, int], tmp_path: Path) -> None:
    result = run("fedavg-table1", quick=True, out=tmp_path, device="cpu")
    assert result.quick
    assert not list(tmp_path.iterdir())
    assert small["columns"] == 2
    assert [row["quantity"] for row in result.rows][:2] == [
        "2NN, IID, B = 10, C = 0.1: rounds to 96 %",
        "2NN, IID, B = 10, C = 0.1, pixels 0 to 1: rounds to 96 %",
    ]
    text = write_page(result, tmp_path).read_text()
    assert "This is a quick version" in text
    assert "rota reproduce fedavg-table1 --quick" in text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "fedavg-table1.jsonl").write_text('{"part": \n')
    with pytest.raises(BadInput, match=r"line 1 of .*fedavg-table1.jsonl is not a finished part"):
        run("fedavg-table1", out=tmp_path, minutes=0)


def test_options_that_a_reproduction_does_not_take_are_refused() -> None:
    with pytest.raises(BadInput, match="--only is not for gd-bound: leave it out"):
        run("gd-bound", only="2nn")


def test_it_runs_where_only_torch_and_numpy_are(tmp_path: Path) -> None:
    words = ["reproduce", "fedavg-table1", "--minutes", "0", "--json", "--out", str(tmp_path)]
    code = f"""
import runpy, sys
for name in ('typer', 'rich', 'pydantic', 'plotly', 'sklearn', 'scipy'):
    sys.modules[name] = None
sys.argv = {words}
runpy.run_module('rota_lab.reproduce', run_name='__main__')
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {
            "quantity": "cells that reach the target",
            "paper": 35,
            "measured": 0.0,
            "low": 0.0,
            "high": 0.0,
            "seeds": 1,
        }
    ]
    assert (tmp_path / "fedavg-table1.md").exists()


# --- the page


def found(cell: Cell, *ratios: float | None) -> dict[str, Any]:
    rounds = [None if ratio is None else ratio * (cell.paper or 0) for ratio in ratios]
    one = {"seed": 0, "rounds": rounds[0], "accuracy": 0.98, "tested_to": 5, "why": REACHED}
    return {
        "part": cell.name,
        "paper": cell.paper,
        "best": -3,
        "lr": 0.316,
        "rounds": rounds,
        "accuracy": 0.9712,
        "further": True,
        "lanes": [{"lr": 0.215, **one}, {"lr": 0.316, **one}],
        "seconds": 12.3,
        "precision": "fp32",
        "machine": "a Turing machine",
    }


def verdicts(some: dict[str, Any]) -> dict[str, str]:
    """The claims' words without their numbers, and their verdicts."""
    wanted = [cell.name for cell in chosen() if not cell.column.raw]
    claims = fedavg_claims.judgements(some, wanted)
    return {each.words.partition(": +")[0].partition(": -")[0]: each.verdict for each in claims}


def around(middle: float) -> dict[str, Any]:
    """All cells, with ratios to the source's rounds that are near this one."""
    spread = itertools.cycle((0.98, 1.0, 1.02))
    return {cell.name: found(cell, middle * next(spread)) for cell in chosen()}


def test_every_cell_is_wanted() -> None:
    all_of_them, one = around(1.0), CELLS["cnn-iid-B10-C1"]
    claim = "all 35 cells that the source reached are reached"
    for spoilt, words in (
        (found(one, None), "34 reached, 1 not reached, 0 not run"),
        (found(one, 1.0, None), "34 reached, 1 not reached, 0 not run"),
        (None, "34 reached, 0 not reached, 1 not run"),
    ):
        some = {name: each for name, each in all_of_them.items() if name != one.name}
        some |= {one.name: spoilt} if spoilt else {}
        assert verdicts(some)[f"{claim}: {words}"] == (FAILS if spoilt else CANNOT_TELL)
        missing = fedavg_page.report(some, chosen(), False).checks
        assert missing == ({} if spoilt else {f"{MISSING} (1 are not)": False})
    assert verdicts(all_of_them)[f"{claim}: 35 reached, 0 not reached, 0 not run"] == HOLDS


MISSING = "all cells that the source reached are run"


@pytest.mark.parametrize("split", ["IID", "shards"])
@pytest.mark.parametrize(
    ("middle", "above", "below"),
    [(0.6, FAILS, HOLDS), (0.8, HOLDS, HOLDS), (1.2, HOLDS, HOLDS), (1.4, HOLDS, FAILS)],
)
def test_the_bars_are_judged_split_by_split(
    split: str, middle: float, above: str, below: str
) -> None:
    cells = {"IID": "-iid-", "shards": "-shards-"}
    mine = {name: each for name, each in around(middle).items() if cells[split] in name}
    other = {name: each for name, each in around(1.0).items() if cells[split] not in name}
    made = verdicts(mine | other)
    assert made[f"{split}: our rounds / the source's are above 0.7"] == above
    assert made[f"{split}: our rounds / the source's are below 1.3"] == below
    assert made[f"{split}: our speed-ups / the source's are above 0.7"] == HOLDS
    rest = "shards" if split == "IID" else "IID"
    assert made[f"{rest}: our rounds / the source's are above 0.7"] == HOLDS


def test_speedups_and_what_batches_and_splits_do() -> None:
    some = around(1.0)
    assert fedavg_claims.speedup(some, "2nn-iid-B10-C0.1") == pytest.approx(316 / 87, rel=0.05)
    assert fedavg_claims.speedup(some, "2nn-iid-B10-C0") == pytest.approx(1)
    alone = {"2nn-iid-B10-C0.1": some["2nn-iid-B10-C0.1"]}
    assert fedavg_claims.speedup(alone, "2nn-iid-B10-C0.1") is None
    claims = fedavg_claims.judgements(some, list(some))
    factors = [each for each in claims if "by a factor" in each.words]
    assert len(factors) == 4
    assert all(each.verdict == HOLDS for each in factors)
    page = fedavg_page.report(some, chosen(), False).text
    assert re.search(r"\| 0.1 \| 1\.0 / 1\.0 \| 3\.\d / 3\.6 \| 2\.\d / 2\.4 \|", page)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([-3, -2, -4], "on both sides"),
        ([-3, -4], "below only"),
        ([-3, -2, -5], "above only"),
        ([-3, -5], "no"),
    ],
)
def test_which_neighbours_of_the_best_rate_were_tried(rates: list[int], words: str) -> None:
    lanes = [{"lr": 10 ** (k / GRID)} for k in rates]
    some = {**found(CELLS["2nn-iid-B10-C1"], 1.0), "lanes": lanes}
    assert fedavg_claims.bracket(some) == words


def test_a_cell_that_the_source_missed_can_be_run_by_its_name() -> None:
    dash = CELLS["2nn-iid-Binf-C0.5"]
    assert [cell.name for cell in chosen("2nn-iid-binf-c0.5")] == [dash.name]
    assert dash not in chosen("2nn-iid-Binf")
    assert dash.expected == 1658
    assert CELLS["cnn-shards-Binf-C1"].expected == 1181
    assert "3 times the most rounds" in fedavg_page.report({}, chosen(), False).text
    some = {dash.name: {**found(dash, None), "rounds": [900.0], "paper": None}}
    text = fedavg_page.report(some, chosen(), False).text
    assert "Of these 5 cells 4 are not run here" in " ".join(text.split())
    assert "| 900 / – |" in text
    some[dash.name]["rounds"] = [None]
    assert "| not in 4974 / – |" in fedavg_page.report(some, chosen(), False).text
    assert "not reached in 4974 rounds" in fedavg_page.summary(some[dash.name])


def test_raw_pixels_count_for_nothing_but_their_own_line() -> None:
    cells = chosen()
    some = {cell.name: found(cell, 0.1 if cell.column.raw else 1.0) for cell in cells}
    result = fedavg_page.report(some, cells, False)
    assert result.ok
    assert (
        "2NN, IID, B = 10, C = 0.1 takes 9 rounds from 0 to 1, and 87 from -1/2 to 1/2"
        in result.text
    )
    assert result.rows[-1]["low"] == result.rows[-2]["low"] == 1.0


def test_the_page_shows_every_cell(tmp_path: Path) -> None:
    cells = chosen()
    some = {
        name: found(CELLS[name], 0.9, 1.0)
        for name in ("2nn-iid-B10-C0.1", "2nn-iid-B10-C0.2", "cnn-shards-B10-C0")
    }
    some["cnn-iid-B10-C1"] = {**found(CELLS["cnn-iid-B10-C1"], None), "precision": "tf32"}
    result = fedavg_page.report(some, cells, False)
    text = write_page(result, tmp_path).read_text()
    assert "| 0.1 | not run / 1474 | 83 / 87 (0.95) | not run / 1796 | not run / 664 |" in text
    assert "| 1 | not run / 246 | not in 48 / 16 | not run / – | not run / 97 |" in text
    assert (
        "| CNN, shards, B = 10, C = 0 | 0.215, 0.316 | 0.316 | below only | 2 | 97.12% | 12 | 1 |"
        in text
    )
    assert "- machine 1: a Turing machine, fp32\n- machine 2: a Turing machine, tf32" in text
    assert [chart.name for chart in result.charts] == [
        "2nn"
    ]  # the other has no two cells in a column
    assert (tmp_path / "fedavg-table1-2nn.svg").exists()
    assert {row["paper"] for row in result.rows} == {87, 77, 956, 35, None}


@pytest.mark.slow
@pytest.mark.data
def test_quick_on_mnist_is_near_the_source() -> None:
    if not data.at_hand("mnist"):
        pytest.skip("MNIST is not at hand: set ROTA_DATA")
    result = run("fedavg-table1", quick=True, device="cpu")
    assert result.ok, result.checks
