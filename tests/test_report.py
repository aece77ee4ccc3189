"""The report: what is read, grouped and named, what is in the charts, and a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import scipy.stats
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from rota import recipe
from rota.errors import BadInput
from rota.report import clients, curves, numbers, tables, write
from rota.report.charts import series_of
from rota.report.groups import Group, differing, group
from rota.report.history import find, read
from rota.report.page import plotly, render, title


def make(
    path: Path,
    *,
    seed: int = 0,
    rounds: int = 6,
    played: int | None = None,
    evaluate: int = 1,
    models: tuple[str, ...] = ("digits",),
    people: int = 8,
    cohort: int = 3,
    classes: int | None = 4,
    by_client: bool = True,
    failing: str = "",
    finished: bool = True,
    lift: float = 0.0,
    errors: str = "",
    more: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run folder as a run writes it, with accuracies that climb from 0.3 + lift.

    `more` goes into each round's line. The model `errors` is scored by its errors.
    """
    rng = np.random.default_rng([seed, len(path.name), people])
    path.mkdir(parents=True)
    tasks = [{"name": model, "model": "net", "lr": 0.1} for model in models]
    sampler = {"sampler": {"name": "uniform", "budget": cohort}}
    settings = {
        "rounds": rounds,
        "seed": seed,
        "evaluate": evaluate,
        **sampler,
        **config,
        "task": tasks,
    }
    (path / "config.toml").write_text(tomli_w.dumps(settings))
    data = {}
    for model in models:
        labels = rng.integers(0, 50, (people, classes or 1)) * rng.integers(1, 5, (people, 1)) + 1
        data[model] = {
            "data": model,
            "clients": people,
            "examples": int(labels.sum()),
            "test_examples": 100,
            "shown": list(range(people)),
            "sizes": labels.sum(axis=1).tolist(),
        } | ({"labels": labels.tolist()} if classes else {})
    (path / "data.json").write_text(json.dumps(data))
    lines = []
    for now in range(1, (rounds if played is None else played) + 1):
        tested = now % evaluate == 0 or now == rounds
        level = (
            0.3 + 0.5 * lift + 0.5 * (1 - np.exp(-3 * now / rounds)) + 0.02 * rng.standard_normal()
        )
        scores = {}
        for s, model in enumerate(models):
            scores[model] = {"trained": cohort, "train_loss": 1.0 / now}
            if tested:
                scores[model] |= {"loss": 2.0 / now + s, "accuracy": float(level) - 0.05 * s}
                if by_client:
                    scores[model]["client_accuracy"] = {
                        "p10": float(level) - 0.2,
                        "p50": float(level),
                        "p90": float(level) + 0.05,
                    }
        if tested and errors:
            scores[errors]["accuracy"] = -200.5 / now
        together = tested and not errors
        reached = [score["accuracy"] for score in scores.values()] if tested else [np.nan]
        whole = {"accuracy": None, "loss": None, "worst_accuracy": None, "accuracy_spread": None}
        if together:
            whole = {
                "accuracy": float(np.mean(reached)),
                "loss": float(np.mean([score["loss"] for score in scores.values()])),
                "worst_accuracy": float(np.min(reached)),
                "accuracy_spread": float(np.std(reached)),
            }
        if len(models) == 1:
            del whole["worst_accuracy"], whole["accuracy_spread"]
        failed = {"client": 1, "model": models[0], "reason": failing}
        line = {
            "round": now,
            **whole,
            "models": scores,
            "cohort": {
                model: rng.choice(people, cohort, replace=False).tolist() for model in models
            },
            "probability": {"min": 0.1, "max": 0.1},
            "seconds": now * (30.0 + seed),
            "bytes_up": now * 1_000_000 * cohort,
            "bytes_down": now * 1_000_000 * cohort,
            "server_bytes": 4_000_000,
            "client_seconds": 60.0,
            "failures": [failed] if failing and now % 2 else [],
            **(more or {}),
        }
        lines.append(json.dumps(line) + "\n")
    (path / "rounds.jsonl").write_text("".join(lines))
    if finished:
        (path / "summary.json").write_text(json.dumps({"wall_seconds": 12.5}))
    return path


def compare(
    path: Path, samplers: tuple[str, ...] = ("uniform", "kvib", "vrb"), seeds: int = 3, **same: Any
) -> list[Group]:
    """What `rota compare` leaves: a run folder for each value and seed."""
    for number, name in enumerate(samplers):
        for seed in range(seeds):
            own = {"gamma": 0.3} if name == "kvib" else {}
            own = {"lift": 0.1 * number, "sampler": {"name": name, "budget": 3, **own}}
            make(path / f"{name}-seed{seed}", seed=seed, **{**own, **same})
    return read_all(path)


def read_all(*folders: Path) -> list[Group]:
    return group([read(path) for folder in folders for path in find(folder)])


# what is read


def test_a_run_is_read_with_its_long_lists_counted(tmp_path: Path) -> None:
    run = read(make(tmp_path / "a", rounds=6, evaluate=4, failing="it hung", target=0.1))
    cohorts = [
        json.loads(line)["cohort"]["digits"]
        for line in (tmp_path / "a/rounds.jsonl").read_text().splitlines()
    ]
    assert (
        run.sampled["digits"].tolist() == np.bincount(np.concatenate(cohorts), minlength=8).tolist()
    )
    assert run.rows == 18
    assert run.failures == {"it hung": 3}
    assert not any("cohort" in line or "failures" in line for line in run.rounds)
    assert [line["round"] for line in run.tested] == [4, 6]
    assert run.accuracy == run.tested[-1]["accuracy"]
    assert run.best == max(line["accuracy"] for line in run.tested)
    assert run.rounds_to_target == 4
    assert run.client_seconds == 360
    assert (run.clients, run.models, run.finished, run.wall_seconds) == (8, ["digits"], True, 12.5)


def test_the_target_counts_when_every_model_is_there(tmp_path: Path) -> None:
    run = read(make(tmp_path / "a", models=("digits", "letters"), rounds=30, target=0.6))
    assert run.rounds_to_target is not None
    assert run.rounds_to(["letters"]) == run.rounds_to_target  # the lower of the two
    assert (run.rounds_to(["digits"]) or 99) < run.rounds_to_target
    assert run.rounds_to(["words"]) is None
    first = run.rounds[run.rounds_to_target - 1]["models"]
    before = run.rounds[run.rounds_to_target - 2]["models"]
    assert first["letters"]["accuracy"] >= 0.6
    assert before["letters"]["accuracy"] < 0.6
    assert read(make(tmp_path / "b", target=0.999)).rounds_to_target is None
    assert read(make(tmp_path / "c")).rounds_to_target is None


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    with (make(tmp_path / "a", finished=False) / "rounds.jsonl").open("a") as file:
        file.write('{"round": 7, "accu')
    run = read(tmp_path / "a")
    assert len(run.rounds) == 6
    assert not run.finished


