"""The reproduction of Selective FedAvg: its runs, its data, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rota import rng
from rota.data import partition
from rota.data.federation import Examples
from rota_lab.reproduce import run, write_page
from rota_lab.reproduce.selective import SETTINGS, few, pieces
from rota_lab.reproduce.selective_page import report
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
    return {
        "mean": mean + 0.001 * seed + (0.002 * seed if method == "selective" else 0),
        "worst": 0.5,
        "shared": 0.33 if method == "selective" else 0.82 + 0.001 * seed,
        "groups": 1 if balance == 100 else 3,
        "recovered": balance == 0,
    }


def test_the_page_judges_what_is_finished() -> None:
    some = [p for p in pieces() if p.model == "small" and p.seed < 3]
    found = {p.name: numbers(p.method, p.balance, p.seed) for p in some}
    result = report(pieces(), found, False, "cpu", SETTINGS)
    verdicts = {
        claim.words.split(":")[0] + claim.words.split(":")[1]: claim for claim in result.claims
    }
    (first,) = [c for w, c in verdicts.items() if "0 % balanced Selective beats FedAvg" in w]
    assert first.verdict == "holds"
    assert "+10.20 points" in first.words
    (rival,) = [c for w, c in verdicts.items() if " 50 % balanced Selective beats ifca" in w]
    assert rival.verdict == "cannot tell"
    (central,) = [c for w, c in verdicts.items() if "centralised" in w]
    assert central.verdict == "fails"
    assert all(result.checks.values())
    assert "3 of 3 seeds" in next(iter(result.checks))
    plain = [row for row in result.rows if row["paper"] is not None]
    assert {row["paper"] for row in plain} == {0.3266, 0.9640}
    assert len(result.charts) == 2
    assert not any("Model 2" in row["quantity"] for row in result.rows), "it has not run"


def test_a_part_of_the_images_is_dealt_and_the_others_are_left_out() -> None:
    labels = torch.arange(3000) % 10
    examples = Examples(torch.zeros(3000, 1), labels)
    owner, clients = few(partition.three_way(0.0), 900)(examples, rng.generator(3))
    assert clients == 9
    assert 500 < (owner >= 0).sum() <= 900
    for third, pool in enumerate(((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))):
        mine = labels.numpy()[(owner >= 3 * third) & (owner < 3 * third + 3)]
        assert set(mine) <= set(pool)
    other, _ = few(partition.three_way(0.0), 900)(examples, rng.generator(4))
    assert not np.array_equal(owner, other)


@pytest.mark.slow
def test_the_short_version_runs(tmp_path: Path) -> None:
    result = run("selective", quick=True, say=lambda line: None)
    assert len(result.rows) == 2 * 6 * 3
    assert all(result.checks.values())
    assert write_page(result, tmp_path).name == "selective-quick.md"


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
