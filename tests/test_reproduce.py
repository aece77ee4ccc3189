"""Reproductions: gradient descent's bound on rota's own rounds, and every reproduction's page."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.cli import app as commands
from rota.errors import BadInput
from rota_lab.reproduce import REPRODUCTIONS, Chart, Line, Result, over_seeds, run, write_page
from rota_lab.reproduce.chart import svg, ticks
from rota_lab.reproduce.gd_bound import (
    TOLERANCE,
    Linear,
    Problem,
    breast_cancer,
    by_hand,
    descend,
    factor,
    quadratic,
    sharp,
    start_of,
    worst_ratio,
    worst_step,
)
from rota_lab.reproduce.gd_distributed import Run, distributed, train
from rota_lab.reproduce.gd_inequalities import inequalities
from rota_lab.reproduce.gd_more import CHANNELS, compressed, two_minima
from rota_lab.reproduce.interval import FAILS, HOLDS

PROBLEMS = {"quadratic": quadratic(), "logistic": breast_cancer()}


@pytest.fixture(scope="module")
def quick() -> Result:
    return run("gd-bound", quick=True)


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]


def hessian(problem: Problem, w: np.ndarray) -> np.ndarray:
    """By central differences of the written-out gradient."""
    steps = np.eye(len(w)) * 1e-5
    columns = [(problem.gradient(w + step) - problem.gradient(w - step)) / 2e-5 for step in steps]
    return np.stack(columns)


def test_curvature_is_between_c_and_L(problem: Problem) -> None:
    generator = np.random.default_rng(0)
    for scale in (0.0, 0.1, 1.0):
        eigenvalues = np.linalg.eigvalsh(
            hessian(problem, scale * generator.standard_normal(problem.x.shape[1]))
        )
        assert problem.convex - 1e-8 <= eigenvalues[0]
        assert eigenvalues[-1] <= problem.smooth + 1e-8
        if problem.name == "quadratic":
            assert eigenvalues[[0, -1]] == pytest.approx([problem.convex, problem.smooth], abs=1e-8)


def test_best_is_the_minimum_by_another_optimiser() -> None:
    from scipy.optimize import minimize

    problem = PROBLEMS["logistic"]

    def value(w: np.ndarray) -> float:
        z = problem.x @ w
        return float(np.mean(np.logaddexp(0, z) - problem.y * z) + problem.ridge / 2 * w @ w)

    found = minimize(
        value,
        np.zeros(problem.x.shape[1]),
        jac=problem.gradient,
        method="BFGS",
        options={"gtol": 1e-9},
    )
    assert problem.best == pytest.approx(found.fun, abs=TOLERANCE)
    assert problem.smooth_at_best == pytest.approx(
        np.linalg.eigvalsh(hessian(problem, found.x))[-1], abs=1e-6
    )


@pytest.mark.parametrize("rate", [0.1, 1.0, 1.5, 1.9])
def test_gap_is_under_the_bound(problem: Problem, rate: float) -> None:
    lr = rate / problem.smooth
    shrink = factor(problem, lr)
    assert shrink is not None
    assert shrink < 1
    gap = descend(problem, lr, 40, seed=7).gap
    assert gap[-1] < gap[0]
    assert worst_ratio(gap, shrink) <= 1
    assert worst_step(gap) <= sharp(problem, lr)


def test_factor() -> None:
    problem = PROBLEMS["quadratic"]
    assert factor(problem, 0.5 / problem.smooth) == 1 - 0.5 * problem.convex / problem.smooth
    assert factor(problem, 1 / problem.smooth) == pytest.approx(sharp(problem, 1 / problem.smooth))
    assert factor(problem, 1.5 / problem.smooth) == pytest.approx(
        1 - 0.75 * problem.convex / problem.smooth
    )
    assert factor(problem, 2 / problem.smooth) is None


def test_a_wrong_constant_is_caught() -> None:
    """With c ten times too large the slowest direction is slower than the bound allows."""
    problem = PROBLEMS["quadratic"]
    lr = 1 / problem.smooth
    gap = descend(problem, lr, 60).gap
    wrong = replace(problem, convex=10 * problem.convex)
    shrink = factor(wrong, lr)
    assert shrink is not None
    assert worst_ratio(gap, shrink) > 2
    assert worst_step(gap) > shrink


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"smooth": 0.5}, ["smoothness", "L is"]),
        ({"convex": 3.0}, ["strong-convexity", "PL"]),
        ({"best": -1.0}, ["PL"]),
    ],
)
def test_the_lectures_inequalities_along_the_path(
    change: dict[str, float], failed: list[str]
) -> None:
    """They hold, and a wrong L, c or F* is caught."""
    problem = PROBLEMS["quadratic"]
    lr = 0.5 / problem.smooth
    path = [(lr, descend(problem, lr, 40).iterates)]
    _, claims = inequalities(replace(problem, **change), path)
    fails = [each.words for each in claims if each.verdict == FAILS]
    for word in failed[:1] if "smooth" in change else failed:
        assert any(word in words for words in fails), (word, fails)
    assert bool(fails) == bool(failed)


def test_workers_with_all_their_data_make_the_steps_of_gradient_descent() -> None:
    problem = PROBLEMS["logistic"]

    def start(seed: int) -> Linear:
        return Linear(start_of(problem, seed), problem.ridge)

    for alike in (True, False):
        paths = train(problem, start, 20, 2, 4, 1, None, alike)
        for seed, path in enumerate(paths):
            alone = descend(problem, 1 / problem.smooth, 20, seed).gap
            np.testing.assert_allclose(path.gap, alone[::5], rtol=0, atol=1e-13)


def test_more_local_steps_and_noise_move_the_end() -> None:
    """Several local steps on all alike data are nearer; sorted by label they end higher."""
    problem = PROBLEMS["logistic"]

    def start(seed: int) -> Linear:
        return Linear(start_of(problem, seed), problem.ridge)

    one, many = (train(problem, start, 60, 1, 4, local, None, False)[0] for local in (1, 8))
    assert many.near() < one.near()
    assert many.gap[-1] == pytest.approx(many.gap[-2], rel=1e-3)
    assert many.gap[-1] > 1e-6


def test_runs_of_distributed_sgd_are_kept(tmp_path: Path) -> None:
    problem, file = PROBLEMS["logistic"], tmp_path / "gd-bound.jsonl"

    def start(seed: int) -> Linear:
        return Linear(start_of(problem, seed), problem.ridge)

    first = distributed(problem, start, 5, 2, file)
    kept = file.read_text()
    assert kept.count("\n") == 8
    again = distributed(problem, start, 5, 2, file)
    assert again.claims == first.claims
    assert file.read_text() == kept


def test_compressed_updates_and_their_bytes() -> None:
    """A quantised update takes a byte per number and a scale, and hardly more rounds."""
    problem = PROBLEMS["logistic"]

    def start(seed: int) -> Linear:
        return Linear(start_of(problem, seed), problem.ridge)

    rows, statements = compressed(problem, start, 100, 1)
    bytes_up = [row["measured"] for row in rows if "bytes up" in row["quantity"]]
    whole, *_ = train(problem, start, 100, 1, 4, 1, None)
    assert bytes_up[0] == pytest.approx(4 * 31 * 8 * whole.near())
    (quantised,) = [each for each in statements if "to 8 bits" in each.words]
    assert math.exp(quantised.values[0]) == pytest.approx(31 * 8 / (31 + 4), rel=0.05)
    assert sum("gap over the last" in row["quantity"] for row in rows) == len(CHANNELS)


def test_two_minima() -> None:
    rows, claim = two_minima(150)
    assert claim.verdict == HOLDS
    assert rows[1]["measured"] > rows[0]["measured"]
    assert two_minima(3)[1].verdict == FAILS, "it has not settled yet"


def test_near_and_floor() -> None:
    path = Run([0, 5, 10, 15, 20], np.array([1.0, 0.1, 0.01, 0.001, 0.003]))
    assert path.near() == pytest.approx(5 + 5 * math.log10(2))
    assert path.floor == 0.003
    assert Run([0, 5], np.array([1.0, 0.5])).near() == math.inf


def test_rounding_is_forgiven_only_up_to_the_tolerance() -> None:
    assert worst_ratio(np.array([1.0, 0.5 + 0.9 * TOLERANCE, 0.0]), 0.5) <= 1
    assert worst_ratio(np.array([1.0, 0.5 + 2 * TOLERANCE, 0.0]), 0.5) > 1
    assert worst_step(np.array([1.0, 1e-16, 3e-16])) < 0.01


def test_above_two_over_L() -> None:
    """The quadratic diverges, finally by (1 - 2.1)^2 = 1.21 per step.

    The logistic loss is flatter at its minimum and does not diverge.
    """
    far, flat = (descend(p, 2.1 / p.smooth, 60).gap for p in PROBLEMS.values())
    assert far[-1] > far[0]
    assert far[-1] / far[-2] == pytest.approx(1.21, abs=1e-3)
    assert flat[-1] < 0.1 * flat[0]


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_workers_make_the_same_steps(problem: Problem, workers: int) -> None:
    lr = 1 / problem.smooth
    together = descend(problem, lr, 20, workers=workers).iterates
    assert together.dtype == np.float64
    np.testing.assert_allclose(together, by_hand(problem, lr, 20), rtol=0, atol=1e-13)
    np.testing.assert_allclose(together, descend(problem, lr, 20).iterates, rtol=0, atol=1e-13)


def test_every_claim_of_the_quick_run_holds(quick: Result) -> None:
    assert quick.quick
    assert quick.checks == {}
    exact = [each for each in quick.claims if "by a factor" not in each.words]
    assert len(exact) == 7 + 2 * 5 + 1 + 1
    assert {each.verdict for each in exact} == {HOLDS}, exact
    assert quick.ok
    assert not replace(quick, checks={**quick.checks, "the moon is a cheese": False}).ok


def test_rows_are_the_contract(quick: Result) -> None:
    rows = json.loads(json.dumps(quick.rows, allow_nan=False))
    for row in rows:
        assert list(row) == ["quantity", "paper", "measured", "low", "high", "seeds"]
        assert row["low"] <= row["measured"] <= row["high"]
        several = "worker" in row["quantity"] and "iterates" not in row["quantity"]
        assert row["seeds"] == (2 if several else 1)
    assert len({row["quantity"] for row in rows}) == len(rows)
    ratios = [row for row in rows if "gap / bound" in row["quantity"]]
    assert len(ratios) == 8
    assert all(row["high"] <= row["paper"] == 1 for row in ratios)


def test_page(quick: Result, tmp_path: Path) -> None:
    page = write_page(quick, tmp_path / "results")
    assert page == tmp_path / "results" / "gd-bound-quick.md"
    text = page.read_text(encoding="utf-8")
    assert "rota reproduce gd-bound --quick" in text
    assert "torch" in text.rsplit("wrote this page on", 1)[1]
    assert sum(line.startswith("|") for line in text.splitlines()) == 2 + len(quick.rows)
    assert "| quadratic, lr 2.1/L: diverged (last gap > first gap) | – | 1 | 1 | 1 | 1 |" in text
    for chart in quick.charts:
        assert f"(gd-bound-quick-{chart.name}.svg)" in text
        picture = ElementTree.parse(page.with_name(f"gd-bound-quick-{chart.name}.svg"))
        if chart.name not in PROBLEMS:
            continue
        assert len([e for e in picture.iter() if e.get("stroke-dasharray")]) == 4
    assert write_page(quick, tmp_path / "results") == page  # a second time over the first
    assert (
        write_page(replace(quick, quick=False), tmp_path / "results").name == "gd-bound.md"
    )  # which has another place


def test_a_failed_claim_is_seen_on_the_page(tmp_path: Path) -> None:
    result = Result(
        "x", "X", "Text.", [over_seeds("a", None, [1.0, 2.0, 6.0])], checks={"water is dry": False}
    )
    text = write_page(result, tmp_path).read_text(encoding="utf-8")
    assert "**no**: water is dry" in text
    assert "| a | – | 3 | 1 | 6 | 3 |" in text


def test_names() -> None:
    assert "gd-bound" in REPRODUCTIONS
    assert all((function.__doc__ or "").strip() for function in REPRODUCTIONS.values())
    with pytest.raises(BadInput, match="did you mean 'gd-bound'"):
        run("gd-bond")


@pytest.mark.parametrize("name", ["fedavg-table1", "kvib-theory", "kvib-femnist", "mmfl-table1"])
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    page = tmp_path / f"{name}.md"
    page.write_text("a good page")
    for minutes in ("-1", "nan"):
        assert (
            _refused(name, "--minutes", minutes, "--out", str(tmp_path))
            == f"--minutes is {minutes}: give 0, which runs nothing, or more"
        )
    both = "leave out one of the two"
    assert (
        _refused(name, "--quick", "--only", "foo", "--out", str(tmp_path))
        == f"--only is not for --quick, which has parts of its own: {both}"
    )
    assert (
        _refused(name, "--quick", "--estimate", "--out", str(tmp_path))
        == f"--estimate is not for --quick, which is short: {both}"
    )
    assert page.read_text() == "a good page"


def _refused(*words: str) -> str:
    """What the command complains of."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert commands.status(["reproduce", *words]) == 2
    return err.getvalue().removeprefix("rota: ").rstrip("\n")


