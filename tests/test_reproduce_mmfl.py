"""Multi-model FL's Table I as a reproduction: its cells, the data, every method, resuming, and what the page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import federation, linear
from scipy import stats

import rota
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.plan import Task, shares
from rota.reproduce import estimate, mmfl_page, run, write_page
from rota.reproduce.mmfl_page import PAPER, TITLES, Cells, relative, report

table1 = importlib.import_module("rota.reproduce.mmfl_table1")  # the package has a function of that name


def small(clients: int, seed: int) -> list[Task]:
    sizes = np.random.default_rng(seed).integers(3, 9, clients).tolist()
    return [Task(linear, federation(sizes, seed=10 * seed + s), lr=0.1, batch=None, epochs=2, name=f"blobs-{s}") for s in range(3)]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs for images, and few rounds."""
    monkeypatch.setattr(table1, "SETTINGS", {"3": small})
    monkeypatch.setattr(table1, "CLIENTS", 30)
    monkeypatch.setattr(table1, "ROUNDS", 5)
    monkeypatch.setattr(table1, "SEEDS", 2)


def test_the_cells() -> None:
    assert set(TITLES) == set(table1.METHODS)
    assert set(PAPER) == set(table1.SETTINGS)
    assert all(set(PAPER[setting]) <= set(TITLES) for setting in PAPER)
    assert len({part.cell for part in table1.parts()}) == 30
    assert sum("-seed" in line for line in estimate("mmfl-table1")) == len(table1.parts()) == 150


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("3-gvr", {"3-gvr"}),
        ("5", {f"5-{method}" for method in TITLES}),
        ("kvib", {"3-kvib", "5-kvib"}),
        ("lvr, 3-mifa", {"3-lvr", "5-lvr", "3-mifa"}),
        ("3-gvr, 5-lvr", {"3-gvr", "5-lvr"}),
    ],
)
def test_only(only: str, names: set[str]) -> None:
    assert {part.name for part in table1.chosen(only, table1.parts())} == {f"{name}-seed{seed}" for name in names for seed in range(5)}


def test_only_a_seed() -> None:
    assert {part.name for part in table1.chosen("5-seed2", table1.parts())} == {f"5-{method}-seed2" for method in TITLES}
    assert [part.name for part in table1.chosen("3-gvr-seed1", table1.parts())] == ["3-gvr-seed1"]
    assert {part.seed for part in table1.chosen("seed3", table1.parts())} == {3}


def test_only_something_else() -> None:
    with pytest.raises(BadInput, match="--only names '3-gvl', which is no part: did you mean"):
        run("mmfl-table1", only="3-gvl")


def test_a_client_lacks_one_model_at_most() -> None:
    tasks = table1.lacking(small(400, 0), 5)
    owns = shares(tasks) > 0
    missing = 3 - owns.sum(axis=0)
    assert set(missing.tolist()) == {0, 1}
    assert 0.05 < missing.mean() < 0.15
    assert (~owns).sum(axis=1).min() > 0, "every model is lacked by somebody"
    whole = small(400, 0)
    for task, before in zip(tasks, whole, strict=True):
        for client in np.flatnonzero(task.data.train.sizes)[:20].tolist():
            assert all((a == b).all() for a, b in zip(task.data.train.of(client), before.data.train.of(client), strict=True))


def test_held_out_examples_are_the_first() -> None:
    data: Federation = federation([4, 4])
    kept = table1.held_out(data).test
    assert len(kept.y) == 42
    assert (kept.x == data.test.x[18:]).all()


@pytest.mark.usefixtures("tiny")
def test_every_method_runs_and_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    result = run("mmfl-table1", out=tmp_path, say=said.append, device="cpu")
    names = {f"3-{method}-seed{seed}" for method in TITLES for seed in range(2)}
    assert {path.stem for path in (tmp_path / "mmfl-table1").iterdir()} == names
    for name in names:
        each = json.loads((tmp_path / "mmfl-table1" / f"{name}.json").read_text())
        assert 0.2 < each["accuracy"] <= 1
        assert each["accuracy"] == pytest.approx(np.mean(list(each["models"].values())))
        assert len(each["models"]) == 3
    assert result.checks, "claims are checked"
    assert "| Full participation | 1.000 |" in result.text
    again: list[str] = []
    assert run("mmfl-table1", out=tmp_path, say=again.append, device="cpu").rows == result.rows
    assert again == [], "nothing is run twice"
    (tmp_path / "mmfl-table1" / "3-kvib-seed1.json").unlink()
    assert run("mmfl-table1", out=tmp_path, say=again.append, device="cpu").rows == result.rows
    assert sum("3-kvib-seed1" in line for line in again) == 1
    page = write_page(result, tmp_path)
    assert "StaleVRE" in page.read_text()


@pytest.mark.usefixtures("tiny")
def test_costs_tell_the_methods_apart(tmp_path: Path) -> None:
    run("mmfl-table1", out=tmp_path, only="full,random,gvr,lvr,fedvarp,scaffold,kvib", device="cpu")

    def cost(method: str, name: str) -> float:
        runs = [json.loads((tmp_path / "mmfl-table1" / f"3-{method}-seed{seed}.json").read_text()) for seed in range(2)]
        return float(np.mean([each[name] for each in runs]))

    assert cost("random", "bytes") < cost("gvr", "bytes") < cost("full", "bytes")
    assert cost("random", "client_seconds") < cost("lvr", "client_seconds") < cost("gvr", "client_seconds")
    assert cost("fedvarp", "server_bytes") > 10 * cost("random", "server_bytes")
    assert cost("scaffold", "bytes") == pytest.approx(2 * cost("random", "bytes"))
    assert cost("kvib", "server_bytes") < cost("fedvarp", "server_bytes")


