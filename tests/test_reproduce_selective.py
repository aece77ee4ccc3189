"""The reproduction of Selective FedAvg: its runs, its data, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rota.data.federation import Examples
from rota.grouping import Selective
from rota_lab.reproduce import run, three_ways, write_page
from rota_lab.reproduce.chart import svg
from rota_lab.reproduce.complexity import network
from rota_lab.reproduce.complexity import pieces as grid
from rota_lab.reproduce.complexity_page import report as complexity_report
from rota_lab.reproduce.selective import Piece, pieces
from rota_lab.reproduce.selective_page import report
from rota_lab.reproduce.three_ways import Data, Work, load, play
from rota_lab.reproduce.worst_local_loss import (
    LEAST,
    NODES,
    corrected,
    federation,
    played,
    printed,
)


def numbers(method: str, balance: int, seed: int) -> dict[str, Any]:
    mean = {"fedavg": 0.8, "selective": 0.9, "local": 0.85}.get(method, 0.9)
    shared = {"selective": 0.33, "centralised": 0.966}.get(method, 0.82)
    return {
        "mean": mean + 0.001 * seed + (0.002 * seed if method == "selective" else 0),
        "worst": 0.5,
        "shared": shared + 0.001 * seed,
        "groups": 1 if balance == 100 else 3,
        "recovered": balance == 0,
    }


def finished(piece: Piece) -> dict[str, Any]:
    names = [f"{seed}" for seed in range(3)]
    if piece.seed is not None:
        names = [f"{piece.seed}"]
    if piece.rates:
        names = [f"lr {lr:g} seed {seed}" for lr in piece.rates for seed in range(3)]
    return {
        "runs": {n: numbers(piece.method, piece.balance, int(n[-1])) for n in names},
        "bytes": 5.0,
        "client_seconds": 2.0,
        "machine": "a computer",
        "precision": "fp32",
    }


def test_the_page_judges_what_is_finished() -> None:
    some = [p for p in pieces() if p.model == "small"]
    found = {p.name: finished(p) for p in some}
    result = report(pieces(), found, False, "cpu")
    verdicts = {
        claim.words.split(":")[0] + claim.words.split(":")[1]: claim for claim in result.claims
    }
    (first,) = [c for w, c in verdicts.items() if "0 % balanced Selective beats FedAvg" in w]
    assert first.verdict == "holds"
    assert "+10.20 points" in first.words
    (rival,) = [c for w, c in verdicts.items() if " 50 % balanced Selective beats ifca" in w]
    assert rival.verdict == "cannot tell"
    assert all(result.checks.values())
    assert any("3 of 3 seeds" in words for words in result.checks)
    assert any("(96.70 against 96.40 %)" in words for words in result.checks)
    plain = [row for row in result.rows if row["paper"] is not None]
    assert {row["paper"] for row in plain} == {0.3266, 0.9640}
    names = [chart.name for chart in result.charts]
    assert names == ["small-shared", "small-mean", "groups", "sweep"]
    assert all(svg(chart).startswith("<svg") for chart in result.charts)
    assert not any("Model 2" in row["quantity"] for row in result.rows), "it has not run"
    assert "local: better in 0, equal in 0, worse in 3 of 3" in result.text
    assert (
        "| Model 1 | FedAvg, global test | 4 x 5 | 32 | 82.1 | 82.1 | 82.1 | 82.1 |" in result.text
    )


def test_a_large_models_runs_have_one_seed_each_and_are_paired_with_the_same_seeds() -> None:
    some = [p for p in pieces() if p.place == "wide-0" and p.method == "fedavg"]
    assert [p.data.first for p in some] == [p.seed for p in some] == list(range(5))
    assert {p.data.seeds for p in some} == {1}
    (classic,) = [p for p in pieces() if p.name == "classic-0-fedavg"]
    found = {p.name: finished(p) for p in (some[2], some[0], classic)}
    for each in found["wide-0-fedavg-seed2"]["runs"].values():
        each["shared"] += 0.1
    result = report(pieces(), found, False, "cpu")
    (claim,) = [claim for claim in result.claims if "Model 3 beats Model 2" in claim.words]
    assert "+5.00 points" in claim.words
    (row,) = [r for r in result.rows if r["quantity"].startswith("Model 3, fedavg") and r["paper"]]
    assert row["seeds"] == 2
    assert "10 rounds of 1 local epoch; seeds: 2" in result.text


def test_centralised_accuracies_far_from_the_papers_are_seen() -> None:
    (piece,) = [p for p in pieces() if p.model == "small" and p.method == "centralised"]
    part = finished(piece)
    for each in part["runs"].values():
        each["shared"] += 0.01
    (held,) = report(pieces(), {piece.name: part}, False, "cpu").checks.values()
    assert not held


def test_a_rival_that_is_nowhere_worse_is_named() -> None:
    found = {p.name: finished(p) for p in pieces() if p.model == "small" and not p.rates}
    for balance in (0, 50, 100):
        for seed, each in found[f"small-{balance}-ifca"]["runs"].items():
            each["mean"] = found[f"small-{balance}-selective"]["runs"][seed]["mean"] + 0.01
    text = report(pieces(), found, False, "cpu").text
    assert "ifca: better in 3, equal in 0, worse in 0 of 3; **it is nowhere worse" in text
    assert text.count("nowhere worse") == 1


def test_seeds_that_train_together_are_the_seeds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of one run share nothing; the numbers of each are those of its own models."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(900) % 10
    x = torch.nn.functional.one_hot(labels, 16).float().view(-1, 1, 4, 4)
    x += 0.5 * torch.rand(x.shape, generator=generator)
    some = Examples(x, labels)
    monkeypatch.setattr(three_ways, "images", lambda: (some, some))
    data = load(Data("mnist", 0, False, seeds=2, validation=100))
    assert not np.array_equal(data[0].train.y, data[1].train.y)
    given = {"0": (data[0], 0.3), "1": (data[1], 0.3)}
    model = network("mlp", 1, 16)
    both = play(model, given, Work(0.3, 8, batch=4), Selective(alone=5), "cpu", "fp32", tests=2)
    one = play(model, {"0": given["0"]}, Work(0.3, 8, batch=4), Selective(alone=5), "cpu", "fp32")
    assert both["runs"]["0"] == one["runs"]["0"]
    assert both["bytes"] == pytest.approx(one["bytes"])
    assert both["virtual_seconds"] == pytest.approx(one["virtual_seconds"], rel=1e-3)
    for runs in both["runs"].values():
        assert runs["recovered"]
        assert runs["groups"] == 3
        assert runs["shared"] < 0.5 < runs["worst"] <= runs["mean"]
    assert both["rounds"] == [4, 8]
    assert both["curves"]["1"][-1] == both["runs"]["1"]
    central = load(Data("mnist", 100, True, seeds=1, validation=100))
    (alone,) = play(model, {"0": (central[0], 0.3)}, Work(0.3, 8, batch=4), None, "cpu", "fp32")[
        "runs"
    ].values()
    assert alone["shared"] > 0.9


def test_the_complexity_page_says_what_a_size_costs_and_buys() -> None:
    every = grid()
    assert len({piece.name for piece in every}) == len(every) == 48
    found = {}
    for piece in every:
        if piece.family == "mlp" and piece.depth < 3:
            part = {**finished(Piece("small", 0, piece.method, Work(0.1, 15)))}
            more = 0.001 * piece.width * piece.depth
            for each in part["runs"].values():
                each["shared"] += 0.0001 * piece.width
            cost = {"bytes": 9 * 15 * 1e3 * piece.width, "virtual_seconds": 15 * more}
            found[piece.name] = {**part, **cost, "parameters": 100 * piece.width, "rounds": [15]}
    result = complexity_report(every, found, False, "cpu")
    assert [chart.name for chart in result.charts] == ["time", "size", "groups"]
    line = "| mlp | 2 | 100 | 10,000 | 100 | 0.20 | 83.10 % | 80.10 % | 90.30 % | 100 | 0.20 |"
    assert line in result.text
    wide = next(claim for claim in result.claims if "width 300 beats 10" in claim.words)
    assert wide.verdict == "holds"
    assert not any("cnn" in claim.words for claim in result.claims)


def test_networks_of_the_grid_have_the_sizes_they_are_called() -> None:
    def parameters(*key: Any) -> int:
        module = network(*key)(shape=(1, 28, 28), classes=10)
        assert module(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        return sum(p.numel() for p in module.parameters())

    assert parameters("mlp", 1, 30) == 23_860  # the paper's model 1
    assert parameters("mlp", 3, 10) == 7850 + 2 * 110 + 110
    assert parameters("cnn", 3, 4) == 40 + 2 * 148 + 4 * 9 * 10 + 10


@pytest.mark.slow
def test_the_short_version_runs(tmp_path: Path) -> None:
    result = run("selective", quick=True, say=lambda line: None)
    assert len(result.rows) == 2 * 6 * 4
    assert all(result.checks.values())
    assert write_page(result, tmp_path).name == "selective-quick.md"
    result = run("complexity", quick=True, say=lambda line: None)
    assert len(result.rows) == 4 * 4
    assert write_page(result, tmp_path).name == "complexity-quick.md"


@pytest.mark.parametrize("factor", [1.5, 5.0])
def test_a_nodes_loss_converges_to_c_times_its_optimum(factor: float) -> None:
    """The minima are found by hand here, from the nodes' targets."""
    for delta, expected in (
        (corrected(factor), factor),
        (printed(factor), 1 + (1 - 1 / NODES) * (factor - 1)),
    ):
        data = federation(delta)
        centres = data.train.y[::4, :10]
        best = centres.mean(dim=0)
        mine = 0.5 * float((best - centres[-1]).square().sum()) + LEAST
        assert mine / LEAST == pytest.approx(expected)
        path = played(delta, 60)
        assert path.ratio[-1] == pytest.approx(expected)
        assert path.gap[-1] == pytest.approx(0, abs=1e-9)
        assert path.gap[0] > 0.01