def test_from_python_it_is_refused_too() -> None:
    with pytest.raises(BadInput, match="--only is not for --quick"):
        run("mmfl-table1", quick=True, only="3-gvr")
    with pytest.raises(BadInput, match="--minutes is -1"):
        run("mmfl-table1", minutes=-1)


@example([0.0, 5e-324])
@example([3e11, -2e-313])
@example([-3e11, 2e-313])
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20))
def test_ticks_span_the_values(values: list[float]) -> None:
    marks = ticks(values)
    assert marks[0] <= min(values) + 1e-9 * abs(min(values))
    assert marks[-1] >= max(values) - 1e-9 * abs(max(values))
    assert 2 <= len(marks) <= 9
    assert all(a < b for a, b in itertools.pairwise(marks))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=10))
def test_svg_keeps_lines_inside(points: list[tuple[float, float]]) -> None:
    line = Line("a < b & c", *zip(*points, strict=True))
    root = ElementTree.fromstring(
        svg(
            Chart(
                "c",
                "a < b",
                "x & y",
                "y",
                [line, Line("", [points[0][0]], [points[0][1]], 9, True)],
            )
        )
    )
    width, height = map(float, root.get("viewBox", "").split()[2:])
    drawn = [
        e.get("d", "")
        for e in root.iter()
        if e.get("stroke-width") == "1.8" and "h24" not in e.get("d", "")
    ]
    assert len(drawn) == 2
    for x, y in (map(float, point.split()) for point in drawn[0].lstrip("M").split("L")):
        assert math.isfinite(x)
        assert -0.1 <= x <= width + 0.1
        assert -0.1 <= y <= height + 0.1


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_mean_of_equal_values_is_that_value(value: float, seeds: int) -> None:
    row = over_seeds("a", 1.0, [value] * seeds)
    assert row["low"] == row["measured"] == row["high"] == value
    assert row["seeds"] == seeds