def test_folders_of_run_folders_are_opened(tmp_path: Path) -> None:
    for name in ("budget10-seed0", "budget2-seed1", "budget2-seed0"):
        make(tmp_path / "all" / name)
    assert [path.name for path in find(tmp_path / "all")] == [
        "budget2-seed0",
        "budget2-seed1",
        "budget10-seed0",
    ]
    assert find(tmp_path / "all/budget2-seed0") == [tmp_path / "all/budget2-seed0"]


def test_mistakes_are_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a run folder and holds none"):
        write([tmp_path], tmp_path / "report.html")
    with pytest.raises(BadInput, match="is not a run folder and holds none"):
        write([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(BadInput, match="nothing to report on"):
        write([], tmp_path / "report.html")
    make(tmp_path / "good")
    with pytest.raises(BadInput, match="cannot write the report"):
        write([tmp_path / "good"], tmp_path / "good/config.toml/report.html")
    for name, text in (
        ("config.toml", "rounds ="),
        ("rounds.jsonl", "nonsense\n"),
        ("data.json", "{"),
    ):
        (make(tmp_path / f"bad {name}") / name).write_text(text)
        with pytest.raises(BadInput, match=f"cannot read .*{re.escape(name)}"):
            write([tmp_path / f"bad {name}"], tmp_path / "report.html")
    (tmp_path / "good/data.json").unlink()
    with pytest.raises(BadInput, match=r"has no data\.json"):
        write([tmp_path / "good"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("clients", [9, 10**12, 10**30, -1, "8", None])
def test_data_that_name_another_number_of_clients(tmp_path: Path, clients: Any) -> None:
    path = make(tmp_path / "a") / "data.json"
    data = json.loads(path.read_text())
    data["digits"]["clients"] = clients
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput, match="are not what a run writes"):
        write([tmp_path / "a"], tmp_path / "report.html")


# groups and their names


def test_runs_that_differ_in_the_seed_are_one_group(tmp_path: Path) -> None:
    groups = compare(tmp_path)
    # gamma differs too, but the name says it all
    assert [one.label for one in groups] == ["kvib", "uniform", "vrb"]
    assert [[run.config["seed"] for run in one.runs] for one in groups] == [[0, 1, 2]] * 3
    assert differing([one.runs for one in groups]) == {
        "sampler.name": ["kvib", "uniform", "vrb"],
        "sampler.gamma": ["0.3", None, None],
    }


def test_a_setting_is_called_by_all_its_methods(tmp_path: Path) -> None:
    for sampler, estimator in (("full", "unbiased"), ("kvib", "scaffold"), ("uniform", "fedvarp")):
        make(tmp_path / sampler, sampler={"name": sampler}, estimator={"name": estimator})
    assert [one.label for one in read_all(tmp_path)] == [
        "full, unbiased",
        "kvib, scaffold",
        "uniform, fedvarp",
    ]


def test_as_many_keys_as_it_takes(tmp_path: Path) -> None:
    for name in ("uniform", "vrb"):
        for lr in (0.5, 1.0):
            make(
                tmp_path / f"{name}-{lr}",
                sampler={"name": name},
                server={"lr": lr, "note": f"{lr}"},
            )
    make(tmp_path / "whole-1", sampler={"name": "whole"}, server={"lr": 1, "note": "1"})
    labels = [one.label for one in read_all(tmp_path)]
    assert labels == [
        f"{name}, server.lr={lr}" for name in ("uniform", "vrb") for lr in ("0.5", "1")
    ] + ["whole, server.lr=1"]


def test_a_key_that_only_one_has(tmp_path: Path) -> None:
    make(tmp_path / "a", target=0.9)
    make(tmp_path / "b")
    assert [one.label for one in read_all(tmp_path)] == ["target=0.9", "no target"]


def test_folders_give_the_name_where_no_key_does(tmp_path: Path) -> None:
    assert [one.label for one in read_all(make(tmp_path / "alone"))] == ["alone"]
    make(tmp_path / "seeds/kvib-seed0", seed=0)
    make(tmp_path / "seeds/kvib-seed1", seed=1)
    assert [one.label for one in read_all(tmp_path / "seeds")] == ["kvib"]
    # the same run twice is not a group of two seeds
    make(tmp_path / "old/kvib-seed0", seed=0)
    assert [
        (one.label, len(one.runs)) for one in read_all(tmp_path / "seeds", tmp_path / "old")
    ] == [("kvib", 2), ("kvib-seed0", 1)]
    shutil.rmtree(tmp_path / "seeds/kvib-seed1")
    assert [one.label for one in read_all(tmp_path / "seeds", tmp_path / "old")] == [
        "seeds/kvib-seed0",
        "old/kvib-seed0",
    ]


def test_a_folder_named_twice_is_read_once(tmp_path: Path) -> None:
    make(tmp_path / "a")
    html = write([tmp_path / "a", tmp_path / "a", tmp_path], tmp_path / "report.html").read_text()
    assert "1 model (digits) · 8 clients · 6 rounds · sampler uniform</p>" in html


def test_keys_and_values_are_told_as_a_recipe_writes_them(tmp_path: Path) -> None:
    make(tmp_path / "a", deep={"x": True, "sizes": [1, 2], "n": 5, "none": []})
    make(
        tmp_path / "b",
        deep={"x": False, "sizes": [1, 3], "n": 5.0, "none": [1]},
        models=("letters",),
    )
    assert differing([one.runs for one in read_all(tmp_path)]) == {
        "deep.x": ["true", "false"],
        "deep.sizes": ["[1, 2]", "[1, 3]"],
        "deep.none": ["[]", "[1]"],
        "task.name": ["digits", "letters"],
    }


def test_title(tmp_path: Path) -> None:
    assert title(read_all(make(tmp_path / "alone"))) == "alone"
    assert title(compare(tmp_path / "samplers")) == "samplers"
    assert title(read_all(tmp_path / "alone", tmp_path / "samplers")) == "Comparison"


def test_the_methods_stand_at_the_top(tmp_path: Path) -> None:
    methods = {
        "sampler": {"name": "mmfl-gvr"},
        "estimator": {"name": "stale-vr"},
        "server": {"name": "adam"},
    }
    make(tmp_path / "a", **methods)
    assert "6 rounds · sampler mmfl-gvr · estimator stale-vr · server adam</p>" in render(
        read_all(tmp_path)
    )
    make(tmp_path / "b", **{**methods, "estimator": {"name": "unbiased"}})
    assert "2 runs · sampler mmfl-gvr · server adam</p>" in render(read_all(tmp_path))
    for name in (
        "mmfl-digits",
        "mmfl-fashion",
    ):  # whose summary stands above, whatever the sampler is
        assert not re.search("K-Vib|LVR|draw", recipe.read(name)["summary"])


# numbers


@pytest.mark.parametrize(
    ("text", "form", "value"),
    [
        ("97.1 %", numbers.percent, 0.97106),
        ("0 B", numbers.size, 0),
        ("999 B", numbers.size, 999),
        ("12.3 MB", numbers.size, 12_345_678),
        ("123 GB", numbers.size, 123_456_789_012),
        ("0 ms", numbers.duration, 0),
        ("260 ms", numbers.duration, 0.26),
        ("1.0 s", numbers.duration, 0.9999),
        ("59.9 s", numbers.duration, 59.94),
        ("1 min", numbers.duration, 59.96),
        ("4 min 10 s", numbers.duration, 250),
        ("1 h", numbers.duration, 3599.7),
        ("2 h", numbers.duration, 7190),
        ("2 h 5 min", numbers.duration, 7500),
        ("2 d", numbers.duration, 172_700),
        ("1 d 18 h", numbers.duration, 150_000),
        ("1,234", numbers.count, 1234),
        ("31.5", numbers.count, 31.5),
    ],
)
def test_numbers_for_people(text: str, form: numbers.Format, value: float) -> None:
    assert form(value).replace(numbers.SPACE, " ") == text


@pytest.mark.parametrize(
    ("text", "form", "values"),
    [
        ("–", numbers.percent, [None, None]),
        ("50.0 %", numbers.percent, [0.5, None]),
        ("50.0 %", numbers.percent, [0.5, 0.5, 0.5]),
        (
            "50.0 ± 24.8 %",
            numbers.percent,
            [0.4, 0.5, 0.6],
        ),  # t = 4.303 for two degrees of freedom, over the root of 3
        ("2.0 ± 2.5 MB", numbers.size, [1e6, 2e6, 3e6]),
        ("4.0 min", numbers.duration, [240.0, 240.01]),
        ("40.0 %, 60.0 %", numbers.percent, [0.4, None, 0.6]),
        ("4.0 ± 2.5 min", numbers.duration, [180.0, 240.0, 300.0]),
        ("30.0 ± 2.5", numbers.count, [29, 30, 31]),
    ],
)
def test_mean_and_half_width(text: str, form: numbers.Format, values: list[float | None]) -> None:
    assert numbers.mean(values, form).replace(numbers.SPACE, " ") == text.replace(
        "4.0 min", "4 min"
    )


def test_differences_are_paired_by_seed() -> None:
    """Against scipy's paired t-test; fewer than three are shown themselves."""
    generator = np.random.default_rng(0)
    first = dict(enumerate(generator.random(7).tolist()))
    second = {seed: value + generator.normal(0.1, 0.05) for seed, value in first.items()}
    test = scipy.stats.ttest_rel([*second.values()], [*first.values()])
    low, high = test.confidence_interval(0.95)
    middle = np.mean([second[seed] - first[seed] for seed in first])
    said = numbers.paired(first, second, share=True).replace(numbers.SPACE, " ")
    assert said == f"{100 * middle:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
    assert numbers.paired({1: 0.5, 2: 3.0, 9: 1.0}, {2: 1.0, 1: 1.0}, False) == "+0.5000, -2.0000"
    assert numbers.paired({1: 0.5}, {2: 0.5}, True) == ""


@given(st.floats(0, 1e9))
def test_durations_have_at_most_two_parts_that_add_up(value: float) -> None:
    words = numbers.duration(value).split(numbers.SPACE)
    units = {unit: step for step, unit in numbers.SECONDS}
    total = sum(
        float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True)
    )
    assert len(words) <= 4
    assert total == pytest.approx(value, rel=0.06, abs=6e-4)


# charts


def traces_of(html: str) -> dict[str, Any]:
    payload = re.search(r'id="page">(.*?)</script>', html, re.DOTALL)
    assert payload is not None
    return dict(json.loads(payload[1]))


def test_a_curve_is_the_mean_with_a_band_from_lowest_to_highest_seed(tmp_path: Path) -> None:
    groups = compare(tmp_path, samplers=("uniform", "vrb"))
    chart = curves.score("accuracy", "", series_of(groups))
    values = np.array([[line["accuracy"] for line in run.rounds] for run in groups[1].runs])
    edge, band, line = chart.traces[3:]
    assert [trace["meta"]["role"] for trace in (edge, band, line)] == ["edge", "band", "line"]
    assert {trace["meta"]["series"] for trace in (edge, band, line)} == {"run 1"}
    np.testing.assert_allclose(edge["y"], values.min(axis=0), rtol=1e-5)
    np.testing.assert_allclose(band["y"], values.max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(line["y"], values.mean(axis=0), rtol=1e-5)
    axes, x = curves.x_table(groups)
    assert {name: axis["title"] for name, axis in axes.items()} == {
        "round": "round",
        "seconds": "virtual time (min)",
        "bytes": "data sent, up and down (MB)",
    }
    assert x["1"]["round"] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(
        x["1"]["seconds"], np.arange(1, 7) * 31 / 60, rtol=1e-5
    )  # seeds 0, 1, 2 take 30, 31 and 32 s
    assert x["1"]["bytes"] == [6, 12, 18, 24, 30, 36]


def test_a_mean_is_always_over_the_same_seeds(tmp_path: Path) -> None:
    make(tmp_path / "a-seed0", seed=0, rounds=9)
    make(tmp_path / "a-seed1", seed=1, rounds=9, played=4, finished=False)
    make(tmp_path / "a-seed2", seed=2, rounds=9, played=0, finished=False)
    (only,) = read_all(tmp_path)
    chart = curves.score("accuracy", "", series_of([only]))
    assert [len(trace["y"]) for trace in chart.traces] == [4, 4, 4]
    assert curves.x_table([only])[1]["0"]["round"] == [1, 2, 3, 4]
    html = render([only])
    assert "the line ends with the first of them" in html
    assert "Not finished: a-seed1 at round 4 of 9, a-seed2 at round 0 of 9." in html


def test_untested_rounds_are_left_out_and_long_curves_thinned(tmp_path: Path) -> None:
    groups = read_all(make(tmp_path / "a", rounds=23, evaluate=5))
    assert curves.x_table(groups)[1]["0"]["round"] == [5, 10, 15, 20, 23]
    assert len(curves.score("accuracy", "", series_of(groups)).traces[0]["y"]) == 5
    groups = read_all(make(tmp_path / "b", rounds=2500, by_client=False))
    x = curves.x_table(groups)[1]["0"]["round"]
    assert (len(x), x[0], x[-1]) == (curves.POINTS, 1, 2500)
    assert len(curves.score("loss", "", series_of(groups)).traces[0]["y"]) == curves.POINTS


def test_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    path = make(tmp_path / "a") / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, value in zip(lines[3:], (float("nan"), float("inf"), 1e300), strict=True):
        line["loss"] = line["models"]["digits"]["loss"] = line["models"]["digits"]["train_loss"] = (
            value
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = curves.score("loss", "", series_of(read_all(tmp_path / "a")))
    assert chart.traces[0]["y"][3:] == [None, None, 1e300]
    traces_of(render(read_all(tmp_path / "a")))


def test_models_have_curves_of_their_own(tmp_path: Path) -> None:
    make(tmp_path / "one", models=("digits", "letters"))
    page = traces_of(render(read_all(tmp_path / "one")))
    assert list(page["series"]) == ["mean", "model digits", "model letters", "worst"]
    # the worst is broad and lies under the others
    assert [trace["meta"]["series"] for trace in page["charts"]["accuracy"]["traces"]] == [
        "worst",
        "mean",
        "model digits",
        "model letters",
    ]
    worst, mean, digits, letters = (
        np.array(trace["y"]) for trace in page["charts"]["accuracy"]["traces"]
    )
    np.testing.assert_allclose(mean, (digits + letters) / 2, rtol=1e-4)
    np.testing.assert_allclose(worst, np.minimum(digits, letters), rtol=1e-4)
    (spread,) = page["charts"]["model spread"]["traces"]
    np.testing.assert_allclose(spread["y"], np.std([digits, letters], axis=0), rtol=1e-3)
    assert "worst" not in page["charts"]
    assert [trace["meta"]["series"] for trace in page["charts"]["sampled"]["traces"]] == [
        "model digits",
        "model letters",
    ]
    places = [
        [text.split(" (")[0] for text in trace["text"]]
        for trace in page["charts"]["sampled"]["traces"]
    ]
    assert places[0] == places[1], "a place is one client"
    compare(tmp_path / "several", seeds=1, models=("digits", "letters"))
    page = traces_of(render(read_all(tmp_path / "several")))
    assert list(page["series"]) == ["run 0", "run 1", "run 2"]
    assert {
        "accuracy",
        "accuracy digits",
        "loss letters",
        "spread digits",
        "sampled letters",
    } <= set(page["charts"])
    assert not any(key.startswith("measure") for key in page["charts"])
    for number, trace in enumerate(page["charts"]["worst"]["traces"]):
        each = [
            page["charts"][f"accuracy {model}"]["traces"][number]["y"]
            for model in ("digits", "letters")
        ]
        np.testing.assert_allclose(trace["y"], np.min(each, axis=0), rtol=1e-4)
    assert len(page["charts"]["model spread"]["traces"]) == 3


def test_a_single_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    compare(tmp_path / "all", target=0.6)
    for folder in (tmp_path / "all", tmp_path / "all/kvib-seed0"):
        html = render(read_all(folder))
        assert {"worst", "model spread"}.isdisjoint(traces_of(html)["charts"])
        assert not any(
            f"<h2>{heading}</h2>" in html for heading in ("Across models", "Models", "Costs")
        )
        assert not re.search("orst model|pread of models|Server memory</dt>", html)


def test_other_numbers_of_a_round_get_a_chart(tmp_path: Path) -> None:
    page = traces_of(
        render(read_all(make(tmp_path / "a", more={"regret": 3.5, "fine": True, "words": "x"})))
    )
    assert page["charts"]["measure regret"]["traces"][0]["y"] == [3.5] * 6
    assert [key for key in page["charts"] if key.startswith("measure")] == ["measure regret"]


def test_few_clients_are_shown_one_by_one_largest_first(tmp_path: Path) -> None:
    groups = read_all(make(tmp_path / "a", rounds=40))
    (chart,) = clients.sampling("", series_of(groups))
    run = groups[0].runs[0]
    order = np.argsort(-np.array(run.data["digits"]["sizes"]), kind="stable")
    assert chart.traces[0]["y"] == run.sampled["digits"][order].tolist()
    assert chart.traces[0]["text"][0].startswith(f"client {order[0]} (")
    (data,) = clients.holdings(groups)
    assert np.sum([trace["y"] for trace in data.traces], axis=0).tolist() == sorted(
        run.data["digits"]["sizes"], reverse=True
    )


def test_seeds_with_data_of_their_own_are_matched_by_place(tmp_path: Path) -> None:
    make(tmp_path / "a-seed0", seed=0)
    make(tmp_path / "a-seed1", seed=1)
    groups = read_all(tmp_path)
    (chart,) = clients.sampling("", series_of(groups))
    assert chart.traces[0]["text"][0] == "number 1 by size"
    assert sum(chart.traces[0]["y"]) == pytest.approx(18)
    assert "dealt anew" in clients.holdings(groups)[0].note


@pytest.mark.parametrize("rounds", [1, 40, 400])
def test_many_clients_become_a_histogram(tmp_path: Path, rounds: int) -> None:
    groups = read_all(make(tmp_path / "a", rounds=rounds, people=500, cohort=100, by_client=False))
    counts, sizes = clients.sampling("", series_of(groups))
    trace = counts.traces[0]
    assert sum(trace["y"]) == pytest.approx(1)
    assert trace["y"][0] == trace["y"][-1] == 0
    assert len(trace["y"]) <= clients.BINS + 2
    tally = groups[0].runs[0].sampled["digits"]
    assert np.dot(trace["x"], trace["y"]) == pytest.approx(tally.mean(), abs=np.diff(trace["x"])[0])
    assert np.mean(sizes.traces[0]["y"]) == pytest.approx(rounds * 100 / 500, rel=1e-4)
    (data,) = clients.holdings(groups)
    bars, heat = data.traces
    assert len(bars["x"]) == len(heat["z"][0]) == clients.COLUMNS
    np.testing.assert_allclose(np.sum(heat["z"], axis=0), 1, rtol=1e-4)


def test_clients_without_data_are_not_among_the_small(tmp_path: Path) -> None:
    path = make(tmp_path / "a", people=500, cohort=500, rounds=7, by_client=False)
    data = json.loads((path / "data.json").read_text())
    data["digits"]["sizes"][::3] = [0] * len(data["digits"]["sizes"][::3])
    (path / "data.json").write_text(json.dumps(data))
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line["cohort"]["digits"] = [client for client in range(500) if client % 3]
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, sizes = clients.sampling("", series_of(read_all(path)))
    assert sizes.traces[0]["y"] == [7] * clients.PARTS


def test_a_score_that_is_no_share_has_an_axis_of_its_own(tmp_path: Path) -> None:
    share = curves.score("accuracy", "", series_of(read_all(make(tmp_path / "a"))))
    assert (share.layout["yaxis"], "classified correctly" in share.note) == (curves.SHARE, True)
    other = curves.score("accuracy", "", series_of(read_all(make(tmp_path / "b", lift=-2.0))))
    assert (other.layout["yaxis"], other.note) == (
        {"tickformat": "~g"},
        "Score on the test examples. Higher is better.",
    )
    aimed = curves.score(
        "accuracy", "", series_of(read_all(make(tmp_path / "c", lift=-2.0, target=0.6)))
    )
    assert "Score on the test examples" in aimed.note
    assert "The dotted line is the target" in aimed.note


def test_scores_that_are_not_alike_are_not_put_together(tmp_path: Path) -> None:
    unlike: dict[str, Any] = {"models": ("digits", "line"), "errors": "line", "by_client": False}
    page = render(groups := read_all(make(tmp_path / "one", **unlike)))
    charts = traces_of(page)["charts"]
    assert [key for key in charts if "accuracy" in key or "loss" in key] == [
        "accuracy digits",
        "loss digits",
        "accuracy line",
        "loss line",
    ]
    assert [len(charts[f"accuracy {model}"]["traces"]) for model in ("digits", "line")] == [1, 1]
    assert "line: test score" in page
    assert (
        charts["accuracy digits"]["layout"]["yaxis"],
        charts["accuracy line"]["layout"]["yaxis"],
    ) == (
        curves.SHARE,
        {"tickformat": "~g"},
    )
    assert [
        "%" in charts[f"accuracy {model}"]["traces"][0]["meta"]["value"][4:]
        for model in ("digits", "line")
    ] == [True, False]
    assert list(traces_of(page)["series"].values()) == [
        {"colour": 0, "dash": "solid"},
        {"colour": 1, "dash": "solid"},
    ]
    assert {"worst", "model spread", "accuracy", "loss"}.isdisjoint(charts)
    digits = groups[0].runs[0].last("accuracy", "digits") or 0
    assert [tile[:2] for tile in tables.tiles(groups)[:3]] == [
        ("Final accuracy of digits", numbers.percent(digits)),
        ("Final score of line", "-33.42"),
        ("Virtual time", "3" + numbers.SPACE + "min"),
    ]
    groups = compare(tmp_path / "several", samplers=("uniform", "vrb"), seeds=2, **unlike)
    charts = traces_of(render(groups))["charts"]
    assert [key for key in charts if "accuracy" in key or "loss" in key] == [
        "accuracy digits",
        "loss digits",
        "accuracy line",
        "loss line",
    ]
    head, first, _ = cells(tables.models(groups, ["digits", "line"]))
    assert head == ["Run", "digits", "line"]
    assert first[2] == "-33.42"
    assert [name for name, *_ in tables.tiles(groups)[:3]] == [
        "Highest accuracy of digits",
        "Highest score of line",
        "Least virtual time",
    ]
    assert cells(tables.costs(groups))[0][:2] == ["Run", "Sent up"]
    assert cells(tables.runs(groups))[0][:3] == ["Run", "Seeds", "Rounds"]
    words = re.sub(
        r"±.*?%|-?[\d.]+\s%", "", Outline(render(groups)).text
    )  # what is a share stays one
    assert not re.search("Worst model|Spread of models|Final accuracy|The worst model", words)


def test_a_score_that_is_no_share_has_no_percent_sign(tmp_path: Path) -> None:
    groups = compare(
        tmp_path, samplers=("uniform", "vrb"), seeds=2, lift=-20.0, models=("a", "b"), target=-8.0
    )
    charts = traces_of(render(groups))["charts"]
    assert [
        charts[key]["layout"]["yaxis"]["tickformat"]
        for key in ("accuracy", "worst", "model spread", "spread a")
    ] == ["~g"] * 4
    values = [
        trace["meta"]["value"]
        for key in ("accuracy", "worst", "spread a")
        for trace in charts[key]["traces"]
        if "value" in trace["meta"]
    ]
    assert set(values) == {"%{y:.4~g}"}
    assert "the target, -8." in curves.score("accuracy", "", series_of(groups)).note
    for text in (
        tables.models(groups, ["a", "b"]),
        tables.runs(groups),
        tables.to_target(groups, ["a"]),
        f"{tables.tiles(groups)}",
    ):
        assert "%" not in text
    assert cells(tables.runs(groups))[0][2:4] == ["Final score", "Best score"]
    assert f"{tables.tiles(groups[:1])}".startswith("[('Final score', '-9.")


def test_a_score_that_is_not_finite_is_a_test_all_the_same(tmp_path: Path) -> None:
    path = make(tmp_path / "a", target=0.1) / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[:3]:
        line["accuracy"] = line["models"]["digits"]["accuracy"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(tmp_path / "a")
    assert (len(run.tested), run.rounds_to_target, run.best) == (
        6,
        4,
        max(line["accuracy"] for line in lines[3:]),
    )
    assert curves.score("accuracy", "", series_of(group([run]))).traces[0]["y"][:3] == [None] * 3


def test_rare_classes_share_a_row(tmp_path: Path) -> None:
    (data,) = clients.holdings(read_all(make(tmp_path / "a", people=5, classes=130)))
    assert len(data.traces[1]["z"]) == clients.ROWS + 1
    assert data.traces[1]["y"][-1] == "others"
    np.testing.assert_allclose(np.sum(data.traces[1]["z"], axis=0), 1, rtol=1e-4)


def test_data_that_differ_are_shown_apart(tmp_path: Path) -> None:
    make(tmp_path / "a", partition="iid")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    text = (tmp_path / "b/config.toml").read_text()
    (tmp_path / "b/config.toml").write_text(text.replace("iid", "shards"))
    assert [chart.title for chart in clients.holdings(read_all(tmp_path))] == [
        "Data on each client"
    ]
    data = json.loads((tmp_path / "b/data.json").read_text())
    data["digits"]["sizes"][0] += 1
    (tmp_path / "b/data.json").write_text(json.dumps(data))
    titles = [chart.title for chart in clients.holdings(read_all(tmp_path))]
    assert titles == [
        "Data on each client (partition=iid)",
        "Data on each client (partition=shards)",
    ]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one round": {"rounds": 1},
    "no round": {"played": 0, "finished": False},
    "not tested yet": {"rounds": 50, "played": 3, "evaluate": 10, "finished": False},
    "no clients' tests": {"by_client": False},
    "no classes": {"classes": None},
    "many clients": {"people": 400},
    "many classes": {"classes": 30},
    "models": {"models": ("digits", "letters")},
    "failures": {"failing": "it hung"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("several", [False, True])
def test_any_page_has_charts_that_plotly_takes(tmp_path: Path, case: str, several: bool) -> None:
    if several:
        groups = compare(tmp_path / "all", seeds=2, **CASES[case])
    else:
        groups = read_all(make(tmp_path / "a", **CASES[case]))
    html = render(groups)
    page = traces_of(html)
    for key, chart in page["charts"].items():
        # plotly checks every name and value
        go.Figure({"data": chart["traces"], "layout": chart["layout"]})
        assert f'data-chart="{key}"' in html
        for trace in chart["traces"]:
            along = trace["meta"].get("along")
            assert (along is not None) == chart["progress"]
            assert along is None or len(page["x"][along]["round"]) == len(trace["y"])
    assert ("No round has been tested yet." in html) == (case in ("no round", "not tested yet"))
    assert ("<h2>Failures</h2>" in html) == (case == "failures")
    assert ("<h2>Runs</h2>" in html) == several


# tables


def cells(table: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    return [
        [cell.replace(numbers.SPACE, " ") for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def test_the_table_of_runs(tmp_path: Path) -> None:
    groups = compare(tmp_path, target=0.6, rounds=20)
    head, *rows = cells(tables.runs(groups))
    kvib = dict(zip(head, rows[0], strict=True))
    assert kvib["Run"] == "kvib"
    assert kvib["Seeds"] == "3"
    finals = [run.accuracy for run in groups[0].runs if run.accuracy is not None]
    half = 4.302653 * np.std(finals, ddof=1) / np.sqrt(3)
    assert kvib["Final accuracy"] == f"{100 * np.mean(finals):.1f} ± {100 * half:.1f} %"
    assert kvib["Sent up"] == "60.0 MB"
    assert kvib["Virtual time"] == "10.3 ± 0.8 min"
    assert kvib["Client computing"] == "20 min"
    assert kvib["Server memory"] == "4.0 MB"
    assert kvib["Failures"] == "0"


def test_the_tables_of_models(tmp_path: Path) -> None:
    make(tmp_path / "a", models=("digits", "letters"), rounds=30, target=0.75)
    make(tmp_path / "b", models=("digits", "words"), rounds=30, target=0.75, lift=0.05, cohort=6)
    groups = read_all(tmp_path)
    names = ["digits", "letters", "words"]
    head, first, second = cells(tables.models(groups, names))
    assert head == ["Run", "Mean", "digits", "letters", "words", "Worst model", "Spread of models"]
    final = groups[0].runs[0].tested[-1]["models"]
    digits, letters = (final[model]["accuracy"] for model in ("digits", "letters"))
    percents = [
        f"{100 * value:.1f} %"
        for value in ((digits + letters) / 2, digits, letters, letters, (digits - letters) / 2)
    ]
    assert first == ["task.1.name=letters", *percents[:3], "–", *percents[3:]]
    assert second[3] == "–"
    head, first, second = cells(tables.to_target(groups, names))
    assert head == ["Rounds to 75.0 %", "All at once", *names]
    assert "Rounds to target, all at once" in cells(tables.runs(groups))[0]
    assert "All at once is the first round in which all models are at the target." in render(groups)
    when = [
        line["round"]
        for line in groups[0].runs[0].tested
        if line["models"]["digits"]["accuracy"] >= 0.75
    ]
    assert first == ["task.1.name=letters", "not reached", f"{when[0]}", "not reached", "–"]
    assert second[3] == "–"
    head, first, second = cells(tables.costs(groups))
    assert head == [
        "Run",
        "Final accuracy",
        "Worst model",
        "Sent up",
        "Sent down",
        "Client computing",
        "Server memory",
    ]
    assert first[3:] == ["90.0 MB (1.0×)", "90.0 MB (1.0×)", "30 min (1.0×)", "4.0 MB (1.0×)"]
    assert second[3:] == ["180 MB (2.0×)", "180 MB (2.0×)", "30 min (1.0×)", "4.0 MB (1.0×)"]
    html = render(groups)
    assert (
        html.count(">Sent down</th>") == html.count(">Server memory</th>") == 1
    )  # not again in the table of runs
    best = {label: (value, who) for label, value, who in tables.tiles(groups)}
    assert best["Best worst model"] == (
        second[2].replace(" ", numbers.SPACE),
        "task.1.name=words",
    )
    assert best["Least spread of models"][1] == "all settings"
    assert best["Least client computing"][1] == "task.1.name=words, of the settings at the target"
    own = {label: value.replace(numbers.SPACE, " ") for label, value, _ in tables.tiles(groups[:1])}
    assert [own[label] for label in ("Worst model", "Spread of models")] == percents[3:]
    assert (own["Client computing"], own["Server memory"]) == ("30 min", "4.0 MB")
    assert own[f"Rounds to 75.0{numbers.SPACE}%, all at once"] == "not reached"
    assert (
        tables.to_target(read_all(make(tmp_path / "c", models=("digits", "letters"))), names) == ""
    )


def test_seeds_that_miss_the_target_are_told(tmp_path: Path) -> None:
    make(tmp_path / "a-seed0", seed=0, rounds=20, target=0.7, lift=0.4)
    make(tmp_path / "a-seed1", seed=1, rounds=20, target=0.7, played=1)
    make(tmp_path / "b-seed0", seed=0, rounds=20, target=0.7, played=1, sampler={"name": "vrb"})
    groups = read_all(tmp_path)
    table = cells(tables.runs(groups))
    column = table[0].index("Rounds to target")
    assert re.fullmatch(r"\d+ \(1 of 2 seeds\)", table[1][column])
    assert table[2][column] == "not reached"
    # a mean over the seeds that made it would flatter: no setting is best
    assert "Fewest rounds to target" not in [label for label, _, _ in tables.tiles(groups)]


def test_tiles_name_the_best_setting(tmp_path: Path) -> None:
    tiles = {
        label: (value, who) for label, value, who in tables.tiles(compare(tmp_path, rounds=20))
    }
    assert tiles["Highest final accuracy"][1] == "vrb"
    assert tiles["Least data sent"] == ("120" + numbers.SPACE + "MB", "all settings")


def test_settings_tie_by_their_values_and_not_by_how_these_are_written(tmp_path: Path) -> None:
    for name, budget in (("a", 3), ("b", 3), ("c", 3)):
        make(tmp_path / name, sampler={"name": name, "budget": budget})
    path = tmp_path / "b/rounds.jsonl"
    path.write_text(path.read_text().replace('"seconds": 180.0', '"seconds": 180.001'))
    tiles = {label: (value, who) for label, value, who in tables.tiles(read_all(tmp_path))}
    assert tiles["Least virtual time"] == (f"3{numbers.SPACE}min", "2 settings")
    assert tiles["Least data sent"][1] == "all settings"


def test_what_missed_the_target_is_not_the_cheapest(tmp_path: Path) -> None:
    for seed in range(2):
        make(
            tmp_path / f"good-seed{seed}",
            seed=seed,
            rounds=20,
            lift=0.4,
            target=0.7,
            cohort=4,
            sampler={"name": "good"},
        )
        make(
            tmp_path / f"poor-seed{seed}",
            seed=seed,
            rounds=20,
            lift=0.4 - seed,
            target=0.7,
            played=15,
            sampler={"name": "poor"},
        )
    tiles = {label: (value, who) for label, value, who in tables.tiles(read_all(tmp_path))}
    assert [tiles[f"Least {what}"][1] for what in ("virtual time", "data sent")] == [
        "good, of the settings at the target"
    ] * 2
    assert tiles["Fewest rounds to target"][1] == "good"
    shutil.rmtree(tmp_path / "poor-seed1")
    tiles = {label: (value, who) for label, value, who in tables.tiles(read_all(tmp_path))}
    assert tiles["Least virtual time"][1] == "poor"


def test_failures_are_counted_by_reason(tmp_path: Path) -> None:
    make(tmp_path / "a", failing="it hung", sampler={"name": "a"})
    make(tmp_path / "b", failing="<nan>", sampler={"name": "b"})
    assert cells(tables.failures(read_all(tmp_path))) == [
        ["Run", "Reason", "Times", "Of all trainings"],
        ["a", "it hung", "3", "16.7 %"],
        ["b", "&lt;nan&gt;", "3", "16.7 %"],
    ]
    assert tables.failures(read_all(make(tmp_path / "c"))) == ""


# the page


class Outline(HTMLParser):
    """Collects the page's tags and their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.text += data


def test_the_page_names_no_host(tmp_path: Path) -> None:
    html = write([make(tmp_path / "a")], tmp_path / "report.html").read_text()
    assert {name for name, _ in Outline(html).attributes}.isdisjoint(
        {"src", "href", "srcset", "action", "data"}
    )
    assert set(re.findall(r"https?://[^/\"'`\s]*", html)) == {
        "http://www.w3.org"
    }  # names of SVG and HTML, which nobody fetches
    assert "@import" not in html
    assert "url(http" not in html
    assert html.count("plotly.js v") == plotly().count("plotly.js v") == 1


EVIL = "</script><img src=x onerror=alert(1)>&amp;\"'"


def test_text_of_others_stays_text(tmp_path: Path) -> None:
    for name in ("x", "y"):
        evil = EVIL + name
        make(
            tmp_path / name,
            models=(EVIL, "b"),
            failing=evil,
            summary=EVIL,
            sampler={"name": evil, evil: 1},
            more={EVIL: 1.5},
        )
    for html in (render(read_all(tmp_path)), render(read_all(tmp_path / "x"))):
        outline = Outline(html)
        assert "img" not in outline.tags
        assert EVIL in outline.text
        assert "onerror" not in [name for name, _ in outline.attributes]
        assert outline.tags.count("script") == 3
        # plotly reads tags in names and titles
        for chart in traces_of(html)["charts"].values():
            assert not any("<img" in str(trace.get("name")) for trace in chart["traces"])


def test_the_configuration_is_folded(tmp_path: Path) -> None:
    html = render(compare(tmp_path, seeds=2))
    assert html.count("<details>") == 4
    assert "<details open" not in html
    assert "config.toml of kvib (seed 0; the same with 1)" in html
    assert "gamma = 0.3" in html


# the page in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = [
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-sync",
    ]
    flags += ["disable-component-update", "disable-dev-shm-usage", "window-size=1280,900"]
    flags.append(f"user-data-dir={tmp_path_factory.mktemp('chromium')}")
    for flag in flags:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    yield window
    window.quit()


def settle(browser: Any) -> None:
    """Wait until every chart is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, 0.05).until(
        lambda _: browser.execute_script("return document.documentElement.dataset.drawn") == "yes"
    )


def opened(browser: Any, path: Path) -> Any:
    browser.get(path.as_uri())
    settle(browser)
    assert browser.get_log("browser") == []
    return browser


PLOTS = "const plots = [...document.querySelectorAll('[data-chart]')];"


def seen(browser: Any, what: str) -> dict[str, Any]:
    """For each chart, an expression over its `div` (data, layout as plotly has them)."""
    settle(browser)
    return dict(
        browser.execute_script(
            f"{PLOTS} return Object.fromEntries(plots.map((div) => [div.dataset.chart, {what}]))"
        )
    )


def test_the_page_opens_from_a_file(tmp_path: Path, browser: Any) -> None:
    make(tmp_path / "a", models=("digits", EVIL), rounds=40, failing="it hung")
    opened(browser, write([tmp_path / "a"], tmp_path / "report.html"))
    drawn = seen(browser, "div.querySelectorAll('.trace, .bars .point, .hm').length")
    assert len(drawn) == 7
    assert all(drawn.values())
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("case", CASES)
def test_any_page_opens(tmp_path: Path, browser: Any, case: str) -> None:
    make(tmp_path / "a", **CASES[case])
    opened(browser, write([tmp_path / "a"], tmp_path / "report.html"))


def test_one_control_switches_the_x_axis_of_all_charts_over_rounds(
    tmp_path: Path, browser: Any
) -> None:
    compare(tmp_path / "all")
    opened(browser, write([tmp_path / "all"], tmp_path / "report.html"))
    over = ["accuracy", "loss", "spread"]
    before = seen(
        browser, "[div.layout.xaxis.title.text, div.data.at(-1).x, div._fullLayout.xaxis.range]"
    )
    assert {before[key][0] for key in over} == {"round"}
    for value, text in (
        ("seconds", "virtual time (min)"),
        ("bytes", "data sent, up and down (MB)"),
    ):
        browser.execute_script(f"document.querySelector('input[value={value}]').click()")
        after = seen(
            browser, "[div.layout.xaxis.title.text, div.data.at(-1).x, div._fullLayout.xaxis.range]"
        )
        for key in over:
            assert after[key][0] == text
            assert after[key][1] != before[key][1]
            assert after[key][2] != before[key][2]
        assert after["sampled"] == before["sampled"]
    assert seen(browser, "div._fullLayout.yaxis.type")["loss"] == "linear"
    browser.execute_script("document.getElementById('log').click()")
    assert [seen(browser, "div._fullLayout.yaxis.type")[key] for key in over] == [
        "linear",
        "log",
        "linear",
    ]
    assert browser.get_log("browser") == []


def test_a_run_is_hidden_on_every_chart(tmp_path: Path, browser: Any) -> None:
    compare(tmp_path / "all")
    opened(browser, write([tmp_path / "all"], tmp_path / "report.html"))
    visible = "div._fullData.filter((t) => t.visible === true && t.meta.series)"
    shown = f"[...new Set({visible}.map((t) => t.meta.series))].sort()"
    all_three = {
        key: ["run 0", "run 1", "run 2"] for key in ("accuracy", "loss", "spread", "sampled")
    }
    chips = browser.find_elements("css selector", ".chip")
    assert [chip.text for chip in chips] == ["kvib", "uniform", "vrb"]
    everything = browser.find_element("id", "all")

    def by_chart() -> dict[str, Any]:
        return {key: value for key, value in seen(browser, shown).items() if key in all_three}

    assert by_chart() == all_three
    chips[1].click()
    assert not any(seen(browser, "div._fullData.some((t) => t.opacity < 1)").values())
    assert by_chart() == {key: ["run 0", "run 2"] for key in all_three}
    assert chips[1].get_attribute("aria-pressed") == "false"
    everything.click()
    assert by_chart() == all_three
    assert not everything.is_displayed()
    from selenium.webdriver import ActionChains

    ActionChains(browser).double_click(chips[2]).perform()
    assert by_chart() == {key: ["run 2"] for key in all_three}
    assert browser.get_log("browser") == []


def test_a_run_under_the_pointer_stands_out(tmp_path: Path, browser: Any) -> None:
    compare(tmp_path / "all")
    opened(browser, write([tmp_path / "all"], tmp_path / "report.html"))
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    def pale() -> dict[str, Any]:
        some = "div._fullData.filter((t) => t.opacity < 1)"
        return seen(browser, f"[...new Set({some}.map((t) => t.meta.series))].sort()")

    ranges = seen(browser, "div._fullLayout.xaxis.range")
    ActionChains(browser).move_to_element(
        browser.find_elements("css selector", ".chip")[0]
    ).perform()
    WebDriverWait(browser, 20).until(
        lambda _: pale()["accuracy"] == pale()["loss"] == ["run 1", "run 2"]
    )
    assert seen(browser, "div._fullLayout.xaxis.range") == ranges
    ActionChains(browser).move_to_element(browser.find_element("css selector", "h1")).perform()
    WebDriverWait(browser, 20).until(lambda _: not any(pale().values()))


def test_of_many_bands_only_the_one_under_the_pointer_is_drawn(
    tmp_path: Path, browser: Any
) -> None:
    compare(tmp_path / "all", samplers=tuple("abcdef"), seeds=2, people=40)
    page = write([tmp_path / "all"], tmp_path / "report.html")
    assert page.read_text().count("Bands are left out while more than 5 lines are shown") == 2
    opened(browser, page)
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    def filled() -> dict[str, Any]:
        """The series whose areas can be seen, for each chart that has areas."""
        areas = "div._fullData.filter((t) => t.visible === true && t.fillcolor)"
        inside = f"{areas}.filter((t) => t.fillcolor.replaceAll(' ', '').slice(-3) !== ',0)')"
        areas = seen(browser, f"[{areas}.length, {inside}.map((t) => t.meta.series)]")
        return {key: series for key, (some, series) in areas.items() if some}

    def pointed(at: Any, shown: list[str]) -> None:
        ActionChains(browser).move_to_element(at).perform()
        WebDriverWait(browser, 20).until(
            lambda _: set(map(tuple, filled().values())) == {tuple(shown)}
        )

    assert filled() == {"accuracy": [], "loss": [], "spread": [], "sampled": []}
    chips = browser.find_elements("css selector", ".chip")
    ranges = seen(browser, "div._fullLayout.yaxis.range")
    pointed(chips[2], ["run 2"])
    assert seen(browser, "div._fullLayout.yaxis.range") == ranges
    pointed(browser.find_element("css selector", "h1"), [])
    chips[0].click()
    pointed(browser.find_element("css selector", "h1"), [f"run {number}" for number in range(1, 6)])
    compare(tmp_path / "few", samplers=tuple("abcde"), seeds=2)
    assert "Bands are left out" not in write([tmp_path / "few"], page).read_text()


def test_a_phone_and_the_dark(tmp_path: Path, browser: Any) -> None:
    compare(tmp_path / "all", failing="it hung")
    path = write([tmp_path / "all"], tmp_path / "report.html")
    light = seen(opened(browser, path), "div._fullLayout.font.color")["accuracy"]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 400, "height": 800, "deviceScaleFactor": 2, "mobile": True},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
    )
    try:
        assert seen(opened(browser, path), "div._fullLayout.font.color")["accuracy"] != light
        assert browser.execute_script("return document.documentElement.scrollWidth") == 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
