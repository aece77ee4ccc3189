"""Multi-model FL's Table I: its cells, the data, every method, resuming, and the page."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import federation, linear
from scipy import stats
from torch import nn

import rota
from rota import data
from rota.data.federation import Federation, Partition
from rota.errors import BadInput
from rota.plan import Task, shares
from rota.sampling.mmfl import Assigning
from rota_lab.reproduce import Result, estimate, mmfl_claims, mmfl_page, run, write_page
from rota_lab.reproduce.chart import COLOURS
from rota_lab.reproduce.interval import FAILS, HOLDS
from rota_lab.reproduce.mmfl_cells import PAPER, TITLES, Cells, relative, three_digits
from rota_lab.reproduce.parts import Found, append, read

table1, faults = (
    importlib.import_module(f"rota_lab.reproduce.mmfl_{name}") for name in ("table1", "faults")
)
# the package has functions of these names


def blobs(partition: Partition, seed: int) -> Federation:
    sizes = np.random.default_rng(seed // 100).integers(3, 9, table1.CLIENTS).tolist()
    return federation(sizes, seed=seed)


def layer(shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    return linear(shape, classes)


KIND = table1.TaskSpec("blobs", blobs, "a layer", layer, lr=0.1, owners="blobs", epochs=2)
SMALL = {f"blobs-{s}": KIND for s in range(3)}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs for images, and few rounds."""
    monkeypatch.setattr(table1, "SETTINGS", {"3": SMALL})
    monkeypatch.setattr(faults, "TASKS", {"3": SMALL, "published": SMALL})
    monkeypatch.setattr(table1, "CLIENTS", 30)
    monkeypatch.setattr(table1, "ROUNDS", 5)
    monkeypatch.setattr(table1, "SEEDS", 2)


def test_the_cells() -> None:
    assert set(TITLES) == set(table1.METHODS)
    assert set(PAPER) == set(table1.SETTINGS)
    assert all(set(PAPER[setting]) <= set(TITLES) for setting in PAPER)
    assert len({part.cell for part in table1.parts()}) == 30
    assert len(table1.parts()) == 150


def test_the_estimate_has_a_line_for_a_setting_and_method_with_what_is_left(tmp_path: Path) -> None:
    lines = estimate("mmfl-table1", out=tmp_path)
    assert len(lines) == 30 + 2
    assert lines[0].split()[:3] == ["3-full", "5", "runs"]
    assert "150 runs of 150 rounds are not finished" in lines[-1]
    for name in [*(f"5-full-seed{seed}" for seed in range(5)), "5-mifa-seed2"]:
        append(tmp_path / "mmfl-table1.jsonl", {"part": name})
    lines = estimate("mmfl-table1", "5", tmp_path)
    left = {line.split()[0]: int(line.split()[1]) for line in lines[:-2]}
    assert left == {
        f"5-{method}": 4 if method == "mifa" else 5 for method in TITLES if method != "full"
    }
    took = {line.split()[0]: float(line.split()[3]) for line in lines[:-2]}
    assert took["5-gvr"] > 5 * took["5-random"], "in which all clients train"
    assert estimate("mmfl-table1", "5-full", tmp_path) == ["all runs are finished"]


def test_runs_in_which_all_train_take_longer() -> None:
    for name, method in table1.METHODS.items():
        sampler, _ = method((1,))
        longer = table1.seconds(table1.Piece("3", name, 0), method, "cpu") > 300
        all_train = ("every client trains", "every client trains every model")
        assert longer == (sampler.costs in all_train), name


