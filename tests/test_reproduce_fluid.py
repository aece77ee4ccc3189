"""FLuID's reproductions: verdicts, what is run, what is measured, and what the pages say."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rota import loop
from rota.data.federation import Examples
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.plan import Plan, Seen
from rota.sampling import Full
from rota.submodel import Fixed, Invariant, Ordered, Stragglers
from rota.submodel.choice import Wanted
from rota.world.devices import Phones
from rota_lab.reproduce import (
    REPRODUCTIONS,
    Result,
    estimate,
    fluid,
    fluid_page,
    fluid_settings,
    fluid_studies,
    fluid_time_page,
    fluid_track,
    run,
    table,
    write_page,
)
from rota_lab.reproduce.fluid_settings import QUICK
from rota_lab.reproduce.interval import (
    CANNOT_TELL,
    FAILS,
    HOLDS,
    Claim,
    Statement,
    fitted,
    holm,
    judged,
    p_value,
)
from rota_lab.reproduce.parts import read

STUDIES = fluid_studies.STUDIES
# the package has functions of these names, too
fluid_linear = importlib.import_module("rota_lab.reproduce.fluid_linear")
fluid_time = importlib.import_module("rota_lab.reproduce.fluid_time")


# verdicts


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12, unique=True))
def test_p_values_are_students(values: list[float]) -> None:
    if np.std(values) > 1e-6:
        assert p_value(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-6)


def test_p_values_without_a_spread() -> None:
    assert p_value([0.3]) == p_value([0.0, 0.0]) == 1
    assert p_value([0.3, 0.3]) == 0


def test_holm_by_the_definition() -> None:
    """The k-th smallest p-value is compared with level / (number - k); the first miss stops."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        p = generator.random(6) ** 3
        level = float(generator.random())
        order, rejected = np.argsort(p), set()
        for k, place in enumerate(order.tolist()):
            if p[place] >= level / (len(p) - k):
                break
            rejected.add(place)
        assert {k for k, each in enumerate(holm(p.tolist())) if each < level} == rejected
    assert holm([]) == []


def test_of_many_claims_that_are_chance_few_pages_have_a_verdict() -> None:
    generator = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        page = [Statement("x", row) for row in generator.standard_normal((8, 6)).tolist()]
        wrong += any(claim.verdict != CANNOT_TELL for claim in judged(page))
    assert stats.binomtest(wrong, 400, 0.05, alternative="greater").pvalue > 1e-3


def test_three_verdicts() -> None:
    good, bad = [0.9, 1.0, 1.1, 1.05], [-0.9, -1.0, -1.1, -1.05]
    claims = judged([Statement("a", good, " points"), Statement("b", bad), Statement("c", [1, -1])])
    assert [claim.verdict for claim in claims] == [HOLDS, FAILS, CANNOT_TELL]
    assert claims[0].words.startswith("a: +1.01 points (95 %: +0.88 to +1.15, 4 seeds)")
    assert judged([Statement("a", [2.0])]) == [Claim("a: +2.00, 1 seed", CANNOT_TELL)]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=12))
def test_the_line_through_points_is_that_of_least_squares(
    points: list[tuple[float, float]],
) -> None:
    x, y = np.array(points).T
    x, y = x.round(2), y.round(2)
    if not (x.std() and y.std()):
        return
    start, slope = fitted(x, y)
    right, wide = stats.linregress(x, y), stats.t.ppf(0.975, len(x) - 2)
    assert start.mean == pytest.approx(right.intercept, rel=1e-6, abs=1e-6)
    assert slope.mean == pytest.approx(right.slope, rel=1e-6, abs=1e-6)
    for line, error in ((start, right.intercept_stderr), (slope, right.stderr)):
        assert line.high - line.mean == pytest.approx(wide * error, rel=1e-3, abs=1e-5)
        assert line.mean - line.low == pytest.approx(wide * error, rel=1e-3, abs=1e-5)


def test_verdicts_are_on_the_page_and_in_the_table(tmp_path: Path) -> None:
    claims = [Claim("water is wet: +1", HOLDS), Claim("fire is cold: -1", FAILS)]
    result = Result("x", "X", "Text.", [], claims=claims)
    assert not result.ok
    assert Result("x", "X", "Text.", [], claims=claims[:1]).ok
    text = write_page(result, tmp_path).read_text(encoding="utf-8")
    assert "- **holds**: water is wet: +1\n- **fails**: fire is cold: -1\n" in text
    assert table(result)[-2:] == ["holds: water is wet: +1", "fails: fire is cold: -1"]


