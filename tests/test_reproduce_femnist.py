"""K-Vib on digits by writer: the parts and their order, runs, resuming, and the page."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import federation, linear

import rota
from rota import data
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.sampling import SAMPLERS, Aocs, Ocs
from rota_lab.reproduce import estimate, run, write_page
from rota_lab.reproduce.chart import COLOURS
from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS
from rota_lab.reproduce.kvib_femnist_claims import (
    CLAIMED,
    TITLES,
    accuracy,
    against,
    gigabytes_to,
    last,
    overall,
    points,
    quickness,
    rounds_to,
    runs_of,
)
from rota_lab.reproduce.kvib_femnist_page import report
from rota_lab.reproduce.parts import Found, TimeUp, read

femnist = importlib.import_module(
    "rota_lab.reproduce.kvib_femnist"
)  # the package has a function of that name
Piece = femnist.Piece


# --- the parts


def test_the_parts() -> None:
    parts = femnist.parts()
    assert len({part.name for part in parts}) == len(parts)
    pairs = {(part.version, part.method) for part in parts}
    assert pairs == set(product((1, 2, 3), femnist.METHODS))
    seeds: dict[tuple[int, str], list[int]] = {pair: [] for pair in pairs}
    for part in parts:
        seeds[part.version, part.method] += part.seeds
    assert all(sorted(mine) == [0, 1, 2, 3, 4] for mine in seeds.values())
    assert set(TITLES) == set(femnist.METHODS)
    assert set(femnist.METHODS) - {"fedavg", "kvib-G", "osmd-independent"} <= set(SAMPLERS)
    assert len(estimate("kvib-femnist")) == 3 + len(parts)


def test_the_most_telling_parts_are_first() -> None:
    names = [part.name for part in femnist.parts()]
    assert names[:2] == ["v1-uniform-seed0", "v1-kvib-seed0"]
    compared = product((1, 2, 3), ("kvib", *CLAIMED))
    expected = {f"v{version}-{method}-seed0" for version, method in compared}
    assert set(names[:15]) == expected
    first = [part.name for part in femnist.parts() if part.seeds == (0,)]
    assert names[: len(first)] == first


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("v1-kvib", {"v1-kvib-seed0", "v1-kvib-seeds1-4"}),
        ("v2-mabs-seed0, v3-osmd", {"v2-mabs-seed0", "v3-osmd-seed0", "v3-osmd-seeds1-4"}),
        ("v3-seed0", {f"v3-{method}-seed0" for method in femnist.METHODS}),
        (
            "ocs",
            {f"v{version}-ocs-{seeds}" for version in (1, 2, 3) for seeds in ("seed0", "seeds1-4")},
        ),
    ],
)
def test_only(only: str, names: set[str]) -> None:
    assert {part.name for part in femnist.chosen(only, femnist.parts())} == names


def test_only_something_else() -> None:
    with pytest.raises(
        BadInput, match="--only names 'v1-kvip', which is no part: did you mean 'v1-kvib'"
    ):
        run("kvib-femnist", only="v1-kvip")


def test_the_estimate_grows_with_the_work() -> None:
    def cost(only: str) -> float:
        return float(
            sum(femnist.seconds(part, "cpu") for part in femnist.chosen(only, femnist.parts()))
        )

    assert (
        cost("v1-uniform-seed0")
        < cost("v3-uniform-seed0")
        < cost("v3-kvib-seed0")
        < cost("v3-ocs-seed0")
        < cost("v3-optimal-seed0")
    )
    assert cost("v1-kvib-seeds1-4") == pytest.approx(4 * cost("v1-kvib-seed0"))
    alone, together = femnist.chosen("v1-kvib-seed0, v1-kvib-seeds1-4", femnist.parts())
    assert femnist.seconds(together, "cuda") < 4 * femnist.seconds(alone, "cuda")


# --- the runs


SIZES = [2, 3] * 18 + [30, 41, 35, 52]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Federation:
    """40 clients, of whom four hold most of what is to be learnt, by a linear model."""
    made = federation(SIZES)
    monkeypatch.setattr(femnist, "federation", lambda *_: made)
    monkeypatch.setattr(femnist.models, "kvib_cnn", linear)
    return made


@pytest.mark.parametrize("method", femnist.METHODS)
def test_every_sampler_runs_for_several_seeds_at_once(method: str, small: Federation) -> None:
    track = femnist.Track(small, (1, 2), "cpu", "fp32")
    assert track.budget == 2
    runs = track.run(Piece(1, method, (1, 2), rounds=6, every=2))
    assert [each["seed"] for each in runs] == [1, 2]
    for each in runs:
        assert len(each["loss"]) == len(each["accuracy"]) == len(each["bytes"]) == 3
        assert 0 < each["bytes"][0] < each["bytes"][1] < each["bytes"][2]
        assert each["loss"][-1] < 2
        assert 0 < each["clients"] < 6
    assert runs[0]["loss"] != runs[1]["loss"]
    assert track.run(Piece(1, method, (1, 2), rounds=6, every=2)) == runs


@pytest.mark.parametrize("method", ["kvib", "optimal", "pow-d"])
def test_a_single_seed_is_a_run_of_rota(method: str, small: Federation) -> None:
    track = femnist.Track(small, (3,), "cpu", "fp32")
    (got,) = track.run(Piece(1, method, (3,), rounds=6, every=2))
    sampler, _ = femnist.METHODS[method](2)
    task = rota.Task(linear, small, lr=0.01, batch=20, epochs=3)
    other = rota.run([task], sampler, rounds=6, seed=3, evaluate=2, device="cpu").rounds
    assert got["loss"] == pytest.approx(other["loss"][1::2], rel=1e-4)
    assert got["accuracy"] == pytest.approx(other["accuracy"][1::2], rel=1e-4)
    traffic = np.add(other["bytes_up"], other["bytes_down"])
    assert got["bytes"] == traffic[1::2].tolist()


@pytest.mark.parametrize("seeds", [(0,), (1, 2)])
def test_a_run_that_diverges_is_a_result(
    seeds: tuple[int, ...], small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(femnist, "LR", 1e38)
    one = Piece(1, "fedavg", seeds, rounds=6, every=2)
    track = femnist.Track(small, seeds, "cpu", "fp32")
    runs = track.run(one)
    for each in runs:
        assert each["loss"] == [None] * 3
        assert len(each["accuracy"]) == len(each["bytes"]) == 3
    json.dumps(runs, allow_nan=False)
    how = {"machine": "here", "precision": "fp32", "seconds": 1.0}
    made = report({one.name: femnist.outcome(one, track, runs) | how}, [one.name], False)
    assert f"diverged in {len(seeds)} of {len(seeds)}" in made.text


def test_one_of_two_seeds_diverges(small: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    track = femnist.Track(small, (1, 2), "cpu", "fp32")
    whole = track.run(Piece(1, "uniform", (1, 2), rounds=6, every=2))
    train = track.engine.train

    def broken(job: Any) -> Any:
        for chunk in train(job):
            if chunk.model == 1 and job.now >= 3:
                chunk.update.fill_(np.nan)
            yield dataclasses.replace(chunk, measured=None)

    monkeypatch.setattr(track.engine, "train", broken)
    first, second = track.run(Piece(1, "uniform", (1, 2), rounds=6, every=2))
    assert all(first[name] == whole[0][name] for name in ("loss", "accuracy", "clients"))
    assert second["loss"] == [whole[1]["loss"][0], None, None]


def test_aocs_would_draw_the_same_clients_as_ocs() -> None:
    """Which is why it is not among the samplers."""
    shares = np.array([SIZES]) / sum(SIZES)
    state = {"norm": np.random.default_rng(0).lognormal(0, 1, shares.shape)}
    np.testing.assert_allclose(
        Aocs(2, 21).rates(state, shares), Ocs(2, 21).rates(state, shares), rtol=1e-9
    )


@pytest.mark.data
@pytest.mark.skipif(
    not data.at_hand("mnist-writers"), reason="the files of mnist-writers are not on this machine"
)
@pytest.mark.parametrize(
    ("version", "large", "share"), [(1, 54, 0.82), (2, 108, 0.90), (3, 270, 0.98)]
)
def test_the_writers_have_the_sources_unbalance(version: int, large: int, share: float) -> None:
    made = femnist.federation.__wrapped__(version)
    sizes = np.sort(made.train.sizes)[::-1]
    assert made.clients == femnist.WRITERS
    assert round(femnist.FRACTION * made.clients) == 27
    assert set(sizes[large:].tolist()) <= {2, 3}
    assert sizes[:large].min() > 3
    assert sizes[:large].sum() / sizes.sum() == pytest.approx(share, abs=0.015)
    assert len(made.test.y) == 10_000
    part = Piece(version, "optimal", (0,))
    assert femnist.images(part) == pytest.approx(3 * (sizes.sum() + 27 * femnist.IMAGES), rel=0.05)


# --- the page, from made-up parts


def part(
    method: str,
    accuracy: float,
    seeds: tuple[int, ...] = (0, 1, 2),
    version: int = 1,
    loss: float | None = 0.5,
) -> Found:
    """A curve that rises to `accuracy` in 20 tests, a bit higher per seed; 1 GB per test."""
    curve = [min(1.0, 2 * (k + 1) / 20) * accuracy for k in range(20)]
    runs = []
    for seed in seeds:
        accuracies = [value + 0.0001 * seed for value in curve]
        traffic = [(k + 1) * 10**9 for k in range(20)]
        run = {"seed": seed, "accuracy": accuracies, "loss": [loss] * 20, "bytes": traffic}
        runs.append(run | {"clients": 27.0})
    split = {"clients": 539, "images": 7172, "large": 54, "share": 0.828}
    made = Piece(version, method, seeds, 200, 10)
    how = {"machine": "here", "precision": "fp32", "seconds": 1.0, "budget": 27}
    return {
        "part": made.name,
        "version": version,
        "method": method,
        "rounds": 200,
        "every": 10,
        "split": split,
        "runs": runs,
        **how,
    }


def found(*some: Found) -> dict[str, Found]:
    return {each["part"]: each for each in some}


def claims(*some: Found) -> dict[str, str]:
    """The claims' words without their numbers, and their verdicts."""
    made = report(found(*some), [each["part"] for each in some], False)
    assert made.checks == {}
    drawn = [each for each in made.claims if " large clients " not in each.words]
    drawn = [each for each in drawn if "bytes" not in each.words]
    return {each.words.partition(": ")[0]: each.verdict for each in drawn}