def test_options_are_those_of_the_policies() -> None:
    methods = table1.about().methods
    assert list(methods) == list(TITLES)
    assert methods["fedfair"] == ("`fedfair`: alpha 3.0", "`unbiased`")
    assert methods["stale-vre"] == ("`mmfl-vre`: mix 0.1", "`stale-vre`: start 0.9")
    assert methods["fedstale"] == ("`mmfl-random`", "`fedstale`: beta 0.8")
    assert methods["kvib"][0] == "`mmfl-kvib`: theta by its rule, gamma by its rule, per_rate on"
    assert table1.options(rota.sampling.KVibPairs(theta=0.25), rota.sampling.SAMPLERS).startswith(
        "`mmfl-kvib`: theta 0.25,"
    )
    assert table1.about().single == ["round-robin", "round-robin-server", "fedfair"]
    assert not any(
        hasattr(table1.METHODS[method]((1,))[0], "processors") for method in table1.about().single
    )


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
    assert {part.name for part in table1.chosen(only, table1.parts())} == {
        f"{name}-seed{seed}" for name in names for seed in range(5)
    }


def test_only_a_seed() -> None:
    assert {part.name for part in table1.chosen("5-seed2", table1.parts())} == {
        f"5-{method}-seed2" for method in TITLES
    }
    assert [part.name for part in table1.chosen("3-gvr-seed1", table1.parts())] == ["3-gvr-seed1"]
    assert {part.seed for part in table1.chosen("seed3", table1.parts())} == {3}


def test_only_something_else() -> None:
    with pytest.raises(BadInput, match="--only names '3-gvl', which is no part: did you mean"):
        run("mmfl-table1", only="3-gvl")


def test_a_client_lacks_one_model_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table1, "CLIENTS", 400)
    whole = [KIND.task(400, name, s) for s, name in enumerate(SMALL)]
    tasks = table1.lacking(whole, 5)
    owns = shares(tasks) > 0
    missing = 3 - owns.sum(axis=0)
    assert set(missing.tolist()) == {0, 1}
    assert 0.05 < missing.mean() < 0.15
    assert (~owns).sum(axis=1).min() > 0, "every model is lacked by somebody"
    for task, before in zip(tasks, whole, strict=True):
        for client in np.flatnonzero(task.data.train.sizes)[:20].tolist():
            x, y = task.data.train.of(client)
            other_x, other_y = before.data.train.of(client)
            assert (x == other_x).all()
            assert (y == other_y).all()


def test_held_out_examples_are_the_first() -> None:
    whole: Federation = federation([4, 4])
    kept = table1.held_out(whole).test
    assert len(kept.y) == 42
    assert (kept.x == whole.test.x[18:]).all()


@pytest.mark.usefixtures("tiny")
def test_every_method_runs_and_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    result = run("mmfl-table1", out=tmp_path, say=said.append, device="cpu")
    names = {f"3-{method}-seed{seed}" for method in TITLES for seed in range(2)}
    path = tmp_path / "mmfl-table1.jsonl"
    kept = read(path)
    assert set(kept) == names
    for each in kept.values():
        assert 0.2 < each["accuracy"] <= 1
        assert each["accuracy"] == pytest.approx(np.mean(list(each["models"].values())))
        assert len(each["models"]) == 3
    assert result.claims, "claims are judged"
    assert "| Full participation | 1.000 |" in result.text
    again: list[str] = []
    assert run("mmfl-table1", out=tmp_path, say=again.append, device="cpu").rows == result.rows
    assert again == [], "nothing is run twice"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "3-kvib-seed1" not in line))
    assert run("mmfl-table1", out=tmp_path, say=again.append, device="cpu").rows == result.rows
    assert sum("3-kvib-seed1" in line for line in again) == 1
    page = write_page(result, tmp_path)
    assert "StaleVRE" in page.read_text()