# the studies


@pytest.mark.parametrize("name", STUDIES)
def test_a_short_version(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluid, "QUICK", replace(QUICK, rounds=1))
    result = run(name, quick=True, out=tmp_path)
    study = STUDIES[name]
    assert result.quick
    methods = len(study.methods) + study.exclude
    assert len(result.rows) == 1 + min(2, len(study.columns)) * methods + len(study.extra)
    assert {row["seeds"] for row in result.rows} == {2}
    assert all(row["paper"] is None for row in result.rows)
    assert not list(tmp_path.iterdir())
    page = write_page(result, tmp_path).read_text(encoding="utf-8")
    assert "is not the result" in page
    assert "nan" not in page


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_run(name: str) -> None:
    study = STUDIES[name]
    names = [part.name for part in study.parts()]
    assert len(set(names)) == len(names)
    settings = {setting.name: setting for setting in study.settings}
    assert len(settings) == len(study.settings)
    cells = {(part.setting, part.method, part.column) for part in study.parts()}
    assert study.paper.keys() | study.invariant.keys() <= cells
    for claim in study.compared:
        for method, column in claim.above + claim.below:
            assert (study.settings[0].name, method, column) in cells
    assert estimate(name)[0].split()[0] == study.settings[0].name
    assert REPRODUCTIONS[name].__doc__ == study.summary


def test_the_stragglers_are_the_same_for_all_methods() -> None:
    shares = np.ones((1, 5))
    study = STUDIES["fluid-table2"]
    for seed in range(4):
        slow = {
            tuple(np.flatnonzero(study.columns[c].init(shares, seed)["width"] < 1))
            for c in study.columns
        }
        assert len(slow) == 1
        assert len(slow.pop()) == 1
    clusters = STUDIES["fluid-clusters"].columns[fluid_studies.CLUSTERED]
    width = clusters.init(np.ones((1, 100)), 0)["width"]
    wide, number = np.unique(width, return_counts=True)
    assert dict(zip(wide.tolist(), number.tolist(), strict=True)) == {
        0.65: 5,
        0.75: 5,
        0.85: 5,
        0.95: 5,
        1.0: 80,
    }


def test_excluded_clients_take_no_part() -> None:
    study = STUDIES["fluid-scale"]
    parts = [fluid.Part("small", "0.65", method, 0) for method in ("exclude", "random")]
    (without, _), (with_parts, _) = map(study.policies, parts)
    widths = [each.init(np.ones((1, 10)), 0)["width"] for each in (without, with_parts)]
    assert sorted(widths[0].tolist()) == [0.0] * 2 + [1.0] * 8
    assert ((widths[0] == 0) == (widths[1] == 0.65)).all()


def examples() -> Examples:
    groups = np.repeat(np.arange(7), 4)
    return Examples(torch.arange(28.0)[:, None], torch.zeros(28, dtype=torch.int64), groups)


def test_clients_of_several_writers() -> None:
    owner, clients = fluid_settings.grouped(3, 2)(examples(), np.random.default_rng(0))
    assert clients == 3
    by_writer = owner.reshape(7, 4)
    assert (by_writer == by_writer[:, :1]).all()
    assert sorted(by_writer[:, 0].tolist()) == [-1, 0, 0, 1, 1, 2, 2]


def test_the_same_random_units_in_every_round() -> None:
    task = QUICK.task(0)
    capacity = Fixed(sizes=(0.5,))
    experiment = Experiment([task], Full(), FedAvg(), capacity=capacity)
    (units,) = experiment.units
    state = loop.begin(experiment, make("auto", experiment, "cpu"))
    first, later = (
        fluid.Frozen().keep(
            {}, Wanted(0, state.models[0], units, 0.5, now), np.random.default_rng(now)
        )
        for now in (1, 2)
    )
    for one, other, layer in zip(first, later, units.layers, strict=True):
        assert one.tolist() == other.tolist() == np.unique(one).tolist()
        assert len(one) == layer.size // 2
        assert one.tolist() != list(range(len(one)))


