"""Losses and scores by name: what they are, which direction is better, and what pages say of it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rota
from rota import recipe, scores
from rota.cli import summary
from rota.cli.run import train
from rota.report import write
from rota.report.history import read
from rota.running.summary import summarise


def line(shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[0], 1)


def slopes(own: bool = False) -> rota.Federation:
    generator = np.random.default_rng(3)
    slope = generator.normal(size=4)

    def some(n: int) -> Any:
        x = generator.normal(size=(n, 4))
        return x, x @ slope + generator.normal(size=n)

    test: Any = [some(9), some(12), some(4)] if own else some(50)
    return rota.from_clients([some(20), some(30), some(10)], test=test, name="slopes")


def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.flatten() - targets).abs()


def test_scores_of_the_whole_set_are_those_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(1)
    guess, truth = torch.randn(2, 40, generator=generator)
    labels = (truth > 0.3).long()
    explained = 1 - float(((guess - truth) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
    found = scores.overall(scores.r2, scores.r2(guess[:, None], truth).numpy())
    assert found == pytest.approx(explained)
    rounded = guess.round(decimals=0)  # with ties
    pairs = [(a, b) for a in rounded[labels == 1] for b in rounded[labels == 0]]
    area = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])
    two = torch.stack([torch.zeros(40), rounded], dim=1)
    for outputs in (rounded, rounded[:, None], two):
        found = scores.overall(scores.auc, scores.auc(outputs, labels).numpy())
        assert found == pytest.approx(area)
    hits = (guess > 0).long()
    each = []
    for c in (0, 1):
        right = int(((hits == c) & (labels == c)).sum())
        each.append(2 * right / int((hits == c).sum() + (labels == c).sum()))
    found = scores.overall(scores.f1, scores.f1(guess, labels).numpy())
    assert found == pytest.approx(np.mean(each))


def test_scores_without_an_answer_are_not_numbers() -> None:
    ones = torch.ones(5).long()
    lines = scores.auc(torch.randn(5), ones).numpy()
    assert math.isnan(scores.overall(scores.auc, lines))
    lines = scores.r2(torch.randn(5), torch.ones(5)).numpy()
    assert math.isnan(scores.overall(scores.r2, lines))
    assert math.isnan(scores.overall(scores.mse, np.empty(0)))


def test_several_classes_have_the_mean_area() -> None:
    labels = torch.arange(60) % 3
    right = nn.functional.one_hot(labels, 3) * 5.0
    assert scores.overall(scores.auc, scores.auc(right, labels).numpy()) == 1
    assert scores.overall(scores.auc, scores.auc(-right, labels).numpy()) == 0


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("score", ["mse", "mae", "r2"])
def test_a_regression_names_its_loss_and_score(engine: str, score: str) -> None:
    """One output and a list of targets: they are not broadcast to a square."""
    data = slopes()
    task = rota.Task(line, data, lr=0.05, loss="mse", score=score)  # type: ignore[arg-type]
    run = rota.run([task], rota.sampling.Full(), rounds=20, engine=engine, seed=0)
    outputs = run.models["slopes"](data.test.x).detach().flatten()
    off = outputs - data.test.y
    real = {"mse": off.square().mean(), "mae": off.abs().mean()}
    real["r2"] = 1 - off.square().sum() / (data.test.y - data.test.y.mean()).square().sum()
    assert run.summary["accuracy"] == pytest.approx(float(real[score]), rel=1e-4)
    curve = run.rounds["accuracy"]
    best = max(curve) if score == "r2" else min(curve)
    assert run.summary["models"]["slopes"]["best_accuracy"] == best
    assert run.summary["models"]["slopes"]["score"] == score


@pytest.mark.parametrize("score", ["mse", "r2"])
def test_clients_with_test_sets_have_scores_of_their_own(score: Any) -> None:
    data = slopes(own=True)
    task = rota.Task(line, data, lr=0.05, loss="mse", score=score)
    run = rota.run([task], rota.sampling.Full(), rounds=2, seed=0)
    each = []
    for client in range(3):
        x, y = data.test.of(client)
        off = (run.models["slopes"](x).detach().flatten() - y).square()
        whole = 1 - off.sum() / (y - y.mean()).square().sum()
        each.append(float(off.mean() if score == "mse" else whole))
    last = run.records[-1]
    assert last["own_worst"] == pytest.approx(max(each) if score == "mse" else min(each), rel=1e-4)
    tenth = np.quantile(each, 0.9 if score == "mse" else 0.1)
    assert last["own_p10"] == pytest.approx(tenth, rel=1e-4)


def test_a_target_of_an_error_is_reached_from_above() -> None:
    task = rota.Task(line, slopes(), lr=0.05, loss="mse", score="mse")  # type: ignore[arg-type]
    run = rota.run([task], rota.sampling.Full(), rounds=50, target=1.6, seed=0)
    curve = run.rounds["accuracy"]
    assert 1 < len(curve) < 50
    assert curve[-1] <= 1.6 < min(curve[:-1])
    assert run.summary["models"]["slopes"]["rounds_to_target"] == len(curve)


def test_the_worst_of_several_errors_is_the_largest() -> None:
    data = slopes()
    tasks = [
        rota.Task(line, data, lr=lr, loss="mse", score="mae", name=name)  # type: ignore[arg-type]
        for lr, name in ((0.05, "a"), (0.001, "b"))
    ]
    run = rota.run(tasks, rota.sampling.Full(), rounds=3)
    last = run.records[-1]
    assert last["worst_accuracy"] == max(each["accuracy"] for each in last["models"].values())


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(rota.BadInput, match=r"unknown score 'msee': did you mean 'mse'\?"):
        rota.Task(line, slopes(), score="msee")  # type: ignore[arg-type]
    config = {"task": {"data": "digits", "model": "logistic"}}
    for key, value in (("loss", "square"), ("score", "R2"), ("score", 3)):
        with pytest.raises(rota.BadInput, match=rf"'task\.{key}'"):
            recipe.resolve(recipe.assign(config, f"task.{key}", value))


MINE = """
import numpy as np
import rota
from torch import nn