@pytest.mark.usefixtures("tiny")
def test_costs_tell_the_methods_apart(tmp_path: Path) -> None:
    run("mmfl-table1", out=tmp_path, only="full,random,gvr,lvr,fedvarp,scaffold,kvib", device="cpu")
    kept = read(tmp_path / "mmfl-table1.jsonl")

    def cost(method: str, name: str) -> float:
        runs = [kept[f"3-{method}-seed{seed}"] for seed in range(2)]
        return float(np.mean([each[name] for each in runs]))

    assert cost("random", "bytes") < cost("gvr", "bytes") < cost("full", "bytes")
    assert (
        cost("random", "client_seconds")
        < cost("lvr", "client_seconds")
        < cost("gvr", "client_seconds")
    )
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
    (tmp_path / "mmfl-table1.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"line 1 of .*mmfl-table1\.jsonl is not a finished part"):
        run("mmfl-table1", out=tmp_path, device="cpu")


# --- the page, from made-up runs


def report(cells: Cells, quick: bool = False) -> Result:
    """The page of these runs, as if there were no others."""
    runs = []
    for name, each in cells.items():
        setting, _, method = name.partition("-")
        runs += [(setting, method, seed) for seed in each]
    return mmfl_page.report(cells, replace(table1.about(quick), runs=runs))


def found(**cells: list[float]) -> Cells:
    """Runs by method, from one accuracy per seed."""

    def run(value: float) -> Found:
        return {
            "accuracy": value,
            "models": {"a": value, "b": value},
            "curve": {"rounds": [1, 2], "accuracy": [value, value]},
            "bytes": 2**30,
            "client_seconds": 3600.0,
            "server_bytes": 2**20,
            "machine": "here",
            "precision": "fp32",
        }

    out: Cells = {}
    for method, values in cells.items():
        name = f"3-{method.replace('_', '-')}"
        out[name] = {seed: run(value) for seed, value in enumerate(values)}
    return out


def test_accuracy_is_relative_to_the_same_seed() -> None:
    some = found(full=[0.8, 0.5], random=[0.4, 0.4, 0.3])
    assert relative(some, "3", "random") == pytest.approx([0.5, 0.8])
    row = next(row for row in report(some).rows if "Random" in row["quantity"])
    assert (row["paper"], row["measured"], row["seeds"]) == (0.778, pytest.approx(0.65), 2)
    assert (row["low"], row["high"]) == pytest.approx((0.5, 0.8))
    between = stats.t.interval(0.95, 1, 0.65, stats.sem([0.5, 0.8]))
    assert "| Random | 0.778 | 0.650 ({:.3f} to {:.3f}) |".format(*between) in report(some).text


def verdicts(some: Cells) -> dict[str, str]:
    """The claims' words without their numbers, and their verdicts."""
    claims = mmfl_claims.claims(some, [name for name in ("3", "5") if f"{name}-full" in some])
    return {re.sub(": [-+0-9].*", "", each.words): each.verdict for each in claims}


@pytest.mark.parametrize(("gvr", "verdict"), [(0.7, HOLDS), (0.3, FAILS)])
def test_the_sources_order(gvr: float, verdict: str) -> None:
    some = found(full=[0.8] * 5, gvr=[gvr] * 5, random=[0.5] * 5)
    assert verdicts(some) == {
        "3 tasks: more than half of the 3 pairs of methods are in the source's order": HOLDS,
        "Full participation is above MMFL-GVR": HOLDS,
        "Full participation is above Random": HOLDS,
        "MMFL-GVR is above Random": verdict,
    }
    right, number, against = mmfl_claims.in_order(some, "3")
    assert (right, number, against) == ((3, 3, 0) if verdict == HOLDS else (2, 3, 1))
    clear = "none" if verdict == HOLDS else "1"
    assert f"seeds, {right} of 3 with 3 tasks ({clear} clearly against it)" in report(some).text


def test_a_pair_is_judged_over_the_runs_of_all_settings() -> None:
    """SCAFFOLD is above Random with 3 tasks of the source, and below it with 5."""
    three = found(full=[1.0] * 3, scaffold=[0.8, 0.81, 0.82], random=[0.7] * 3)
    five = found(full=[1.0] * 3, scaffold=[0.6] * 3, random=[0.7, 0.71, 0.72])
    some = three | {name.replace("3-", "5-"): runs for name, runs in five.items()}
    assert verdicts(some)["SCAFFOLD is above Random (with 5 tasks: below it)"] == HOLDS
    claims = mmfl_claims.claims(some, ["3", "5"])
    (words,) = [each.words for each in claims if each.words.startswith("SCAFFOLD is")]
    assert "+11.00 points (95 %" in words
    assert "6 runs)" in words


def test_methods_are_compared_by_the_seeds_that_both_have() -> None:
    some = found(full=[1.0, 1.0], gvr=[0.8], random=[0.85, 0.5, 0.1])
    assert not any("MMFL-GVR is" in claim for claim in verdicts(some)), "one run says nothing"
    text = report(some).text
    assert "| MMFL-GVR | Random | 0.115 | -0.050 | **no** | 1 |" in text
    between = stats.t.interval(0.95, 1, 0.675, stats.sem([0.85, 0.5]))
    assert "| Random | 0.778 | 0.675 ({:.3f} to {:.3f}) |".format(*between) in text
    assert "| Random | 67.5% |" in text, "of the seeds that full participation has"
    assert "| MMFL-GVR | 0.893 | 0.800, 1 seed |" in text


def test_all_pairs_are_those_of_the_sources_table() -> None:
    for setting, paper in PAPER.items():
        pairs = mmfl_claims.pairs(setting)
        assert len(pairs) == 28
        assert all(paper[better] > paper[worse] for better, worse in pairs)
    assert set(mmfl_claims.MEASURED) == set(PAPER["3"])


def test_costs_are_low_or_high_as_a_factor() -> None:
    low, high = mmfl_claims.LOW, mmfl_claims.HIGH
    assert [mmfl_claims.word(value, 1, 100) for value in (1, 9.9, 10.1, 100)] == [low] * 2 + [
        high
    ] * 2
    some = found(**{method.replace("-", "_"): [0.5] for method in PAPER["3"]})
    for method, theirs in mmfl_claims.MEASURED.items():
        for name, each in zip(mmfl_claims.COSTS.values(), theirs, strict=True):
            some[f"3-{method}"][0][name] = 100 if each == high else 1
    made = verdicts(some)
    for cost in mmfl_claims.COSTS:
        claim = f"3 tasks: {cost} is Low and High for the methods that the source names"
        assert made[claim] == HOLDS
    some["3-scaffold"][0]["server_bytes"] = 90
    claim = "3 tasks: memory is Low and High for the methods that the source names"
    assert verdicts(some)[claim] == FAILS
    text = report(some).text
    assert "| SCAFFOLD | Low / Low | Low / Low | Low / **High** |" in text
    assert "a factor of 100 in communication, 100 in computation, 100 in memory." in text


def test_updates_that_could_not_be_used_are_on_the_page() -> None:
    some = found(full=[0.8, 0.8], fedvarp=[0.4, 0.7])
    assert "could not be used" not in report(some).text
    some["3-fedvarp"][0]["failures"] = {"a": 61}
    assert "- FedVARP, seed 0: 61 of a, which were not finite\n" in report(some).text


def test_missing_runs_are_named_at_the_top() -> None:
    some = found(full=[0.8, 0.8], gvr_star=[0.75], random=[0.5, 0.5])
    runs = [("3", method, seed) for method in ("full", "gvr-star", "random") for seed in range(2)]
    result = mmfl_page.report(some, replace(table1.about(), runs=runs))
    words = (
        "**1 of 6 runs are missing**: MMFL-GVR* with 3 tasks, seed 1. These rows have fewer seeds."
    )
    assert words in result.text[: result.text.index("## ")]
    assert result.checks["all runs are finished (5 of 6)"] is False
    assert "missing" not in report(some).text
    assert "**145 of 150 runs are missing**.\n" in mmfl_page.report(some, table1.about()).text, (
        "not 30 names"
    )


def test_the_page_lists_methods_by_accuracy() -> None:
    text = report(found(full=[0.8], random=[0.4], gvr=[0.6])).text
    assert (
        text.index("| Full participation |") < text.index("| MMFL-GVR |") < text.index("| Random |")
    )
    assert "| 1.00 GiB | 1.00 h | 1.00 MiB |" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2250.3, "2,250"),
        (1154.8, "1,150"),
        (64.91, "64.9"),
        (0.3581, "0.358"),
        (0.00784, "0.00784"),
        (9.996, "10.0"),
        (1, "1.00"),
        (0, "0"),
    ],
)
def test_three_digits(value: float, words: str) -> None:
    assert three_digits(value) == words