@pytest.mark.parametrize(("share", "held"), [(0.828, HOLDS), (0.84, FAILS)])
@pytest.mark.parametrize(("traffic", "free"), [(1.0, HOLDS), (1.01, FAILS)])
def test_what_is_counted(share: float, held: str, traffic: float, free: str) -> None:
    mine, other = part("kvib", 0.9), part("uniform", 0.9)
    for one in mine["runs"]:
        one["bytes"] = [round(traffic * each) for each in one["bytes"]]
    for each in (mine, other):
        each["split"]["share"] = share
    made = report(found(mine, other), [], False).claims
    assert [each.verdict for each in made[-2:]] == [held, free]
    assert made[-2].words == f"v1: the few large clients hold 82% of the images: here {share:.1%}"
    assert made[-1].words.endswith(f"{traffic:.4f} times uniform's")


def test_rounds_and_bytes_to_a_target() -> None:
    (made,) = runs_of(found(part("kvib", 0.9, (0,))), 1, "kvib")
    assert rounds_to(made, 0.45) == pytest.approx(50)
    assert rounds_to(made, 0.18 * 1.5) == pytest.approx(30)
    assert gigabytes_to(made, 0.495) == pytest.approx(5.5)
    assert rounds_to(made, 0.91) is gigabytes_to(made, 0.91) is None
    made["accuracy"] = [0.5, 0.2, *made["accuracy"][2:]]  # the best so far counts
    assert rounds_to(made, 0.4) == pytest.approx(8)
    assert rounds_to(
        {**made, "accuracy": [0.5, 0.2, 0.7], "tests": [10, 20, 30]}, 0.6
    ) == pytest.approx(25)


