"""The reproduction `personal`: PFLlib's way of dealing labels, and its page."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from rota.errors import BadInput
from rota_lab.reproduce import write_page
from rota_lab.reproduce.personal_page import PFLLIB, report

personal = importlib.import_module("rota_lab.reproduce.personal")
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 700))


def test_two_labels_each_and_four_clients_share_them() -> None:
    owners = personal.deal(LABELS, "pathological", np.random.default_rng(1))
    held = [set(LABELS[owners == client]) for client in range(20)]
    assert held == [{2 * (c // 4), 2 * (c // 4) + 1} for c in range(20)]
    assert np.bincount(owners).sum() == len(LABELS)
    for label in range(10):
        parts = np.bincount(owners[label == LABELS], minlength=20)
        first = label // 2 * 4
        assert (parts[first : first + 3] >= 700 / 4 / 10 - 1).all()
        assert (parts[first : first + 3] < 700 / 4).all()
        assert parts[first + 3] >= 700 / 4


def test_dirichlets_parts_leave_full_clients_out() -> None:
    owners = personal.deal(LABELS, "dirichlet", np.random.default_rng(1))
    sizes = np.bincount(owners, minlength=20)
    assert sizes.min() >= personal.LEAST
    table = np.array([np.bincount(LABELS[owners == c], minlength=10) for c in range(20)])
    full = np.cumsum(table, axis=1)[:, :-1] >= len(LABELS) / 20
    assert table[:, 1:][full].max() <= 1, "a client with its part gets no more but by rounding"


def test_the_page_stands_beside_pfllibs_board() -> None:
    def part(accuracy: float) -> dict[str, object]:
        runs = {
            str(seed): {"accuracy": accuracy + seed / 1000, "worst": 0.5, "p10": 0.6, "spread": 0.1}
            for seed in range(3)
        }
        curves = {seed: [run, run] for seed, run in runs.items()}
        about = {"machine": "here", "precision": "fp32", "bytes": 2.0, "client_seconds": 3.0}
        return {"runs": runs, "curves": curves, "rounds": [1, 2], **about}

    found = {
        "whole-pathological-fedavg": part(0.80),
        "whole-pathological-ditto": part(0.90),
        "small-dirichlet-fedavg": part(0.5),
    }
    result = report(personal.pieces(), personal.SETTINGS, found, False, "cpu")
    assert list(result.checks.values()) == [True, False]
    paper = {row["quantity"]: row["paper"] for row in result.rows}
    assert paper["PFLlib's, two labels each, ditto: test images"] == PFLLIB["pathological"]["ditto"]
    small = "Small, Dirichlet 0.1, fedavg: test images"
    assert paper[small] is None
    assert [claim.verdict for claim in result.claims] == ["holds"]
    assert "3 of 60 runs are finished" in result.text


def test_the_short_version_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    try:
        personal.images()
    except BadInput as missing:
        pytest.skip(str(missing))
    few = [personal.Piece("tiny", "dirichlet", method) for method in ("fedavg", "fedrep")]
    monkeypatch.setattr(personal, "quick_pieces", lambda: few)
    result = personal.personal(quick=True, say=lambda line: None, device="cpu")
    assert len(result.rows) == 6
    page = write_page(result, tmp_path).read_text()
    assert "fedrep beats fedavg" in page