def test_short_times_are_minutes() -> None:
    some = found(full=[0.8], random=[0.4])
    some["3-random"][0]["client_seconds"] = 48.0
    assert "| 1.00 GiB | 0.800 min | 1.00 MiB |" in report(some).text


def test_every_models_accuracy_is_on_the_page() -> None:
    some = found(full=[0.8, 0.8], random=[0.4, 0.4])
    for seed, (a, b) in enumerate([(0.3, 0.5), (0.5, 0.3)]):
        some["3-random"][seed]["models"] = {"a": a, "b": b + 0.02}
    text = report(some).text
    assert "| method | mean | a | b |" in text
    assert "| Random | 40.0% | **40.0%** | 42.0% |" in text


def test_what_kvib_costs() -> None:
    some = found(
        full=[1.0] * 3,
        kvib=[0.7, 0.71, 0.7],
        lvr=[0.9, 0.91, 0.9],
        stale_vre=[0.7, 0.7, 0.72],
        random=[0.5, 0.51, 0.52],
    )
    for each in some["3-kvib"].values():
        each["bytes"] = 2**28
    text = report(some).text
    order = "above Random, below MMFL-LVR, not distinguishable from StaleVRE with 3 tasks"
    assert f"In accuracy it is {order} (by the 95 % intervals)." in text
    assert "that is up to 0.58 with 3 tasks." in text
    assert "| 3 | MMFL-LVR | -0.200 (95 %: -0.200 to -0.200) | 0.250 | 1.00 | 1.00 |" in text
    assert "## MMFL-KVib" not in report(found(full=[1.0], lvr=[0.9])).text
    pairs, rounds = 3 * table1.CLIENTS, table1.ROUNDS
    state = rota.sampling.KVibPairs(table1.BUDGET).init(
        np.full((3, table1.CLIENTS), 1 / pairs), rounds
    )
    assert float(state["theta"][0]) == pytest.approx(0.58, abs=0.005)


