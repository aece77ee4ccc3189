"""K-Vib's theory: its parts, the engine that trains once, resuming, and the page."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear

import rota
from rota.engine import Engine, make
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.plan import Chunk, Model, Plan, Task, whole
from rota.sampling import SAMPLERS, draw
from rota_lab.reproduce import estimate, run, write_page
from rota_lab.reproduce.kvib_theory_page import TITLES, Found, of, report, unscaled
from rota_lab.reproduce.parts import read

theory = importlib.import_module(
    "rota_lab.reproduce.kvib_theory"
)  # the package has a function of that name


def test_the_parts() -> None:
    names = [part.name for part in theory.parts()]
    assert len(set(names)) == len(names)
    assert {part.sampler for part in theory.parts()} == set(TITLES) <= set(SAMPLERS)
    assert {part.seeds for part in theory.parts()} == {5}
    assert {
        part.sampler for part in theory.parts() if part.budget == 10 and part.bound is None
    } == set(TITLES)
    assert {part.budget for part in theory.parts() if part.sampler == "kvib"} == {5, 10, 20, 60}
    assert sum("runs of" in line for line in estimate("kvib-theory")) == len(names)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("vrb-K10", {"vrb-K10"}),
        ("kvib-full, mabs-K5", {"kvib-full-K10", "mabs-K5"}),
        ("G", {f"kvib-K10-G{bound:g}" for bound in theory.BOUNDS}),
        ("osmd", {f"osmd-K{budget}" for budget in (5, 10, 20, 60)}),
    ],
)
def test_only(only: str, names: set[str]) -> None:
    assert {part.name for part in theory.chosen(only, theory.parts())} == names


def test_only_something_else() -> None:
    with pytest.raises(BadInput, match="--only names 'vbr', which is no part: did you mean 'vrb'"):
        run("kvib-theory", only="vbr")


def by_client(
    engine: Engine, models: list[Model], plan: Plan, now: int
) -> dict[int, tuple[Chunk, int]]:
    """Each client's chunk, and its place there."""
    out = {}
    for chunk in engine.train(whole(models, plan, now)):
        for place, row in enumerate(chunk.rows):
            out[int(plan.client[row])] = (chunk, place)
    return out


def test_trained_once_is_trained_as_drawn() -> None:
    data = federation([5, 12, 20, 31])
    data.train.of(2)[0][0, 0] = torch.inf
    task = Task(linear, data, batch=6)
    setting = rota.Experiment([task], SAMPLERS["full"]())
    engine = make("auto", Experiment([task], devices=setting.devices), "cpu")
    once = theory.Once(engine, setting.shares)
    models = once.initial()
    for now, clients in ((1, [3, 0]), (1, [1, 2]), (2, [0, 2, 3]), (2, [])):
        rows = np.array(clients, np.int64)
        plan = draw.everybody(setting.shares).of(rows)
        expected, got = by_client(engine, models, plan, now), by_client(once, models, plan, now)
        assert got.keys() == expected.keys() == set(clients)
        for client, (chunk, place) in got.items():
            other, there = expected[client]
            torch.testing.assert_close(chunk.update[place], other.update[there], equal_nan=True)
            assert chunk.reason[place] == other.reason[there]
            assert (chunk.loss[place], chunk.examples[place]) == pytest.approx(
                (other.loss[there], other.examples[there]), nan_ok=True
            )


def test_a_run_is_that_of_rota_run() -> None:
    task = Task(linear, federation([5, 12, 20, 31, 8, 40]), lr=0.05)
    got = theory.run(theory.Piece("kvib", 2, 1, 20, 0.01), task, 3)
    asked = ["cost", "regret", "variance"]
    other = rota.run(
        [task],
        SAMPLERS["kvib"](budget=2, bound=0.01),
        rounds=20,
        seed=3,
        evaluate=10,
        metrics=asked,
    )  # type: ignore[call-arg]
    for name in asked:
        assert got[name] == pytest.approx(other.summary[f"{name}_total"], rel=1e-4)
    assert got["loss"] == pytest.approx(other.summary["loss"], rel=1e-4)
    assert got["late"] == pytest.approx(sum(other.rounds["variance"][10:]), rel=1e-4)
    assert "curves" not in got
    curves = theory.run(theory.Piece("kvib", 10, 1, 20), Task(linear, federation([5] * 20)), 0)[
        "curves"
    ]
    assert [len(curves[name]) for name in ("regret", "variance", "loss")] == [2, 2, 2]


# --- the page, from made-up parts


def part(
    sampler: str,
    regret: float,
    variance: float = 1.0,
    budget: int = 10,
    bound: float | None = None,
    best: float = 1.0,
) -> Found:
    """Three seeds, one per cent apart."""
    runs = []
    for factor in (0.99, 1.0, 1.01):
        curves = (
            {"curves": {name: [factor, factor] for name in ("regret", "variance", "loss")}}
            if budget == 10 and not bound
            else {}
        )
        numbers = dict.fromkeys(("late", "improvement", "quality", "loss", "accuracy"), 0.5)
        runs.append(
            {
                "regret": regret * factor,
                "cost": best + regret * factor,
                "variance": variance * factor,
                **numbers,
                **curves,
            }
        )
    made = theory.Piece(sampler, budget, 3, 20, bound)
    return {"part": made.name, **asdict(made), "runs": runs, "machine": "here", "seconds": 1.0}


def found(*some: Found) -> dict[str, Found]:
    return {each["part"]: each for each in some}


def held(some: dict[str, Found], words: str) -> bool:
    (claim,) = [claim for claim in report(some, len(some), False).checks if words in claim]
    return report(some, len(some), False).checks[claim]


