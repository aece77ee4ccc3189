"""K-Vib's theory: its parts, what they measure, the verdicts, and the page."""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation

from rota.errors import BadInput
from rota.metrics import variance
from rota.sampling import SAMPLERS
from rota_lab.reproduce import estimate, kvib_parts, kvib_studies, run, write_page
from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS, judged
from rota_lab.reproduce.kvib_stack import Lane, Row, Stack, least_cost, own_updates
from rota_lab.reproduce.kvib_theory_claims import (
    against,
    by_reading,
    exponents,
    statements,
    vanishing,
)
from rota_lab.reproduce.kvib_theory_page import report
from rota_lab.reproduce.kvib_theory_view import KVIB, OURS, View, positive, slope, title
from rota_lab.reproduce.parts import Found, read

theory = importlib.import_module(
    "rota_lab.reproduce.kvib_theory"
)  # the package has a function of that name
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_the_parts() -> None:
    parts = theory.parts()
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    assert {part.study for part in parts} == set(theory.STUDIES) == set(theory.SECONDS)
    assert all(part.study == "logits" for part in parts[:20])
    assert {part.rounds for part in parts if part.study in ("logits", "twice")} == {500}
    assert {part.study for part in theory.parts(quick=True)} == set(theory.STUDIES) - {"other"}
    assert sum(" rounds" in line for line in estimate("kvib-theory")) == len(names)


def test_lanes() -> None:
    everything = kvib_parts.everything()
    assert len(set(everything)) == len(everything)
    assert set(kvib_parts.OWN) <= set(everything)
    learners = {name.rpartition("-")[0] for name in (*everything, *kvib_parts.SYSTEMATIC)}
    assert learners >= set(kvib_parts.LEARNERS)
    for name in (*everything, *kvib_parts.SYSTEMATIC):
        sampler = kvib_parts.of(name, 3)
        assert title(name)
        assert type(sampler) in SAMPLERS.values()
        assert getattr(sampler, "budget", None) == 3
    assert (1 + len(kvib_parts.OWN)) % 16 == 0, "softmax is fast there"
    assert len(kvib_parts.BUDGETS) * len(kvib_parts.OWN_BUDGETS) % 16 == 0
    assert (1 + (1 + len(kvib_parts.BUDGETS)) * len(kvib_parts.SYSTEMATIC)) % 16 == 0
    rows = [Row(np.array([1.0, 3.0]), 2.0)]
    shared = [lane.name for lane in kvib_parts.shared_lanes(rows, "logits", True)]
    assert len(set(shared)) == len(shared)
    assert {lane.name for lane in kvib_parts.shared_lanes(rows, "logits", False)} < set(shared)
    (largest,) = [
        lane.sampler
        for lane in kvib_parts.shared_lanes(rows, "logits", True)
        if lane.name == "vrb-largest-0.1"
    ]
    assert largest.bound == pytest.approx(0.3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("logits-seed7", {"logits-seed7"}),
        ("holds, growth-N50", {"holds-figure6", "growth-N50"}),
        ("twice", {f"twice-seed{seed}" for seed in kvib_parts.SEEDS}),
    ],
)
def test_only(only: str, names: set[str]) -> None:
    assert {part.name for part in theory.chosen(only, theory.parts())} == names


def test_only_something_else() -> None:
    with pytest.raises(BadInput, match="--only names 'logit', which is no part: did you mean"):
        run("kvib-theory", only="logit")


# --- what is measured


def test_the_least_cost_is_that_of_no_other_p() -> None:
    scores = np.array([0.1, 0.5, 0.2, 3.0])
    least = least_cost(scores, 2)
    assert least == pytest.approx(3.0**2 + 0.8**2)  # 3 has p = 1, the others share 1
    for seed in range(50):
        p = np.random.default_rng(seed).dirichlet(np.ones(4)) * 2
        if p.max() <= 1:
            assert float((scores**2 / p).sum()) >= least