def test_the_chart_shows_those_that_draw_by_what_they_know() -> None:
    everything = found(**{method.replace("-", "_"): [0.5] for method in TITLES})
    chart = report(everything).charts[0]
    knowing = set()
    for name, method in table1.METHODS.items():
        sampler, _ = method((1,))
        if isinstance(sampler, Assigning):
            knowing.add(TITLES[name])
    assert {line.name for line in chart.lines} == knowing | {"Full participation", "Random"}
    assert "StaleVRE" in knowing
    assert len({(line.colour % len(COLOURS), line.dashed) for line in chart.lines}) == len(
        chart.lines
    ), "told apart"


def test_the_short_version_says_its_own_numbers_and_no_verdicts() -> None:
    some = found(full=[0.8], random=[0.4], gvr_star=[0.6], kvib=[0.5])
    result = report(some, quick=True)
    assert "short version" in result.text
    assert "over 24 clients, by 12 draws per round, for 6 rounds" in result.text
    assert "means over the last 3 rounds" in result.text
    assert "the last 7% of the test examples" in result.text
    assert result.checks == {}
    assert not result.claims
    assert all(row["paper"] is None for row in result.rows)
    for word in ("120", "150 rounds", "EMNIST", "0.778", "0.960", "| source |", "claims", "reason"):
        assert word not in result.text, word
    for word in (
        "over 120 clients, by 12 draws per round, for 150 rounds",
        "EMNIST",
        "| MMFL-GVR* | 0.960 |",
        "last 21 rounds",
    ):
        assert word in report(some).text, word


def test_the_page_says_what_was_trained() -> None:
    (fashion,) = table1.about().tasks["3"]
    assert fashion[:2] == ["fashion-1, fashion-2, fashion-3", "Fashion-MNIST"]
    assert fashion[2].startswith("10% of the clients have 90 to 150 examples, the others 9 to 15")
    assert fashion[3:6] == ["CNN (`mmfl_cnn`)", "1,630,090", "0.01"]
    _, cifar, writers, roles = table1.about().tasks["5"]
    assert "the others 12 to 15" in cifar[2]
    assert (writers[2], roles[2]) == (
        "the data's own: the first 120 writers",
        "the data's own: the first 120 roles",
    )
    assert [row[-1] for row in (cifar, writers, roles)] == [
        *["the last 70% of the test examples"] * 2,
        "all test examples",
    ]
    assert "| shakespeare | Shakespeare by role |" not in report(found(full=[0.8])).text, (
        "of the settings that were run"
    )