def test_the_order_of_variances() -> None:
    def some(best: float, full: float, partial: float) -> dict[str, Found]:
        return found(part("optimal", 0, best), part("kvib-full", 1, full), part("kvib", 2, partial))

    assert held(some(1, 2, 3), "optimal <= K-Vib with full feedback")
    assert not held(some(1, 4, 3), "optimal <= K-Vib with full feedback")
    assert not held(some(3, 2, 3), "optimal <= K-Vib with full feedback")


def test_intervals_must_be_apart() -> None:
    assert held(found(part("kvib", 1), part("vrb", 2)), "is below that of Vrb")
    assert not held(found(part("kvib", 1), part("vrb", 1.01)), "is below that of Vrb")
    assert not held(found(part("kvib", 2), part("avare", 1)), "is below that of Avare")


def test_against_the_budget() -> None:
    """With q in the place of p the regret is K l(p) - min l."""
    assert unscaled(part("vrb", 2, budget=5, best=3))[1] == pytest.approx(5 * (3 + 2) - 3)
    falling = [part("kvib", 1 / budget, budget=budget) for budget in (60, 5, 10)]
    assert held(
        found(*falling),
        "K-Vib's cumulative regret falls with K (0.2, 0.1, 0.0167 at K = 5, 10, 60)",
    )
    assert not held(
        found(*falling[:2], part("kvib", 9.0)), "K-Vib's cumulative regret falls with K"
    )
    rivals = found(part("vrb", 2, budget=5), part("vrb", 1, budget=60))
    assert not held(rivals, "does not fall from K = 5 to 60 (Vrb 2 to 1)")
    assert held(rivals, "does not fall from K = 5 to 60 if q")
    assert held(
        found(part("mabs", 1, budget=5), part("mabs", 2, budget=60)),
        "does not fall from K = 5 to 60 (Mabs",
    )


def test_gamma_on_the_same_seeds() -> None:
    hand = [
        part("kvib", regret, variance=regret, bound=bound)
        for bound, regret in ((0.01, 1.0), (0.1, 1.5))
    ]
    assert held(found(part("kvib", 1.09), *hand), "at most 10 % more cumulative regret")
    assert not held(found(part("kvib", 1.11), *hand), "at most 10 % more cumulative regret")
    assert held(found(part("kvib", 1), *hand), "not sensitive to gamma")
    assert not held(
        found(part("kvib", 1), *hand, part("kvib", 9, variance=9.0, bound=1.0)),
        "not sensitive to gamma",
    )
    longer = part("kvib", 1.0)
    longer["runs"] = [
        *longer["runs"],
        {**longer["runs"][0], "regret": 100.0},
    ]  # a fourth seed, which no G has
    assert held(found(longer, *hand), "at most 10 % more cumulative regret")


def test_a_page_of_some_parts_says_that_others_are_missing(tmp_path: Path) -> None:
    result = report(found(part("kvib", 1), part("vrb", 2)), 38, False)
    assert result.checks["all parts are finished (2 of 38)"] is False
    text = write_page(result, tmp_path).read_text()
    assert f"| K-Vib | {of(part('kvib', 1), 'regret')} |" in text
    assert (tmp_path / "kvib-theory-regret.svg").exists()
    assert write_page(report({}, 38, False), tmp_path / "none").exists()


# --- the work


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that take no time, and a list of those that were done."""
    done: list[str] = []

    def quickly(each: Any, task: Task, seed: int, deadline: float) -> dict[str, Any]:
        done.append(f"{each.name} {seed}")
        return dict(part(each.sampler, 1.0, budget=each.budget, bound=each.bound)["runs"][0])

    monkeypatch.setattr(theory, "run", quickly)
    return done


def test_finished_parts_are_kept_and_not_run_again(small: list[str], tmp_path: Path) -> None:
    run("kvib-theory", out=tmp_path, only="vrb-K10")
    assert small == [f"vrb-K10 {seed}" for seed in range(5, 10)]
    assert read(tmp_path / "kvib-theory.jsonl")["vrb-K10"]["budget"] == 10
    result = run("kvib-theory", out=tmp_path, only="vrb-K10,vrb-K5")
    assert small[5:] == [f"vrb-K5 {seed}" for seed in range(5, 10)]
    assert any(row["quantity"] == "Vrb, K = 10: cumulative regret" for row in result.rows)


def test_a_damaged_file_is_named(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "kvib-theory.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"line 1 of .*kvib-theory.jsonl is not a finished part"):
        run("kvib-theory", out=tmp_path)


def test_no_time_is_no_work(tmp_path: Path) -> None:
    said: list[str] = []
    result = run("kvib-theory", out=tmp_path, minutes=0, say=said.append)
    assert said == ["the time is up: finished parts are kept"]
    assert not result.ok
    assert not (tmp_path / "kvib-theory.jsonl").exists()


def test_quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole way on few rounds: everything but the numbers."""
    monkeypatch.setattr(theory, "QUICK_ROUNDS", 10)
    monkeypatch.setattr(theory, "QUICK_SEEDS", 2)
    monkeypatch.setattr(theory, "CLAIMED", ("vrb",))
    monkeypatch.setattr(theory, "MORE", ())
    result = run("kvib-theory", quick=True, out=tmp_path)
    assert held_all(result.checks, "optimal <= K-Vib with full feedback")
    page = write_page(result, tmp_path).read_text()
    assert "This is a quick version" in page
    charts = {path.stem.removeprefix("kvib-theory-quick-") for path in tmp_path.glob("*.svg")}
    assert charts >= {"feedback", "regret", "variance", "loss", "gamma"}
    assert charts >= {"budget-cost", "budget-variance"}
    assert not (tmp_path / "kvib-theory.jsonl").exists()


def held_all(checks: dict[str, bool], words: str) -> bool:
    return all(value for claim, value in checks.items() if words in claim)
