"""Comparisons: which runs they consist of, that all see the same noise, and how they resume."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call, lines

from rota import recipe
from rota.cli import summary
from rota.errors import BadInput
from rota.recipe import compare
from rota.running import run as running

SMALL = ("fedavg-digits", "--set", "rounds=2", "--set", "sampler.budget=2", "--set", "task.steps=2")


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("sampler=full,uniform", "sampler", ["full", "uniform"]),
        ("task.lr=0.1,1", "task.lr", [0.1, 1]),
        ("task.batch=10,all", "task.batch", [10, "all"]),
        ("task.data.matched_test=true,false", "task.data.matched_test", [True, False]),
        (
            'sampler={name="uniform",budget=3},full',
            "sampler",
            [{"name": "uniform", "budget": 3}, "full"],
        ),
        ("task.partition.low_size=[1,2],[3,4]", "task.partition.low_size", [[1, 2], [3, 4]]),
        ("rounds=3", "rounds", [3]),
        ("rounds=3,,4,", "rounds", [3, 4]),
    ],
)
def test_what_varies(text: str, key: str, values: list[Any]) -> None:
    assert compare.parse(text) == ([key], [[value] for value in values])


def test_values_can_go_together() -> None:
    runs = compare.variants(
        recipe.read("mmfl-digits"),
        ["sampler+estimator=mmfl-gvr+stale-vr,mmfl-kvib+unbiased", "task.lr=0.1,0.2"],
        1,
    )
    assert list(runs) == [
        f"{method}-{lr}-seed0"
        for method in ("mmfl-gvr_stale-vr", "mmfl-kvib_unbiased")
        for lr in (0.1, 0.2)
    ]
    configs = [run.config for run in runs.values()]
    methods = [(config["sampler"]["name"], config["estimator"]) for config in configs]
    assert methods[::2] == [("mmfl-gvr", "stale-vr"), ("mmfl-kvib", "unbiased")]
    assert runs["mmfl-gvr_stale-vr-0.1-seed0"].config["sampler"]["processors"] == "mixed"
    settings = [run.setting for run in runs.values()]
    assert settings[1] == {"sampler": "mmfl-gvr", "estimator": "stale-vr", "task.lr": 0.2}


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        (
            ["sampler=full,uniform", "sampler=kvib"],
            "--vary names 'sampler' twice: give all its values at once",
        ),
        (["sampler+sampler=full+kvib"], "--vary names 'sampler' twice"),
        (
            ["sampler+estimator=full+unbiased,kvib"],
            "--vary sampler+estimator takes 2 values joined by '+', but got 'kvib'",
        ),
        (["sampler+=full"], "--vary takes key=value,value,..."),
        (
            ["sampler.procedure=fixed,independent", "sampler=uniform,full"],
            "the runs 'fixed-full-seed0' and 'independent-full-seed0' are the same",
        ),
        (["task.lr=0.1,1e-1"], "--vary gives the run '0.1-seed0' twice"),
        (["task.batch=10,10.0"], "'task.batch' is 10.0, but it takes a whole number"),
        (["sampler.budget=5,5.0"], "the runs '5-seed0' and '5.0-seed0' are the same"),
    ],
)
def test_comparisons_that_say_one_thing_twice_or_half(
    vary: list[str], sentence: str, tmp_path: Path
) -> None:
    words = [word for each in vary for word in ("--vary", each)]
    result = call("compare", *SMALL, *words, "--seeds", 2, "--out", tmp_path / "c")
    assert (result.status, result.out) == (2, "")
    assert sentence in result.err
    assert not (tmp_path / "c").exists()


def test_all_combinations_and_all_with_the_same_seeds() -> None:
    config = recipe.override(recipe.read("fedavg-digits"), "seed=7")
    runs = compare.variants(config, ["sampler=full,uniform", "task.lr=0.1,-0.2"], seeds=2)
    all_of_them = list(itertools.product(("full", "uniform"), (0.1, -0.2), (7, 8)))
    assert list(runs) == [f"{sampler}-{lr}-seed{seed}" for sampler, lr, seed in all_of_them]
    settings = [
        (config["sampler"]["name"], config["task"][0]["lr"], config["seed"])
        for config in (run.config for run in runs.values())
    ]
    assert settings == all_of_them
    assert [run.seed for run in runs.values()] == [seed for _, _, seed in all_of_them]
    assert (
        runs["uniform-0.1-seed7"].config["sampler"]["budget"] == 5
    )  # what a value does not change stays
    assert config["seed"] == 7


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        (
            "estimator=fedavg,stale-vr",
            "the run 'stale-vr-seed0' cannot begin: the estimator 'stale-vr' needs the norms of",
        ),
        ("sampler.budget=2,1000", "the run '1000-seed0' cannot begin: sampler.budget is 1000"),
        ("task.partition.alpha=1,-1", "the run '-1-seed0' cannot begin: dirichlet: alpha is -1"),
    ],
)
def test_a_mistake_in_the_last_run_shows_before_the_first(
    vary: str, sentence: str, tmp_path: Path
) -> None:
    out = tmp_path / "c"
    result = call(
        "compare",
        *SMALL,
        "--set",
        "task.partition=dirichlet",
        "--vary",
        vary,
        "--seeds",
        "2",
        "--out",
        str(out),
    )
    assert result.status == 2
    assert sentence in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ({"a": 3, "b": 1}, "target reached by a after 3 rounds, b after 1 round"),
        ({"a": None, "b": 2, "c": None}, "target reached by b after 2 rounds; not reached by a, c"),
        ({"a": None, "b": None}, "target not reached by a, b"),
        ({"a": 3}, ""),
    ],
)
def test_who_reached_the_target(rounds: dict[str, int | None], words: str) -> None:
    assert (
        summary.reached({"models": {name: {"rounds_to_target": n} for name, n in rounds.items()}})
        == words
    )
    assert summary.reached({"models": {name: {} for name in rounds}}) == ""


def test_what_failed_is_said() -> None:
    def ended(**each: int) -> dict[str, Any]:
        return {
            "failures": sum(each.values()),
            "models": {name: {"failures": n} for name, n in each.items()},
        }

    assert summary.failed(ended(a=0)) == ""
    assert summary.failed(ended(a=1)) == "1 training could not be used: the report says why"
    assert (
        summary.failed(ended(a=20, b=0, c=1))
        == "21 trainings could not be used (a 20, c 1): the report says why"
    )


def test_which_models_diverged_is_said() -> None:
    def words(**losses: float | None) -> str:
        return summary.diverged({"models": {name: {"loss": loss} for name, loss in losses.items()}})

    assert words(a=0.5, b=1e30) == ""
    assert (
        words(a=math.inf, b=1.0, c=None)
        == "the loss of 'a' and 'c' is not finite: a lower lr may help"
    )


def test_what_went_wrong_stands_below_the_table() -> None:
    def ended(run: str, small: float | None, failures: int) -> dict[str, Any]:
        models = {
            "wide": {"accuracy": 0.5, "loss": 1.0, "failures": 0},
            "small": {"accuracy": 0.5, "loss": small, "failures": failures},
        }
        costs = {"bytes_up": 1e6, "bytes_down": 1e6, "client_seconds": 2.0, "server_bytes": 1e3}
        whole = {
            "accuracy": 0.5,
            "loss": None,
            "worst_accuracy": 0.5,
            "accuracy_spread": 0.0,
            "rounds": 4,
            "failures": failures,
        }
        return {"run": run, "models": models, **whole, **costs}

    fine = [ended(f"0.1-seed{seed}", 1.0, 0) for seed in range(2)]
    bad = [
        ended("1e38-seed0", None, 3),
        ended("1e38-seed1", 1.0, 0),
        ended("1e38-seed2", math.inf, 4),
    ]
    assert summary.table([*fine, *bad])[-2:] == [
        "1e38 (2 of 3 seeds): the loss of 'small' is not finite: a lower lr may help",
        "1e38 (2 of 3 seeds): 7 trainings could not be used (small 7): the report says why",
    ]
    assert (
        summary.table([fine[0], bad[0]])[-2]
        == "1e38-seed0: the loss of 'small' is not finite: a lower lr may help"
    )
    alone = [
        {**result, "models": {"small": result["models"]["small"]}} for result in (fine[0], bad[0])
    ]
    assert (
        summary.table(alone)[-1] == "1e38-seed0: 3 trainings could not be used: the report says why"
    )
    assert not any("not" in line for line in summary.table(fine))


@given(
    st.lists(
        st.sampled_from(["a", "1", "0.5", "-1", "../b", "[1, 2]", "x y", "ü"]),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
def test_run_names_are_plain_folder_names(values: list[str]) -> None:
    try:
        runs = compare.variants({"task": []}, [f"summary={','.join(values)}"], seeds=1)
    except BadInput:  # two values that are written alike
        return
    assert len(runs) == len(values)
    assert all("/" not in name and name.isprintable() and name.encode("ascii") for name in runs)


def test_values_that_have_no_letters_still_get_folders_of_their_own() -> None:
    with pytest.raises(BadInput, match="twice"):
        compare.variants({"task": []}, ["summary=ü,ö"], seeds=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("comparison") / "here"
    outcome = call(
        "compare", *SMALL, "--vary", "estimator=fedavg,unbiased", "--seeds", 2, "--out", folder
    )
    assert outcome.status == 0, outcome.err
    return folder, outcome.out


def test_a_comparison_is_a_folder_of_runs(finished: tuple[Path, str]) -> None:
    folder, out = finished
    names = ["fedavg-seed0", "fedavg-seed1", "unbiased-seed0", "unbiased-seed1"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "report.html"])
    *table, paired, report = out.splitlines()
    assert report == f"report: {folder / 'report.html'}"
    said = []
    for key in ("accuracy", "own_mean"):
        final = {name: lines(folder / name)[-1][key] for name in names}
        off = [100 * (final[f"unbiased-seed{s}"] - final[f"fedavg-seed{s}"]) for s in (0, 1)]
        said.append(", ".join(f"{each:+.1f}" for each in off))
    words = f"{said[0]} points; mean client {said[1]} points"
    assert paired == f"unbiased minus fedavg, paired by seed: {words}"
    for name, line in zip(("fedavg", "unbiased"), table, strict=True):
        last = [lines(folder / f"{name}-seed{seed}")[-1] for seed in (0, 1)]
        said = []
        for word, key in (
            ("accuracy", "accuracy"),
            ("mean client", "own_mean"),
            ("worst client", "own_worst"),
        ):
            both = dict.fromkeys(f"{100 * each[key]:.1f} %" for each in last)
            said.append(f"{word} {', '.join(both)}")
        loss = sum(float(each["loss"]) for each in last) / 2
        words = "  ".join([f"{f'{name} (2 seeds)':18}", *said, f"loss {loss:.4f}", "2 rounds"])
        assert line == words


def test_several_models_are_compared_with_what_they_cost(tmp_path: Path) -> None:
    changes = (
        "rounds=3",
        "target=0.12",
        "task.2.name=mean",
    )  # a model may be called as a column is
    words = [word for change in changes for word in ("--set", change)]
    outcome = call(
        "compare",
        "mmfl-digits",
        *words,
        "--vary",
        "sampler=mmfl-kvib,mmfl-lvr",
        "--out",
        tmp_path / "a",
    )
    assert outcome.status == 0, outcome.err
    assert max(map(len, outcome.out.splitlines()[:-1])) < 100
    head, *rows, _, aim, quick, slow, _, costs, cheap, dear, _ = (
        re.split(r"\s{2,}", line) for line in outcome.out.splitlines()
    )
    assert head == ["run", "mean", "linear", "small", "mean", "worst", "spread", "rounds"]
    assert aim == ["rounds to target", "linear", "small", "mean"]
    assert costs == ["cost of", "sent up", "sent down", "client computing", "server memory"]
    assert [cheap[0], dear[0]] == [row[0] for row in rows]
    kvib, lvr = (
        json.loads((tmp_path / "a" / f"{row[0]}/summary.json").read_text()) for row in rows
    )
    for row, reached, result in zip(rows, (quick, slow), (kvib, lvr), strict=True):
        each = [model["accuracy"] for model in result["models"].values()]
        percents = [np.mean(each), *each, min(each), np.std(each)]
        assert row[1:7] == [f"{value:.2%}" for value in percents]
        hits = [f"{model['rounds_to_target'] or '-'}" for model in result["models"].values()]
        assert (row[7:], reached) == ([f"{result['rounds']}"], [row[0], *hits])
    assert (
        lvr["bytes_down"] > 2 * kvib["bytes_down"]
    )  # all clients are sent all models, to say their losses
    assert dear[2].endswith(f" {lvr['bytes_down'] / kvib['bytes_down']:.1f}x")
    assert [cell.split()[-1] for cell in (cheap[2], cheap[3])] == ["1.0x", "1.0x"]


def test_seeds_of_several_models_are_one_row() -> None:
    def ended(seed: int, accuracy: float, hits: list[int | None]) -> dict[str, Any]:
        one = {"accuracy": accuracy, "loss": 1.0, "failures": 0}
        models = {
            name: {**one, "rounds_to_target": hit} for name, hit in zip("ab", hits, strict=True)
        }
        costs = {
            "bytes_up": 1e6 * (1 + seed),
            "bytes_down": 1e6,
            "client_seconds": 2.0,
            "server_bytes": 1e3,
        }
        whole = {
            "accuracy": accuracy,
            "worst_accuracy": accuracy,
            "accuracy_spread": 0.0,
            "rounds": 10 + seed,
            "failures": 0,
        }
        return {"run": f"x-seed{seed}", "models": models, **whole, **costs}

    head, row, _, aim, hits, _, _, cost = summary.table(
        [ended(0, 0.4, [3, 5]), ended(1, 0.5, [4, None])]
    )
    assert re.split(r"\s{2,}", row) == ["x (2 seeds)", *["40.0 %, 50.0 %"] * 4, "0.0 %", "10.5"]
    assert re.split(r"\s{2,}", aim) == ["rounds to target", "a", "b"]
    assert re.split(r"\s{2,}", hits) == ["x (2 seeds)", "3, 4", "5 (1 of 2)"]
    assert summary.table([ended(0, 0.4, [3, None])])[4].split() == ["x-seed0", "3", "-"]
    assert re.split(r"\s{2,}", cost) == [
        "x (2 seeds)",
        "1.5 MB 1.0x",
        "1.0 MB 1.0x",
        "2.0 s 1.0x",
        "1.0 kB 1.0x",
    ]
    assert len(head) == len(row)


def test_scores_that_are_not_alike_have_no_columns_over_all() -> None:
    models = {
        name: {"accuracy": accuracy, "loss": 1.0, "failures": 0}
        for name, accuracy in (("a", 0.5), ("b", -172.25))
    }
    costs = {"bytes_up": 1e6, "bytes_down": 1e6, "client_seconds": 2.0, "server_bytes": 1e3}
    one = {
        "models": models,
        "accuracy": None,
        "worst_accuracy": None,
        "accuracy_spread": None,
        "rounds": 3,
        "failures": 0,
        **costs,
    }
    head, row, *_ = summary.table([{"run": "x-seed0", **one}])
    assert [re.split(r"\s{2,}", line) for line in (head, row)] == [
        ["run", "a", "b", "rounds"],
        ["x-seed0", "50.00%", "-172.2", "3"],
    ]
    head, row, *_ = summary.table([{"run": f"x-seed{seed}", **one} for seed in range(2)])
    assert re.split(r"\s{2,}", row)[1:] == ["50.0 %", "-172.2", "3"]


def test_what_is_compared_sees_the_same_noise(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    drawn, first_loss = {}, {}
    for path in folder.iterdir():
        if path.is_dir():
            records: list[Any] = lines(path)
            drawn[path.name] = [line["cohort"] for line in records]
            first_loss[path.name] = records[0]["models"]["digits"]["train_loss"]
    assert drawn["fedavg-seed0"] == drawn["unbiased-seed0"]
    assert drawn["fedavg-seed0"] != drawn["fedavg-seed1"]
    assert first_loss["fedavg-seed0"] == first_loss["unbiased-seed0"]


def test_one_of_its_runs_is_the_run_alone(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = finished
    alone = call(
        "run", *SMALL, "--set", "estimator=unbiased", "--set", "seed=1", "--out", tmp_path / "alone"
    )
    assert alone.status == 0, alone.err
    for name in ("rounds.jsonl", "config.toml"):
        assert (tmp_path / "alone" / name).read_bytes() == (
            folder / "unbiased-seed1" / name
        ).read_bytes()


def test_a_used_folder_is_refused_and_resume_offered(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = finished
    again = call("compare", *SMALL, "--vary", "estimator=fedavg,unbiased", "--out", folder)
    assert again.status == 2
    assert "fedavg-seed0 is already in use: add --resume to resume its run" in again.err
    other = call(
        "compare",
        *SMALL,
        "--vary",
        "estimator=fedavg,unbiased",
        "--out",
        folder,
        "--resume",
        "--set",
        "task.lr=0.5",
    )
    assert other.status == 2
    assert "(task.lr was 0.1 and is now 0.5)" in other.err
    (tmp_path / "notes.txt").write_text("mine")
    mine = call("compare", *SMALL, "--vary", "estimator=fedavg,unbiased", "--out", tmp_path)
    assert mine.status == 2
    assert f"the output folder {tmp_path} is already in use: choose another --out" in mine.err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_comparison_goes_on_where_it_was(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def play(*arguments: Any) -> Any:
        if len(played) == 5:  # in the middle of the third run
            raise KeyboardInterrupt
        played.append(arguments)
        return original(*arguments)

    original = running.loop.play
    out = tmp_path / "a b"
    words = [
        "compare",
        *SMALL,
        "--vary",
        "estimator=fedavg,unbiased",
        "--seeds",
        "2",
        "--out",
        str(out),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(running.loop, "play", play)
        stopped = call(*words)
    assert stopped.status == 130, stopped.err
    assert stopped.out == ""
    said, again = stopped.err.splitlines()[-2:]
    assert said == "rota: interrupted; the checkpoint is written"
    assert again == f"rota: to resume: rota {shlex.join(words)} --resume"
    assert sorted(path.name for path in out.iterdir()) == [
        "fedavg-seed0",
        "fedavg-seed1",
        "unbiased-seed0",
    ]

    done = call(*shlex.split(again.partition("to resume: ")[2])[1:], "--json")
    assert done.status == 0, done.err
    assert [result["run"] for result in json.loads(done.out)] == [
        "fedavg-seed0",
        "fedavg-seed1",
        "unbiased-seed0",
        "unbiased-seed1",
    ]
    for name in ("fedavg-seed0", "unbiased-seed0", "unbiased-seed1"):
        assert (out / name / "rounds.jsonl").read_bytes() == (
            finished[0] / name / "rounds.jsonl"
        ).read_bytes()


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        (["sampler=uniform,kvib,vrb"], "'kvib' and 'vrb' with 'fedavg'"),
        (["sampler=kvib", "estimator=unbiased,mifa"], "'kvib' with 'mifa'"),
        (["sampler=uniform,full"], ""),
        (["sampler+estimator=kvib+unbiased,uniform+fedavg"], ""),
        (["sampler=pow-d"], ""),  # it is biased by itself
    ],
)
def test_an_estimator_that_makes_samplers_biased_is_named(vary: list[str], sentence: str) -> None:
    runs = compare.variants(recipe.read("fedavg-digits"), vary, 1)
    said = compare.made_biased(runs)
    assert sentence in said
    assert bool(said) == bool(sentence)