def test_equation_7_and_lemma_2() -> None:
    rows = [Row(np.array([1.0, 2.0, 3.0] * 5), 8.0), Row(np.array([3.0, 2.0, 1.0] * 5), 5.0)]
    over = kvib_parts.over_time([], rows)
    assert over["ends"] == [2]
    squares = rows[0].scores ** 2 + rows[1].scores ** 2
    assert over["fixed"] == pytest.approx([least_cost(np.sqrt(squares), 10)])
    assert over["least"] == pytest.approx([sum(least_cost(row.scores, 10) for row in rows)])
    assert over["fixed"][0] > over["least"][0]
    lemma = kvib_parts.lemma_2(rows)
    fixed = [variance.fixed(10, row.scores, row.total) for row in rows]
    coins = [variance.independent(np.full(15, 10 / 15), row.scores) for row in rows]
    assert lemma["fixed"] == pytest.approx(sum(fixed), rel=1e-5)
    assert lemma["coins"] == pytest.approx(sum(coins), rel=1e-5)
    assert lemma["late fixed"] == pytest.approx(fixed[1], rel=1e-5)
    expected = np.mean([a < b for a, b in zip(fixed, coins, strict=True)])
    assert lemma["fixed is below coins"] == expected
    assert lemma["bound"] is not None
    assert lemma["fixed"] is not None
    assert lemma["bound"] > lemma["fixed"]


def test_the_descent_lemma_holds_with_the_terms() -> None:
    """With full participation nothing is random: a step falls at least as the terms say."""
    rate = 0.05
    stack = Stack(federation([40, 12, 70]), [Lane("uniform-fixed", SAMPLERS["full"](), rate)], 1)
    terms, losses = kvib_parts.Terms(stack), list[float]()

    def look(now: int, weights: torch.Tensor, whole: torch.Tensor) -> None:
        terms.look(1 + kvib_parts.EVERY * (now - 1), weights, whole)
        losses.append(float(stack.shares[0] @ stack.gradients(weights[:, :, 0])[0]))

    meters, *_ = own_updates(stack, 5, watch=look)
    rows = terms.rows[0]
    assert [row["loss"] for row in rows] == losses
    for row, after in zip(rows, losses[1:], strict=False):
        assert after <= row["loss"] - row["progress"] + row["step"] + 1e-7
    assert rows[0]["progress"] > rows[0]["step"] > 0, "else the bound says nothing"
    meters[0].variance = [0.0] * (1 + 4 * kvib_parts.EVERY)
    means = terms.means(meters)["uniform-fixed"]
    assert means["progress"] == pytest.approx(np.mean([row["progress"] for row in rows]), rel=1e-5)


def test_who_holds_how_much() -> None:
    held = kvib_studies.held(np.array([1] * 90 + [11] * 10))
    assert (held["clients"], held["examples"], held["median"], held["most"]) == (100, 200, 1, 11)
    assert held["shares"][kvib_studies.LARGEST.index(0.1)] == pytest.approx(0.55)


def test_made_up_updates() -> None:
    shares = np.linspace(1, 3, 20) / 40
    rows = {name: list(make(shares, 6)) for name, make in kvib_studies.MADE.items()}
    assert all(len(norms) == 6 for norms in rows.values())
    assert np.allclose(np.array(rows["inverse"]) * shares, 1)
    asleep = np.array(rows["waking"]) < 0.5
    assert asleep[:3, -2:].all()
    assert asleep.sum() == 6
    assert len(np.unique(rows["noisy"])) == 120


# --- the verdicts, from made-up parts


def seed_of(study: str, seed: int, where: str = "own", **lanes: dict[str, float]) -> Found:
    named = {name.replace("_", "-"): numbers for name, numbers in lanes.items()}
    part = theory.Piece(study, f"seed{seed}", 20)
    more = {"machine": "here", "seconds": 1.0, "over time": {"ends": [20]}}
    lemma = dict.fromkeys(("bound", "fixed", "coins"), 1.0)
    more["lemma 2"] = lemma | {f"late {key}": 1.0 for key in lemma}
    return {"part": part.name, **asdict(part), where: named, **more}