def houses():
    generator = np.random.default_rng(0)
    slope = generator.normal(size=3)
    made = [generator.normal(size=(30, 3)) for _ in range(4)]
    return rota.from_clients([(x, x @ slope) for x in made[1:]], test=(made[0], made[0] @ slope))


def line(shape):
    return nn.Linear(shape[0], 1)


def away(outputs, targets):
    return (outputs.flatten() - targets).abs()
"""


@pytest.fixture
def houses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "houses.py").write_text(MINE)
    text = """
    rounds = 3
    sampler = "full"
    [[task]]
    data = "houses:houses"
    model = "houses:line"
    lr = 0.02
    loss = "mse"
    score = "houses:away"
    better = "lower"
    """
    (tmp_path / "houses.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "houses", raising=False)  # of another test
    return recipe.read("houses.toml")


def test_a_recipe_names_a_loss_and_a_score_of_its_own(houses: dict[str, Any]) -> None:
    resolved = recipe.resolve(houses)
    assert resolved["task"][0]["score"] == "houses:away"
    experiment = recipe.build(resolved)
    assert experiment.tasks[0].better == "lower"
    run = rota.run(experiment.tasks, rota.sampling.Full(), rounds=3)
    assert run.summary["models"][experiment.names[0]]["best_accuracy"] == min(
        run.rounds["accuracy"]
    )


def test_a_score_from_elsewhere_is_not_run(tmp_path: Path) -> None:
    """A score is code, as a model is."""
    for key in ("loss", "score"):
        text = f'[[task]]\ndata = "digits"\nmodel = "logistic"\n{key} = "os:system"\n'
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(rota.BadInput, match="--allow os"):
            recipe.read(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize("score", ["mae", "houses:away"])
def test_a_report_calls_an_error_an_error_and_crowns_the_lowest(
    houses: dict[str, Any], score: str, tmp_path: Path
) -> None:
    config = recipe.assign(houses, "task.score", score)
    results = []
    for lr in (0.02, 0.0001):
        out = tmp_path / f"lr{lr}-seed0"
        settled = recipe.assign(config, "task.lr", lr)
        done = train(settled, "a", out, {"device": "cpu"}, False, "")
        results.append({"run": out.name, **done})
    folders = [tmp_path / result["run"] for result in results]
    assert results[0]["accuracy"] < results[1]["accuracy"]
    word = "mean absolute error" if score == "mae" else "away"
    for line in (*summary.sentences(results[0]), *summary.table(results)):
        assert "accuracy" not in line
        assert "%" not in line
    assert f"{word} {results[0]['accuracy']:.4g}" in summary.table(results)[0]
    page = write(folders, tmp_path / "both.html").read_text(encoding="utf-8")
    start = page.index('<dl class="tiles">')
    tiles = page[start : page.index("</dl>", start)]
    assert f"Lowest final {word}" in tiles
    tile = tiles[tiles.index(f"Lowest final {word}") :].split("</div>")[0]
    assert "task.lr=0.02" in tile
    start = page.index("<header>")
    words = re.sub(r"<[^>]*>", " ", page[start : page.index("<script", start)])
    assert "ccuracy" not in words
    assert "Lower is better" in page


def test_old_folders_and_python_runs_say_what_their_score_is(tmp_path: Path) -> None:
    task = rota.Task(line, slopes(), lr=0.02, loss="mse", score=distance, better="lower")  # type: ignore[arg-type]
    rota.run([task], rota.sampling.Full(), rounds=2, out=tmp_path / "a")
    assert read(tmp_path / "a").score("slopes") == ("distance", "lower")
    assert read(tmp_path / "a").best == min(read_scores(tmp_path / "a"))
    plain = rota.Task(rota.models.logistic, rota.data.digits())
    run = rota.run([plain], rounds=1)
    assert summarise(run.experiment, run.records, 0.0)["models"]["digits"]["score"] == "accuracy"


def read_scores(folder: Path) -> list[float]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [json.loads(each)["accuracy"] for each in lines]
