"""The faults of MMFL's published code: each fault, what is run, and what the page says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_reproduce_mmfl import faults, found, table1, tiny  # noqa: F401

from rota.arrays import Array
from rota.plan import Plan, Seen
from rota.sampling import Gvr, Lvr, Random
from rota.weights import Weights
from rota_lab.reproduce import estimate, mmfl_faults_page, run
from rota_lab.reproduce.mmfl_cells import PAPER
from rota_lab.reproduce.parts import append, read

SHARES = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.0, 0.3, 0.6]])
PROCESSORS = (1, 1, 2, 2)


def mean_weights(sampler: Random, draws: int) -> Array:
    """Every pair's weight, on average over draws."""
    state, total = sampler.init(SHARES, 10), np.zeros(SHARES.shape)
    for seed in range(draws):
        plan = sampler.draw(state, SHARES, np.random.default_rng(seed))
        total[plan.model, plan.client] += plan.weight
    return total / draws


def test_uncounted_weights_are_too_large_by_processors_and_missing_models() -> None:
    """In expectation B_i (S / |S_i|) d_i in the place of d_i."""
    factor = np.array(PROCESSORS) * 2 / np.array([2, 1, 2, 2])
    np.testing.assert_allclose(
        mean_weights(faults.Uncounted(3, PROCESSORS), 20_000), SHARES * factor, rtol=0.04
    )
    np.testing.assert_allclose(mean_weights(Random(3, PROCESSORS), 20_000), SHARES, rtol=0.04)


def test_misplaced_weights_have_the_shares_of_the_first_of_all_drawn() -> None:
    right, wrong = Gvr(3.5, PROCESSORS), faults.Misplaced(3.5, PROCESSORS)
    state, everybody = right.init(SHARES, 10), np.nonzero(SHARES)
    told = Seen.nothing(len(everybody[0]))
    told.norm[:] = np.linspace(1, 2, len(told.norm))
    pairs = Plan(everybody[1], everybody[0], np.ones(len(told.norm)), SHARES[everybody])
    state = right.hear(state, pairs, told)
    moved = 0
    for seed in range(50):
        a, b = (each.draw(state, SHARES, np.random.default_rng(seed)) for each in (right, wrong))
        np.testing.assert_array_equal((a.model, a.client), (b.model, b.client))
        drawn = sorted(a.client.tolist())
        for model in range(2):
            rows = np.flatnonzero(a.model == model)
            for k, row in enumerate(rows[np.argsort(a.client[rows])].tolist()):
                rate = SHARES[model, a.client[row]] / a.weight[row]
                assert b.weight[row] == pytest.approx(SHARES[model, drawn[k]] / rate)
                moved += drawn[k] != a.client[row]
    assert moved > 20


@pytest.mark.parametrize("drawn", [[0, 0, 1], [1, 1, 1], []])
def test_repeated_memories_count_once_for_every_drawn_client(drawn: list[int]) -> None:
    weights = [Weights(torch.zeros(3), torch.zeros(0)) for _ in range(2)]
    estimator = faults.Repeated()
    state = estimator.init(weights, SHARES)
    for s in range(2):
        state[f"memory.{s}"][:] = torch.arange(12.0).view(4, 3) + s
    state["norm"][:] = 1.0
    client = np.arange(len(drawn))
    sums = estimator.begin(
        state,
        weights,
        Plan(client, np.array(drawn, np.int64), np.ones(len(drawn)), np.ones(len(drawn))),
    ).sums
    for s in range(2):
        once = torch.from_numpy(SHARES[s]).float() @ state[f"memory.{s}"]
        torch.testing.assert_close(sums[s].update, drawn.count(s) * once)


def test_the_network_of_the_code_ends_in_probabilities() -> None:
    out = faults.published_cnn()(torch.randn(5, 1, 28, 28))
    torch.testing.assert_close(out.sum(dim=1), torch.ones(5))
    assert all(kind.model is faults.published_cnn for kind in faults.TASKS["published"].values())


def test_what_is_run() -> None:
    assert set(faults.TOGETHER) == set(PAPER["3"])
    assert set(mmfl_faults_page.WORDS) == set(faults.FAULTS)
    assert all(set(some) <= set(PAPER["3"]) for some in faults.FAULTS.values())
    sampler, estimator = faults.TOGETHER["fedvarp"]((1, 1))
    assert (type(sampler), type(estimator)) == (faults.Uncounted, faults.Repeated), (
        "it has two faults"
    )
    sampler, _ = faults.TOGETHER["lvr"]((1, 1))
    assert isinstance(sampler, Lvr)
    assert not sampler.by_share
    names = {part.name for part in faults.parts()}
    assert {f"3-{method}-seed{seed}" for method in PAPER["3"] for seed in range(5)} <= names & {
        part.name for part in table1.parts()
    }
    assert len(names) == 5 * (8 + 7 + 8)