def test_halves_of_writers() -> None:
    owner, clients = fluid_settings.halved(10)(examples(), np.random.default_rng(0))
    assert clients == 10
    for mine in owner.reshape(7, 4):
        assert len({each // 2 for each in mine.tolist() if each >= 0}) <= 1
    assert owner.max() < 10


def test_invariant_units_are_counted() -> None:
    task = QUICK.task(0)
    capacity = Fixed(sizes=(1.0, 0.5), parts=(0.8, 0.2))
    experiment = Experiment([task], Full(), FedAvg(), capacity=capacity, submodel=Invariant())
    state = loop.begin(experiment, make("auto", experiment, "cpu"))
    known = state.policies["submodel"]
    assert fluid_track.invariance(experiment, state) == (0, 0)
    known["invariant.0.0"][:50] = True  # of 200 units, of which 100 are to be dropped
    assert fluid_track.invariance(experiment, state) == (0.125, 0.25)
    known["invariant.0.1"][:] = True
    assert fluid_track.invariance(experiment, state) == (250 / 400, 0.75)


def test_finished_parts_are_kept(tmp_path: Path) -> None:
    study = STUDIES["fluid-table2"]
    tiny = replace(QUICK, name="small", rounds=1, seeds=2)
    few = dict(list(study.columns.items())[:1])
    small = replace(study, settings=(tiny,), columns=few)
    said: list[str] = []
    result = fluid.run_study(small, out=tmp_path, only="seed0", say=said.append, device="cpu")
    assert len(read(tmp_path / "fluid-table2.jsonl")) == 6
    assert "**6 of 12 runs are missing.**" in result.text
    said.clear()
    result = fluid.run_study(small, out=tmp_path, say=said.append, device="cpu")
    assert sum("accuracy" in line for line in said) == 6
    assert "missing" not in result.text
    assert {row["seeds"] for row in result.rows} == {2}
    none = fluid.run_study(small, out=tmp_path / "other", minutes=0, device="cpu")
    assert none.rows == []
    assert "These settings were not run: small." in none.text
    lines = fluid.estimate_study(small, None, tmp_path)
    assert lines[0].split()[:3] == ["small", "0", "runs"]


def test_seeds_that_are_models_of_one_run(tmp_path: Path) -> None:
    """They have first weights and data of their own; the first one is as if it were alone."""
    study, tiny = STUDIES["fluid-table2"], replace(QUICK, name="small", rounds=2, seeds=3)
    few = dict(list(study.columns.items())[-1:])
    found = []
    for joint in (False, True):
        out = tmp_path / str(joint)
        setting = replace(tiny, joint=joint)
        one = replace(study, settings=(setting,), columns=few, extra={})
        result = fluid.run_study(one, out=out, device="cpu")
        assert "missing" not in result.text
        assert {row["seeds"] for row in result.rows} == {3}
        found.append(read(out / "fluid-table2.jsonl"))
    alone, together = found
    assert alone.keys() == together.keys()
    for name, numbers in together.items():
        if name.endswith("seed0"):
            assert numbers["accuracy"] == pytest.approx(alone[name]["accuracy"], abs=0.004)
            assert numbers["bytes"] == alone[name]["bytes"]
    names = [name for name in together if "ordered" in name]
    assert len({together[name]["accuracy"] for name in names}) == 3


# the page, from made-up runs


def found(**methods: list[list[float]]) -> fluid_page.Cells:
    """Accuracies by method: for each column one per seed."""
    out: fluid_page.Cells = {}
    for method, columns in methods.items():
        names = ["whole"] if method == "whole" else ["0.95", "0.5"]
        for column, values in zip(names, columns, strict=True):
            runs = {}
            for seed, value in enumerate(values):
                runs[seed] = {
                    "accuracy": value,
                    "client_seconds": 10.0,
                    "bytes": 2**20,
                    "curve": {"rounds": [15, 60], "accuracy": [0.5, value]},
                    "machine": "here",
                    "precision": "fp32",
                }
                if method == "invariant":
                    runs[seed] |= {
                        "invariant": 0.25,
                        "filled": 0.5,
                        "invariant_curve": [0.0, 0.1, 0.2, 0.3],
                    }
            out["small", method, column] = runs
    return out


def about(**more: Any) -> fluid_page.About:
    study = replace(STUDIES["fluid-table2"], columns={k: Fixed() for k in ("0.95", "0.5")}, **more)
    return fluid.about(study, study.parts(), quick=False)


def test_the_page() -> None:
    cells = found(
        whole=[[0.9, 0.9, 0.9]],
        random=[[0.80, 0.81, 0.82], [0.70, 0.71, 0.72]],
        ordered=[[0.82, 0.83, 0.845], [0.72, 0.73, 0.74]],
        invariant=[[0.82, 0.83, 0.84], [0.72, 0.73, 0.74]],
    )
    paper = {("small", "random", "0.95"): 80.6}
    result = fluid_page.report(about(paper=paper), cells)
    verdicts = {claim.words.split(" (")[0]: claim.verdict for claim in result.claims}
    assert verdicts == {
        "small: Invariant is above Ordered: -0.08 points": CANNOT_TELL,
        "small: Ordered is above Random: +2.08 points": HOLDS,
        "small: Invariant is above Random: +2.00 points": HOLDS,
        "small: Whole models are above Ordered at 0.5: +17.00 points": HOLDS,
        "small: Whole models are above Invariant at 0.5: +17.00 points": HOLDS,
    }
    assert "Whole models reach 90.00 (90.00 to 90.00)." in result.text
    assert "| Random | 81.00 (78.52 to 83.48) | 71.00 (68.52 to 73.48) |" in result.text
    assert "| Random, source | 80.6 | – |" in result.text
    assert "whole models is -19.00 points (Random, 0.5)" in result.text
    assert "| Invariant | 0.95 | 10.0 (10.0 to 10.0) | 25.0 (25.0 to 25.0) | 50.0 |" in result.text
    row = next(row for row in result.rows if row["quantity"] == "small: Random, 0.95: accuracy, %")
    assert (row["paper"], row["seeds"]) == (80.6, 3)
    assert row["measured"] == pytest.approx(81)
    (chart,) = result.charts
    assert [line.name for line in chart.lines] == ["Random", "Ordered", "Invariant", "Whole models"]
    assert list(chart.lines[0].y) == pytest.approx([-9, -19])
    assert "The runs were made on here, products in fp32." in result.text


def test_methods_by_what_the_stragglers_data_are_worth() -> None:
    """Data worth 1, 2, 3 and 5 points; Ordered is 2 points above Random, minus half the worth."""
    worth, noise = np.array([1.0, 2.0, 3.0, 5.0]), np.array([0.01, -0.01, 0.01, -0.01])
    random = np.full(4, 0.7)
    columns = {
        "random": random,
        "ordered": random + (2 - worth / 2) / 100,
        "invariant": random + (0.5 + noise) / 100,
        "exclude": 0.9 - worth / 100,
    }
    cells = found(whole=[[0.9] * 4], **{k: [v.tolist()] * 2 for k, v in columns.items()})
    del cells["small", "exclude", "0.95"]
    text = fluid_page.report(about(), cells).text
    assert "small, 0.5: the straggler's data are worth +2.75 (+0.03 to +5.47) points, by" in text
    assert "from +1.00 to +5.00. The lines through the 4 seeds" in text
    assert "| Ordered | +2.00 (+2.00 to +2.00) | -0.50 (-0.50 to -0.50) |" in text
    assert "Ordered is above Random where the straggler's data are worth less than 4.00" in text
    assert "| Invariant | +0.5" in text
    assert "Invariant is above Random where" not in text
    assert "| Exclude stragglers | – |" in text
    assert "The lines through" not in fluid_page.report(about(exclude=True), cells).text
    cells["small", "exclude", "0.5"].pop(0)
    cells["small", "exclude", "0.5"].pop(1)
    assert "The lines through" not in fluid_page.report(about(), cells).text


def test_columns_without_runs_are_no_part_of_a_claim() -> None:
    """Random has only the first column."""
    cells = found(
        random=[[0.84, 0.85, 0.87], [0.9, 0.9, 0.9]],
        ordered=[[0.82, 0.83, 0.84], [0.92, 0.93, 0.95]],
        invariant=[[0.80, 0.81, 0.82], [0.90, 0.91, 0.92]],
    )
    del cells["small", "random", "0.5"]
    result = fluid_page.report(about(), cells)
    assert [claim.words.split(" (")[0] for claim in result.claims] == [
        "small: Invariant is above Ordered: -2.17 points",
        "small: Ordered is above Random at 0.95: -2.33 points",
        "small: Invariant is above Random at 0.95: -4.33 points",
    ]
    words = "- small has 3 of 40 seeds: 0, 1, 2; no runs of Whole models, Random at 0.5,"
    assert words in result.text


def test_accuracy_against_costs() -> None:
    """Methods that cost the same share a row, and a run's costs grow evenly over its 60 rounds."""
    cells = found(
        whole=[[0.9, 0.92]],
        random=[[0.80, 0.81], [0.70, 0.71]],
        ordered=[[0.82, 0.83], [0.72, 0.73]],
        invariant=[[0.82, 0.84], [0.72, 0.74]],
    )
    for numbers in cells["small", "ordered", "0.95"].values():
        numbers |= {"client_seconds": 4.0, "bytes": 2**19}
    result = fluid_page.report(about(over_costs=True), cells)
    assert "| whole | Whole models | 10.0 | 1.00 |" in result.text
    assert "| 0.95 | Random, Invariant | 10.0 | 1.00 |" in result.text
    assert "| 0.95 | Ordered | 4.00 | 0.500 |" in result.text
    assert "| 0.5 | all | 10.0 | 1.00 |" in result.text
    seconds, sent = result.charts[-2:]
    (line,) = (line for line in seconds.lines if line.name == "Ordered")
    assert list(line.x) == pytest.approx([1, 4])
    assert list(line.y) == pytest.approx([50, 82.5])
    (line,) = (line for line in sent.lines if line.name == "Whole models")
    assert list(line.x) == pytest.approx([0.25, 1])
    assert list(line.y) == pytest.approx([50, 91])
    assert len(fluid_page.report(about(), cells).charts) == len(result.charts) - 2


def test_only_seeds_that_both_have_are_compared() -> None:
    cells = found(random=[[0.80, 0.9], [0.70, 0.8]], ordered=[[0.82], [0.72]])
    result = fluid_page.report(about(), cells)
    assert [claim.words for claim in result.claims] == [
        "small: Ordered is above Random: +2.00 points, 1 seed"
    ]
    assert "because other methods have not finished their seeds: 2 runs." in result.text
    assert "| Random | 80.0 (1 seed) | 70.0 (1 seed) |" in result.text


# the time of parts


def test_the_time_of_parts(tmp_path: Path) -> None:
    result = run("fluid-linear", quick=True, out=tmp_path, device="cpu")
    assert len(result.rows) == 2 * 5
    assert len(result.claims) == 2 * 3
    assert all(row["measured"] > 0 for row in result.rows)
    assert len(result.charts) == 2


def test_phones_take_as_long_as_the_part_computes_and_sends() -> None:
    """By hand: FLuID's network at half its width has 104,562 parameters."""
    net = fluid_linear.NETS["femnist"]
    bench = fluid_linear.Bench(net, "cpu", "fp32")
    for width, params in ((1.0, 410_022), (0.5, 104_562)):
        experiment = bench._experiment(width)
        engine = make("sequential", experiment, "cpu")
        work = fluid_linear.job(experiment, engine)
        assert work.duty.down.tolist() == [4 * params] * 5
        _, seconds = fluid_linear._train(engine, work, "cpu")
        profile = Phones().profile(5, 0)
        r = np.array([16, 64, 120]) if width == 1 else np.array([8, 32, 60])
        # multiply-adds per example: two convolutions at 28x28 and 14x14, two products
        forward = 28**2 * 25 * r[0] + 14**2 * 25 * r[0] * r[1] + 49 * r[1] * r[2] + r[2] * 62
        transfer = 8 * params / profile.link
        computing = np.array(seconds) - transfer
        assert np.ptp(computing * profile.speed) / np.mean(computing * profile.speed) < 1e-6
        # the first layer has no gradient of its inputs
        passes = computing * profile.speed / (2 * forward * net.examples)
        assert 2.5 < passes.min() <= passes.max() < 3.1


def test_a_straight_line_explains_itself() -> None:
    widths = np.array(fluid_linear.WIDTHS)
    assert fluid_linear._explained(0.2 + 0.8 * widths) == pytest.approx(1)
    assert fluid_linear._explained(widths**2) < 1
    ratio = np.stack([widths + 0.05, widths - 0.15], axis=1)
    near, _, _ = fluid_linear._statements("x", ratio)
    assert near.values == pytest.approx([0.05, -0.05])


# the time of rounds


def test_the_time_of_rounds(tmp_path: Path) -> None:
    result = run("fluid-time", quick=True, out=tmp_path, device="cpu")
    assert len(result.rows) == len(fluid_time.METHODS)
    assert "nan" not in result.text
    assert "FLuID's paper: up to twice as long" in result.text


def test_what_a_run_notes() -> None:
    task = fluid_time.task_of("digits", 0)
    capacity = Stragglers(share=0.2, margin=0.01)
    experiment = Experiment(
        [task],
        Full(),
        FedAvg(),
        rounds=4,
        evaluate=5,
        capacity=capacity,
        submodel=Ordered(),
        devices=Phones(gflops=0.1),
    )
    numbers = fluid_time.played(experiment, make("auto", experiment, "cpu"), lambda: None)
    seconds, widths = np.array(numbers["seconds_by_round"]), np.array(numbers["widths"])
    assert seconds.shape == widths.shape == (4, 5)
    assert (widths[:2] == 1).all()
    slow = seconds[0].argmax()
    assert (widths[2:, slow] < 1).all()
    assert (seconds[2:, slow] < seconds[0, slow]).all()
    assert numbers["virtual_seconds"] == pytest.approx(seconds.max(axis=1).sum(), rel=1e-5)
    assert numbers["server"] > 0
    assert numbers["training"] > 0


def test_a_static_straggler_stays() -> None:
    shares, capacity = np.ones((1, 5)), fluid_time.Static(share=0.2)
    state = capacity.init(shares, 0)
    plan = Plan(np.arange(5), np.zeros(5, int), np.ones(5), np.full(5, 0.2))
    for now in range(8):
        seen = Seen.nothing(5)
        seen.costs.seconds[:] = [1, 1, 1, 1, 2] if now < 4 else [3, 1, 1, 1, 1]
        state = capacity.observe(state, shares, plan, seen)
        if now >= 1:
            assert np.flatnonzero(capacity.widths(state) < 1).tolist() == [4]


def times(*rounds: list[float], widths: list[float] | None = None) -> dict[str, Any]:
    total = sum(map(max, rounds))
    return {
        "seconds_by_round": list(rounds),
        "widths": [widths or [1.0] * len(rounds[0])] * len(rounds),
        "virtual_seconds": total,
        "accuracy": 0.8,
        "server": 0.02,
        "training": 0.5,
        "machine": "here",
        "precision": "fp32",
    }


def test_times_against_the_target_and_the_baseline() -> None:
    base = times(*[[1.0, 1.0, 1.0, 1.0, 1.5]] * 6)
    fast = times(*[[1.0, 1.0, 0.9, 1.0, 1.05]] * 6, widths=[1.0] * 4 + [0.5])
    fast["server"] = 0.03
    assert fluid_time_page.before(base) == pytest.approx(1.5)
    assert fluid_time_page.against_target(fast).tolist() == pytest.approx([1.05] * 2)
    assert len(fluid_time_page.against_target(base)) == 0
    assert fluid_time_page.overhead(fast, base) == pytest.approx((0.01 / 1.5, 0.01 / 0.1))
    cells = {
        ("small", "changing", method): dict.fromkeys(range(3), run)
        for method, run in (("baseline", base), ("fluid", fast))
    }
    result = fluid_time_page.report(cells, 6, 6, quick=False)
    verdicts = {claim.words.partition(": ")[2]: claim.verdict for claim in result.claims}
    assert [words.split(":")[0] for words in verdicts] == [
        "FLuID is at least 18 % faster than the baseline",
        "stragglers with FLuID are within 10 % of the target on average",
        "calibration costs under 5 % of a round's time",
    ]
    assert set(verdicts.values()) == {HOLDS}
    assert "30.0 (30.0 to 30.0)" in result.text