def test_last_is_the_mean_of_the_last_tests() -> None:
    made: dict[str, Any] = {
        "accuracy": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        "loss": [1.0, 2.0, None, 2.0, 2.0, 2.0],
    }
    assert last(made, "accuracy") == pytest.approx(0.3)
    assert last(made, "loss") == math.inf


def test_seeds_of_several_parts_belong_together() -> None:
    some = found(
        part("kvib", 0.9, (1, 2)),
        part("kvib", 0.9, (0,)),
        part("vrb", 0.9),
        part("kvib", 0.8, version=2),
    )
    assert [each["seed"] for each in runs_of(some, 1, "kvib")] == [0, 1, 2]
    assert against(some, 1, "vrb", lambda run: last(run, "accuracy")) == pytest.approx([0.0] * 3)
    assert (
        len(
            against(
                found(part("kvib", 0.9, (0, 1)), part("vrb", 0.9, (1, 2))),
                1,
                "vrb",
                accuracy,
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "verdict"),
    [(0.99, 0.97, HOLDS), (0.97, 0.99, FAILS), (0.98, 0.98, CANNOT_TELL)],
)
def test_the_claims(mine: float, theirs: float, verdict: str) -> None:
    assert claims(part("kvib", mine), part("mabs", theirs)) == {
        "K-Vib's last accuracy is above that of Mabs (v1)": verdict,
        "Mabs takes more rounds to 90% than K-Vib (v1)": verdict,
        "Mabs takes more rounds to 95% than K-Vib (v1)": verdict,
    }


def test_versions_are_averaged_over_the_seeds_that_all_have() -> None:
    some = found(
        part("kvib", 0.99),
        part("mabs", 0.90),
        part("kvib", 0.97, (1, 2, 3), version=2),
        part("mabs", 0.96, (1, 2, 3), version=2),
    )
    gain, versions = overall(some, "mabs", points)
    assert (gain, versions) == (pytest.approx([5.0, 5.0]), [1, 2])
    ratios, versions = overall(some, "mabs", partial(quickness, target=0.95))
    assert versions == [2]  # in v1 Mabs does not reach it
    assert ratios == pytest.approx([math.log(97 / 96)] * 3, abs=1e-3)
    words = report(some, [*some], False).claims[0].words
    assert words.startswith("K-Vib's last accuracy is above that of Mabs (mean of v1, v2): +5.00 p")


def test_the_page_says_what_its_seeds_can_tell() -> None:
    some = found(part("kvib", 0.99), part("mabs", 0.97))
    text = report(some, [*some], False).text
    assert "Of 3 claims 3 hold, 0 fail, and 0 cannot be" in text
    assert "| Mabs | v1 | +2.00 (+2.00 to +2.00) | 0.00 | 3 |" in text
    assert "What so many seeds" not in report(found(part("kvib", 0.9)), [], False).text


def test_the_verdict() -> None:
    some = found(part("kvib", 0.9), part("uniform", 0.8), part("pow-d", 0.95), part("vrb", 0.9))
    words = "K-Vib is clearly above uniform; clearly below pow-d; not distinguishable from Vrb."
    assert words in report(some, list(some), False).text
    assert (
        "distinguishable"
        not in report(found(part("kvib", 0.9, (0,)), part("uniform", 0.8, (0,))), [], False).text
    )


def test_no_claim_of_what_cannot_be_compared() -> None:
    assert claims(part("kvib", 0.99, (0,)), part("mabs", 0.9, (0,))) == {}  # one seed says nothing
    assert claims(part("kvib", 0.99), part("proportional", 0.9)) == {}  # it does not claim it
    assert claims(part("kvib", 0.99), part("vrb", 0.9, version=2)) == {}
    made = claims(part("kvib", 0.99), part("vrb", 0.92))
    assert not any("95%" in claim for claim in made)  # which Vrb does not reach
    assert len(made) == 2


def test_the_page(tmp_path: Path) -> None:
    some = found(part("uniform", 0.92), part("kvib", 0.99), part("pow-d", 0.5, (0,), loss=None))
    everything = [*some, "v3-kvib-seed0"]
    result = report(some, everything, False)
    assert result.checks["all parts are finished (3 of 4)"] is False
    text = write_page(result, tmp_path).read_text()
    assert "54 of 539 clients hold 82.8% of 7,172 images here" in text
    assert "## Not run\n`v3-kvib-seed0`\n" in text
    assert text.count("\nNot run.\n") == 2  # v2 and v3
    lines = [line for line in text.splitlines() if line.startswith("| pow-d |")]
    (line,) = [line for line in lines if line.endswith("| 27.0 | 1 |")]
    never = "not reached | not reached | not reached | not reached"
    assert line == f"| pow-d | {never} | 50.00 | diverged in 1 of 1 | 27.0 | 1 |"
    (line,) = [line for line in text.splitlines() if line.startswith("| uniform | +7.00 (+7.00 to")]
    assert line.endswith("| – | 3 |")
    charts = ("accuracy", "loss", "others", "others-loss")
    assert {path.stem for path in tmp_path.glob("*.svg")} == {
        f"kvib-femnist-v1-{name}" for name in charts
    }


def test_lines_of_a_chart_look_different() -> None:
    some = found(*(part(method, 0.9) for method in femnist.METHODS))
    for chart in report(some, [*some], False).charts:
        assert len({(line.colour % len(COLOURS), line.dashed) for line in chart.lines}) == len(
            chart.lines
        )


def test_a_page_of_nothing(tmp_path: Path) -> None:
    everything = [each.name for each in femnist.parts()]
    result = report({}, everything, False)
    assert not result.ok
    assert "`v3-optimal-seeds1-4`" in write_page(result, tmp_path).read_text()


def test_some_runs_reach_the_target() -> None:
    text = report(found(part("kvib", 0.9, (0,)), part("kvib", 0.97, (1,))), [], False).text
    (line,) = [line for line in text.splitlines() if line.startswith("| K-Vib |")]
    assert line.count("1 of 2 runs") == 2  # the rounds and the gigabytes to 95 %
    assert line.endswith("| 27.0 | 2 |")


# --- the work


@pytest.fixture
def done(small: Federation, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that take no time, and a list of those that were done."""
    names: list[str] = []

    def quickly(self: Any, work: Any, *_: Any) -> list[dict[str, Any]]:
        names.append(work.name)
        return list(part(work.method, 0.9, work.seeds)["runs"])

    monkeypatch.setattr(femnist.Track, "run", quickly)
    return names


def test_finished_parts_are_kept_and_not_run_again(done: list[str], tmp_path: Path) -> None:
    run("kvib-femnist", out=tmp_path, only="v1-vrb-seed0", device="cpu")
    assert done == ["v1-vrb-seed0"]
    assert read(tmp_path / "kvib-femnist.jsonl")["v1-vrb-seed0"]["budget"] == 2
    result = run("kvib-femnist", out=tmp_path, only="v1-vrb,v2-kvib-seed0", device="cpu")
    assert done[1:] == ["v2-kvib-seed0", "v1-vrb-seeds1-4"]
    (row,) = [row for row in result.rows if row["quantity"] == "v1, Vrb: accuracy"]
    assert row["seeds"] == 5


def test_a_damaged_file_is_named(done: list[str], tmp_path: Path) -> None:
    (tmp_path / "kvib-femnist.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"line 1 of .*kvib-femnist.jsonl is not a finished part"):
        run("kvib-femnist", out=tmp_path)
    assert done == []


def test_no_time_is_no_work(tmp_path: Path) -> None:
    said: list[str] = []
    result = run("kvib-femnist", out=tmp_path, minutes=0, say=said.append)
    assert said == ["the time is up: finished parts are kept"]
    assert not result.ok
    assert not (tmp_path / "kvib-femnist.jsonl").exists()


def test_time_that_is_up_during_a_part(small: Federation) -> None:
    with pytest.raises(TimeUp):
        femnist.Track(small, (0,), "cpu", "fp32").run(Piece(1, "kvib", (0,)), deadline=0.0)


def test_quick(small: Federation, tmp_path: Path) -> None:
    """The whole way on few rounds: everything but the numbers."""
    result = run("kvib-femnist", quick=True, out=tmp_path, device="cpu")
    assert {row["seeds"] for row in result.rows} == {2}
    assert "a quick version" in write_page(result, tmp_path).read_text()
    assert not (tmp_path / "kvib-femnist.jsonl").exists()


def test_it_runs_where_only_torch_and_numpy_are(tmp_path: Path) -> None:
    """A part of made-up data, start to end, in a process of its own."""
    code = f"""
import sys
for name in ('typer', 'rich', 'pydantic', 'plotly', 'sklearn', 'scipy', 'safetensors', 'tomli_w'):
    sys.modules[name] = None
import importlib, numpy, rota_lab.reproduce.__main__ as main
from rota import data, models
femnist = importlib.import_module('rota_lab.reproduce.kvib_femnist')
pairs = [(numpy.ones((n, 4), 'float32'), numpy.arange(n) % 3) for n in {SIZES}]
made = data.from_clients(pairs, pairs[-1])
femnist.federation, femnist.models.kvib_cnn = lambda *_: made, models.logistic
words = '--device cpu --only v1-uniform-seed0 --minutes 5 --out'.split()
sys.argv = ['reproduce', 'kvib-femnist', *words, {str(tmp_path)!r}]
femnist.parts = lambda quick=False: [femnist.Piece(1, 'uniform', (0,), 4, 2)]
main.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert list(read(tmp_path / "kvib-femnist.jsonl")) == ["v1-uniform-seed0"]
    assert (tmp_path / "kvib-femnist.md").exists()