def test_the_estimate_leaves_out_what_is_finished(tmp_path: Path) -> None:
    assert "115 runs" in estimate("mmfl-faults", out=tmp_path)[-1]
    append(tmp_path / "mmfl-table1.jsonl", {"part": "3-full-seed0"})
    append(tmp_path / "mmfl-faults.jsonl", {"part": "3-gvr-misplaced-seed0"})
    assert "113 runs" in estimate("mmfl-faults", out=tmp_path)[-1]
    lines = {
        line.split()[0]: float(line.split()[3])
        for line in estimate("mmfl-faults", "seed1", tmp_path)[:-2]
    }
    assert lines["3-gvr-misplaced"] == lines["3-gvr"] > lines["3-lvr-unshared"]


@pytest.mark.usefixtures("tiny")
def test_runs_are_shared_with_the_table(tmp_path: Path) -> None:
    run("mmfl-table1", out=tmp_path, only="full,fedvarp", device="cpu")
    said: list[str] = []
    result = run(
        "mmfl-faults",
        out=tmp_path,
        only="full,fedvarp,fedvarp-repeated",
        say=said.append,
        device="cpu",
    )
    assert not any(line.startswith(("3-full-", "3-fedvarp-seed")) for line in said), (
        "they are finished"
    )
    table, own = (read(tmp_path / f"mmfl-{name}.jsonl") for name in ("table1", "faults"))
    assert table.keys() == {
        f"3-{name}-seed{seed}" for name in ("full", "fedvarp") for seed in (0, 1)
    }
    assert not table.keys() & own.keys()
    names = {"3-fedvarp-repeated-seed1", "published-fedvarp-seed0", "published-full-seed1"}
    assert names <= own.keys()
    right, wrong = table["3-fedvarp-seed0"], own["3-fedvarp-repeated-seed0"]
    assert right["bytes"] == wrong["bytes"], "the same clients are drawn"
    assert right["curve"] != wrong["curve"]
    assert [row["quantity"].partition(":")[0] for row in result.rows] == [
        "FedVARP, repeated",
        "FedVARP, all faults",
    ]
    assert any("all runs are finished" in claim for claim in result.checks)


# --- the page, from made-up runs

FAULTS = {"uncounted": ["random", "fedvarp"], "repeated": ["fedvarp"]}


def text(**cells: list[float]) -> str:
    some = found(**cells)
    some |= {
        f"published{name.removeprefix('3')}": runs
        for name, runs in found(full=[0.4, 0.4], random=[0.5, 0.52]).items()
    }
    return mmfl_faults_page.report(some, FAULTS, sum(map(len, some.values())), quick=False).text


def test_the_page() -> None:
    page = text(
        full=[0.8, 0.8],
        random=[0.6, 0.6],
        fedvarp=[0.64, 0.64],
        random_uncounted=[0.68, 0.68],
        fedvarp_uncounted=[0.56, 0.56],
        fedvarp_repeated=[0.72, 0.64],
    )
    assert "| uncounted | Random | 0.750 | 0.850 | +0.100 (95 %: 0.100 to 0.100) |" in page
    assert "| repeated | FedVARP | 0.800 | 0.850 | +0.050 (95 %: " in page
    pair = next(line for line in page.splitlines() if line.startswith("| Random above FedVARP"))
    differences = "| -0.050 (95 %: -0.050 to -0.050) | **+0.150 (95 %: 0.150 to 0.150)** |"
    assert f"| +0.066 {differences} -0.100 (95 %: " in pair
    assert "the 1 pairs into the source's order: 1 by *uncounted*." in " ".join(page.split())
    assert "| Random | 0.778 | 0.750 | 1.275 |" in page
    assert "these methods are above full participation: Random." in page
    assert "accuracy of 40.0%, without it 80.0%" in " ".join(page.split())
    assert "Of 1 pairs, 1 are in the source's order without faults, 0 with all of them." in page
    assert "The runs were made on here, products in fp32." in page


def test_pairs_in_the_sources_order_are_left_out() -> None:
    page = text(full=[0.8, 0.8], random=[0.7, 0.7], fedvarp=[0.6, 0.6], random_uncounted=[0.5, 0.5])
    assert "another order" not in page.partition("## ")[2]