def view(*parts: Found) -> View:
    return View({part["part"]: part for part in parts})


def verdict(some: View, words: str) -> str:
    (claim,) = [claim for claim in judged(statements(some)) if words in claim.words]
    return claim.verdict


@pytest.mark.parametrize(
    ("factors", "expected"),
    [([2, 2.1, 1.9], HOLDS), ([0.5, 0.52, 0.48], FAILS), ([0.5, 2.0, 1.0], CANNOT_TELL)],
)
def test_variances_are_compared_by_ratios_of_the_same_seed(
    factors: list[float], expected: str
) -> None:
    """The seeds differ by a factor of 100, which only pairs take out."""
    parts = [
        seed_of(
            "logits",
            seed,
            kvib_independent={"variance": 10.0**seed},
            vrb_multinomial={"variance": factor * 10.0**seed},
        )
        for seed, factor in enumerate(factors)
    ]
    words = "logits, own updates: K-Vib's cumulative variance is below that of Vrb"
    assert verdict(view(*parts), words) == expected


def test_rotas_sampler_must_beat_the_best_of_each_seed() -> None:
    def parts(ours: float) -> View:
        """Each rival is twice as large as 1 on average, and the best of a seed is 1."""
        return view(
            *(
                seed_of(
                    "logits",
                    seed,
                    avare_independent={"variance": 1.0 + 3 * (seed % 2) + seed / 100},
                    vrb_independent={"variance": 4.0 - 3 * (seed % 2) + seed / 100},
                    optimal={"variance": 0.01},
                    kvib_full={"variance": 0.01},
                    succession_systematic={"variance": ours},
                )
                for seed in range(4)
            )
        )

    words = "rota's sampler, logits, own updates, K = 10: its cumulative variance is below that of"
    assert verdict(parts(0.5), words) == HOLDS
    assert verdict(parts(1.5), words) == FAILS
    assert parts(1.0).rivals("logits", "own") == ["vrb-independent", "avare-independent"]


def test_other_budgets_are_found_in_their_own_parts() -> None:
    some = view(
        seed_of("logits", 5, vrb_multinomial={"regret": 1.0, "cost": 3.0}),
        seed_of("budgets", 5, **{"vrb_multinomial_K5": {"regret": 2.0, "cost": 3.0}}),
    )
    assert by_reading(some, "own", "vrb-multinomial", "regret", 5) == {"seed5": 2.0}
    # with q = p / K in l, the regret is K l(p) - min l
    assert by_reading(some, "own", "vrb-multinomial", "unscaled", 5) == {"seed5": 5 * 3 - 1.0}
    assert by_reading(some, "own", "vrb-multinomial", "unscaled", 10) == {"seed5": 10 * 3 - 2.0}


def test_exponents_of_power_laws() -> None:
    assert slope([10, 20, 40], [7 * x**-1.5 for x in (10, 20, 40)]) == pytest.approx(-1.5)
    parts = []
    for clients in (25, 100, 400):
        part = theory.Piece("growth", f"N{clients}", 20)
        by_time = {str(end): [end**0.5 * clients**0.25, 2 * end**0.5] for end in (10, 20)}
        by_budget = {"5": [1.0, 1.0], "10": [0.25, 0.25]}
        parts.append({"part": part.name, **asdict(part), "T": by_time, "K": by_budget})
    some = view(*parts)
    assert exponents(some, "T") == pytest.approx([0.5, 0.5])
    assert exponents(some, "N") == pytest.approx([0.25, 0])
    assert exponents(some, "K") == pytest.approx([-2, -2])