@pytest.mark.usefixtures("tiny")
def test_no_time_gives_what_is_there(tmp_path: Path) -> None:
    result = run("mmfl-table1", out=tmp_path, minutes=0, device="cpu")
    assert result.rows == []
    assert not result.ok
    assert any("0 of 30" in claim for claim in result.checks)


@pytest.mark.usefixtures("tiny")
def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mmfl-table1").mkdir()
    (tmp_path / "mmfl-table1" / "3-gvr-seed0.json").write_text("{")
    with pytest.raises(BadInput, match=r"3-gvr-seed0\.json is not a part's file .* remove it"):
        run("mmfl-table1", out=tmp_path, device="cpu")


# --- the page, from made-up runs


def found(**cells: list[float]) -> Cells:
    return {
        f"3-{method.replace('_', '-')}": {
            seed: {
                "accuracy": value,
                "models": {"a": value, "b": value},
                "curve": {"rounds": [1, 2], "accuracy": [value, value]},
                "bytes": 2**30,
                "client_seconds": 3600.0,
                "server_bytes": 2**20,
                "machine": "here",
                "precision": "fp32",
            }
            for seed, value in enumerate(values)
        }
        for method, values in cells.items()
    }


def test_accuracy_is_relative_to_the_same_seed() -> None:
    some = found(full=[0.8, 0.5], random=[0.4, 0.4, 0.3])
    assert relative(some, "3", "random") == pytest.approx([0.5, 0.8])
    row = next(row for row in report(some, 30, False).rows if "Random" in row["quantity"])
    assert (row["paper"], row["measured"], row["seeds"]) == (0.778, pytest.approx(0.65), 2)
    assert (row["low"], row["high"]) == pytest.approx((0.5, 0.8))
    low, high = stats.t.interval(0.95, 1, 0.65, stats.sem([0.5, 0.8]))
    assert f"| Random | 0.778 | 0.650 ({low:.3f}" in report(some, 30, False).text
    assert f" to {high:.3f}" in report(some, 30, False).text


@pytest.mark.parametrize(("gvr", "lvr", "held"), [(0.7, 0.6, True), (0.45, 0.6, False), (0.7, 0.45, False), (0.76, 0.6, False)])
def test_the_sources_order(gvr: float, lvr: float, held: bool) -> None:
    some = found(full=[0.8], gvr_star=[0.75], stale_vr=[0.75], gvr=[gvr], lvr=[lvr], random=[0.5])
    assert all(mmfl_page._order(some, "3").values()) is held
    assert len(mmfl_page._order(some, "3")) == 8


def test_methods_are_compared_by_the_seeds_that_both_have() -> None:
    some = found(full=[1.0, 1.0], gvr=[0.8], random=[0.85, 0.5, 0.1])
    assert mmfl_page._order(some, "3") == {"3 tasks: MMFL-GVR, 0.800, is above Random, 0.850": False}
    assert "| Random | 0.778 | 0.675 (" in report(some, 30, False).text
    assert "| 67.5% | 67.5% |" in report(some, 30, False).text, "of the seeds that full participation has"


def test_the_page_lists_methods_by_accuracy() -> None:
    text = report(found(full=[0.8], random=[0.4], gvr=[0.6]), 15, False).text
    assert text.index("| Full participation |") < text.index("| MMFL-GVR |") < text.index("| Random |")
    assert "| 1 GiB | 1 h | 1 MiB |" in text


def test_pairs_in_another_order_than_the_sources() -> None:
    some = found(full=[0.8, 0.8], gvr=[0.7, 0.7], lvr=[0.6, 0.601], random=[0.5, 0.6], fedvarp=[0.55, 0.56])
    text = report(some, 10, False).text
    assert "- source: MMFL-LVR above MMFL-GVR, 0.912 against 0.893; here below it by 9.95 (9.31 to 10.6) points\n" in text
    assert "- source: Random above FedVARP, 0.778 against 0.712; here below it by 0.5 (" in text
    assert text.count("which may be chance") == 1
    assert text.count("- source:") == 2
    assert "another order" not in report(found(full=[0.8, 0.8], lvr=[0.7, 0.7], gvr=[0.6, 0.6]), 10, False).text


@pytest.mark.data
@pytest.mark.skipif(not rota.data.at_hand("fashion-mnist"), reason="the files of fashion-mnist are not on this machine")
def test_the_fashion_tasks_are_s0s() -> None:
    tasks = table1.three(120, 1)
    sizes = np.stack([task.data.train.sizes for task in tasks])
    assert ((sizes[:, :108] >= 9) & (sizes[:, :108] <= 15)).all()
    assert ((sizes[:, 108:] >= 90) & (sizes[:, 108:] <= 150)).all()
    assert 0.48 < sizes[:, 108:].sum() / sizes.sum() < 0.57
    assert all((task.data.train.label_counts(10) > 0).sum(axis=1).max() <= 3 for task in tasks)
    assert len({tuple(task.data.train.label_counts(10)[0]) for task in tasks}) > 1
    assert all(len(task.data.test.y) == 7000 for task in tasks)