def is_described(setting: str, tasks: list[Task]) -> None:
    """The tasks are what the page's table says."""
    assert [task.name for task in tasks] == list(table1.SETTINGS[setting])
    rows = {name: row for row in table1.about().tasks[setting] for name in row[0].split(", ")}
    for task in tasks:
        kind = table1.SETTINGS[setting][task.name]
        assert (task.model, task.lr, task.batch, task.epochs) == (
            kind.model,
            kind.lr,
            kind.batch,
            kind.epochs,
        )
        assert (task.optimizer, task.momentum, task.weight_decay, task.lr_decay, task.steps) == (
            "sgd",
            0,
            0,
            1,
            None,
        )
        assert (
            rows[task.name][4] == f"{sum(weight.numel() for weight in task.build().parameters()):,}"
        )
        sizes = task.data.train.sizes
        assert task.data.clients == table1.CLIENTS
        assert kind.batch is None or sizes.max() <= kind.batch
        if kind.sizes:
            (low, some), (many, most) = kind.sizes
            assert ((sizes[:108] >= low) & (sizes[:108] <= some)).all()
            assert ((sizes[108:] >= many) & (sizes[108:] <= most)).all()
            assert (task.data.train.label_counts(10) > 0).sum(axis=1).max() <= 3


def stand_in(partition: Partition, seed: int) -> Federation:
    """Fashion-MNIST's labels with images of CIFAR-10's shape."""
    whole = data.fashion_mnist(partition, seed=seed)
    blank = torch.zeros(1)
    train = replace(whole.train, x=blank.expand(len(whole.train.y), 3, 32, 32))
    test = replace(whole.test, x=blank.expand(len(whole.test.y), 3, 32, 32))
    return replace(whole, train=train, test=test)


@pytest.mark.data
@pytest.mark.skipif(
    not all(map(data.at_hand, ("fashion-mnist", "mnist-writers", "shakespeare"))),
    reason="the files are not on this machine",
)
def test_the_page_describes_the_five_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not data.at_hand("cifar10"):
        monkeypatch.setitem(table1.SETTINGS["5"], "cifar10", replace(table1.CIFAR, source=stand_in))
    tasks = []
    for seed, (name, spec) in enumerate(table1.SETTINGS["5"].items()):
        tasks.append(spec.task(table1.CLIENTS, name, seed))
    is_described("5", tasks)
    assert [len(task.data.test.y) for task in tasks][:4] == [7000] * 4
    assert len(tasks[4].data.test.y) == len(
        data.shakespeare(table1.ROLES.partition(table1.CLIENTS)).test.y
    ), "not cut"


@pytest.mark.data
@pytest.mark.skipif(
    not rota.data.at_hand("fashion-mnist"),
    reason="the files of fashion-mnist are not on this machine",
)
def test_the_fashion_tasks_are_s0s() -> None:
    tasks = [table1.FASHION.task(120, name, 100 + s) for s, name in enumerate(table1.SETTINGS["3"])]
    sizes = np.stack([task.data.train.sizes for task in tasks])
    assert ((sizes[:, :108] >= 9) & (sizes[:, :108] <= 15)).all()
    assert ((sizes[:, 108:] >= 90) & (sizes[:, 108:] <= 150)).all()
    assert 0.48 < sizes[:, 108:].sum() / sizes.sum() < 0.57
    assert all((task.data.train.label_counts(10) > 0).sum(axis=1).max() <= 3 for task in tasks)
    assert len({tuple(task.data.train.label_counts(10)[0]) for task in tasks}) > 1
    assert all(len(task.data.test.y) == 7000 for task in tasks)
    is_described("3", tasks)