def test_a_gap_that_vanishes() -> None:
    over = {"ends": [5, 10, 20], "least": [1, 2, 4], "kvib-full": [2, 4, 7], KVIB: [3, 5, 10]}
    part = seed_of("logits", 0) | {"over time": over}
    # 2 parts of 2 in the first half, 1 part of 2 in the second
    assert vanishing(view(part), "kvib-full", "least") == pytest.approx([math.log(2)])
    assert vanishing(view(part), KVIB, "kvib-full") == pytest.approx([math.log(1 / 2)])


def test_elsewhere_both_ways_of_uniform_sampling_count() -> None:
    assert against([2.0, 1.0], [1.0, 0.0]) == [math.log(2)]
    draws = {"uniform-fixed": [2.0, 2.1], "uniform-independent": [1.0, 1.1], OURS: [1.5, 1.6]}
    part = {"study": "other", "which": "digits", "part": "other-digits", "budgets": {"2": draws}}
    assert verdict(view(part), "digits, K = 2") == FAILS


def test_intervals_of_positive_numbers_do_not_reach_below_0() -> None:
    assert positive([1, 10, 1000]).startswith("21.5 (0.")
    assert positive([-1.0, 1.0]).startswith("0 (-")
    assert positive([]) == "–"


# --- the work and the page


def test_a_page_of_some_parts_says_that_others_are_missing(tmp_path: Path) -> None:
    parts = [
        seed_of("twice", seed, kvib_independent={"variance": seed + 1.0}, full={"loss": 1.0})
        for seed in range(3)
    ]
    names = [part.name for part in theory.parts()]
    result = report(view(*parts).found, names, False)
    assert result.checks[f"all parts are finished (3 of {len(names)})"] is False
    text = write_page(result, tmp_path).read_text()
    assert "- logits: 20 of 20 parts are not finished." in text
    assert f"| K-Vib, coins | {positive([1.0, 2.0, 3.0])} |" in text
    assert write_page(report({}, names, False), tmp_path / "none").exists()


def test_finished_parts_are_kept_and_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    def quickly(part: Any, *_: Any) -> Found:
        done.append(part.name)
        return {"own": {"kvib-independent": {"variance": 1.0}}}

    monkeypatch.setitem(theory.STUDIES, "budgets", quickly)
    run("kvib-theory", out=tmp_path, only="budgets-seed5")
    assert read(tmp_path / "kvib-theory.jsonl")["budgets-seed5"]["rounds"] == 500
    run("kvib-theory", out=tmp_path, only="budgets-seed5,budgets-seed6")
    assert done == ["budgets-seed5", "budgets-seed6"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
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
    monkeypatch.setattr(theory, "QUICK_ROUNDS", 4)
    monkeypatch.setattr(theory, "CLIENTS", (25, 100))
    result = run("kvib-theory", quick=True, out=tmp_path)
    assert not result.checks, "all parts are finished"
    page = write_page(result, tmp_path).read_text()
    assert "This is a quick version" in page
    assert page.count("Not run.") == 1, "the other federations"
    charts = {path.stem.removeprefix("kvib-theory-quick-") for path in tmp_path.glob("*.svg")}
    assert charts >= {"variance-logits", "variance-twice", "budgets", "rates", "holds"}
    order = [claim for claim in result.claims if "variance of optimal is below" in claim.words]
    assert len(order) == 2
    assert not (tmp_path / "kvib-theory.jsonl").exists()


def test_the_page_says_what_its_parts_say(tmp_path: Path) -> None:
    """No number on the page was typed by hand: its last line alone depends on the machine."""
    kept = (RESULTS / "kvib-theory.jsonl").read_bytes()
    (tmp_path / "kvib-theory.jsonl").write_bytes(kept)
    page = write_page(run("kvib-theory", out=tmp_path, minutes=0), tmp_path)

    def body(path: Path) -> str:
        return path.read_text().rpartition("\n`rota reproduce")[0]

    assert body(page) == body(RESULTS / "kvib-theory.md")
    for chart in tmp_path.glob("*.svg"):
        assert chart.read_bytes() == (RESULTS / chart.name).read_bytes()
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        path.name for path in RESULTS.glob("kvib-theory-*.svg")
    }
