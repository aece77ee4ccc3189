"""Arrays, tables and LEAF's files as data; names for objects, comparisons, own measures."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rota
from rota import recipe


def pair(number: int = 60, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(number, 3))
    return x, (x.sum(axis=1) > 0).astype(int)


def line(shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(shape[0], 1)


# ---- data


def test_arrays_are_dealt_out_by_a_partition() -> None:
    x, y = pair()
    fed = rota.from_arrays(x, y, test=pair(20, 1), partition=rota.partition.iid(clients=6))
    assert (fed.clients, len(fed.train.y), len(fed.test.y), fed.classes) == (6, 60, 20, 2)
    assert fed.shared_test
    fed = rota.from_arrays(x, y, partition=rota.partition.dirichlet(clients=4), matched_test=True)
    assert (len(fed.train.y), len(fed.test.y), fed.shared_test) == (48, 12, False)
    both = torch.cat([fed.train.x, fed.test.x])
    assert sorted(both[:, 0].tolist()) == sorted(np.float32(x[:, 0]).tolist())


def test_owners_are_clients_and_keep_their_test_examples() -> None:
    x, y = pair()
    owner = np.array(["north", "south", "east"])[np.arange(60) % 3]
    fed = rota.from_arrays(x, y * 1.5, owner=owner, test=0.25)
    assert fed.ids == ["east", "north", "south"]
    assert fed.classes == 0
    assert fed.test.sizes.tolist() == [5, 5, 5]
    mine = {tuple(row) for row in np.float32(x[owner == "north"]).tolist()}
    held = [*fed.train.of(1)[0].tolist(), *fed.test.of(1)[0].tolist()]
    assert {tuple(row) for row in held} == mine
    fed = rota.from_arrays(x, y, owner=owner, test=pair(20, 1))
    assert (fed.clients, fed.shared_test) == (3, True)


def test_pandas_objects_are_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = pair()
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    frame["y"], frame["who"] = y, ["p", "q"] * 30
    fed = rota.from_arrays(frame[["a", "b", "c"]], frame["y"], owner=frame["who"])
    assert fed.ids == ["p", "q"]
    mine = [(frame[["a", "b", "c"]][frame.who == w], frame.y[frame.who == w]) for w in "pq"]
    assert len(rota.from_clients(mine, test=mine[0]).train.y) == 60


def test_bytes_are_pixels_everywhere(tmp_path: Path) -> None:
    x = np.arange(120, dtype=np.uint8).reshape(30, 1, 2, 2)
    y = np.arange(30) % 3
    whole = rota.from_arrays(x, y, test=(x, y), partition=rota.partition.iid(clients=2))
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x, y_test=y)
    some = [rota.from_clients([(x, y)], test=(x, y)), whole, rota.data.folder(tmp_path)]
    for fed in some:
        assert fed.train.x.dtype == torch.float32
        assert torch.equal(fed.test.x, torch.from_numpy(x) / 255)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "give a partition, such as"),
        ({"owner": [1, 2]}, "give one for each of 60"),
        ({"owner": [1] * 60, "test": 2}, "give a pair"),
        ({"owner": range(60), "test": 0.1}, "no example for testing"),
    ],
)
def test_arrays_that_say_too_little_are_refused(given: Any, says: str) -> None:
    with pytest.raises(rota.BadInput, match=says):
        rota.from_arrays(*pair(), **given)


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    lines = ["rooms,area,town,price"]
    for n in range(90):
        rooms, area = generator.integers(1, 9), generator.uniform(30, 200)
        price = 20 * rooms + area + generator.normal()
        lines.append(f"{rooms},{area:.1f},town{n % 5},{price:.2f}")
    (tmp_path / "houses.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "houses.csv"


def test_a_csv_file_is_a_regression_by_owner(houses: Path) -> None:
    fed = rota.data.csv(houses, target="price", owner="town")
    assert (fed.clients, fed.classes, fed.shape, fed.ids[0]) == (5, 0, (2,), "town0")
    both = torch.cat([fed.train.x, fed.test.x])
    assert both.mean(dim=0).abs().max() < 1e-5
    assert len(fed.test.y) == 15
    text = f"""
    rounds = 30
    [sampler]
    name = "full"
    [[task]]
    data = {{ name = "csv", path = "{houses}", target = "price", owner = "town" }}
    model = "linear"
    loss = "mse"
    score = "r2"
    lr = 0.05
    """
    config = recipe.resolve(tomllib.loads(text))
    experiment = recipe.build(config)
    run = rota.run(experiment.tasks, rota.sampling.Full(), rounds=30, seed=0)
    assert run.summary["accuracy"] > 0.9


def test_a_csv_file_of_classes(houses: Path) -> None:
    fed = rota.data.csv(
        houses, "town", columns=["rooms", "price"], partition=rota.partition.iid(clients=3)
    )
    assert (fed.clients, fed.classes, fed.shape) == (3, 5, (2,))
    whole = rota.data.csv(houses, "rooms", owner="town", columns=["area"], standardise=False)
    assert whole.classes == 8
    real = rota.data.csv(houses, "rooms", owner="town", columns=["area"], regression=True)
    assert real.classes == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target": "prize"}, "no column 'prize': did you mean 'price'"),
        ({"target": "price"}, r"'town0' in column 'town', line 2"),
        ({"target": "price", "owner": "towns"}, "no column 'towns'"),
        ({"target": "town", "columns": ["area"], "owner": "rooms", "regression": True}, "texts"),
        ({"target": "price", "columns": ["area"]}, "give a partition"),
    ],
)
def test_csv_files_that_do_not_fit_are_one_sentence(houses: Path, given: Any, says: str) -> None:
    with pytest.raises(rota.BadInput, match=says):
        rota.data.csv(houses, **given)


def users(**more: Any) -> dict[str, Any]:
    return {"users": list(more), "num_samples": [], "user_data": more}


def test_leaf_files_of_numbers(tmp_path: Path) -> None:
    for part, number in (("train", 6), ("test", 2)):
        (tmp_path / part).mkdir()
        own = {
            f"u{n}": {"x": [[n, 1.5, k, 0] for k in range(number)], "y": [n] * number}
            for n in range(3)
        }
        (tmp_path / part / "all.json").write_text(json.dumps(users(**own)))
    fed = rota.data.leaf(tmp_path, shape=(1, 2, 2))
    assert (fed.ids, fed.shape, fed.classes) == (["u0", "u1", "u2"], (1, 2, 2), 3)
    assert fed.test.sizes.tolist() == [2, 2, 2]
    assert fed.test.of(2)[1].tolist() == [2, 2]


def test_leaf_files_of_texts(tmp_path: Path) -> None:
    own = {"a": {"x": ["abc", "cab", "b", "ca", "bb"], "y": ["x", "y", "x", "x", "y"]}}
    (tmp_path / "one.json").write_text(json.dumps(users(**own, b={"x": ["a"] * 5, "y": ["y"] * 5})))
    fed = rota.data.leaf(tmp_path)
    assert (fed.clients, fed.classes, fed.shape) == (2, 2, (3,))
    assert fed.train.sizes.tolist() == [4, 4]
    rows = [*fed.train.of(0)[0].tolist(), *fed.test.of(0)[0].tolist()]
    assert sorted(rows) == sorted([[1, 2, 3], [3, 1, 2], [2, 0, 0], [3, 1, 0], [2, 2, 0]])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"users": []}, "no object user_data"),
        (users(a={"x": [1], "y": []}), "of one length"),
        (users(a={"x": [[1, 2], [3]], "y": [0, 1]}), "neither texts nor lists of numbers"),
        (users(a={"x": [[1], [3]], "y": [0, -1]}), "number the classes from 0"),
        (users(a={"x": [], "y": []}), "no examples"),
    ],
)
def test_leaf_files_that_are_not(tmp_path: Path, data: Any, says: str) -> None:
    (tmp_path / "one.json").write_text(json.dumps(data))
    with pytest.raises(rota.BadInput, match=says):
        rota.data.leaf(tmp_path)


def test_leaf_files_with_a_text_among_others(tmp_path: Path) -> None:
    own = {"a": {"x": [[1, "noon", f"a{'b' * n}"] for n in range(5)], "y": [0, 1, 0, 1, 1]}}
    (tmp_path / "one.json").write_text(json.dumps(users(**own)))
    assert rota.data.leaf(tmp_path, text=2).shape == (5,)
    for place in (None, 3):
        with pytest.raises(rota.BadInput, match=r"\btext\b"):
            rota.data.leaf(tmp_path, text=place)


def test_targets_of_every_pixel() -> None:
    """Cross-entropy and accuracy are means over an example's targets."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 3, 5, 6))
    y = (x.sum(axis=1) > 0).astype(int)
    fed = rota.from_arrays(x, y, partition=rota.partition.iid(clients=4))
    for engine in ("sequential", "batched"):
        task = rota.Task(lambda: nn.Conv2d(3, 2, 1), fed, lr=0.5)
        run = rota.run([task], "full", rounds=10, engine=engine)
        right = run.models["own"](fed.test.x).argmax(dim=1) == fed.test.y
        assert run.summary["accuracy"] == pytest.approx(right.double().mean().item())
        assert run.summary["accuracy"] > 0.9


def test_a_model_that_gives_more_than_a_tensor_is_told_to_be_wrapped() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x), x

    fed = rota.from_arrays(*pair(), partition=rota.partition.iid(clients=2))
    with pytest.raises(rota.BadInput, match=r"the model gives a tuple: .*wrap it"):
        rota.run([rota.Task(Two, fed)], rounds=1)


def test_without_a_budget_few_clients_all_train() -> None:
    fed = rota.from_arrays(*pair(), partition=rota.partition.iid(clients=4))
    for sampler in (None, "uniform", {"name": "uniform"}):
        run = rota.run([rota.Task("logistic", fed)], sampler, rounds=1)  # type: ignore[arg-type]
        assert sorted(run.records[0]["cohort"]["own"]) == [0, 1, 2, 3]
    with pytest.raises(rota.BadInput, match=r"budget is 10"):
        rota.run([rota.Task("logistic", fed)], {"name": "uniform", "budget": 10}, rounds=1)  # type: ignore[arg-type]


class Frame:
    """What rota asks of a pandas object."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


def test_objects_that_become_arrays_are_taken() -> None:
    x, y = pair()
    x.flags.writeable = False  # as pandas has it; torch would warn
    fed = rota.from_arrays(Frame(x), Frame(y), partition=rota.partition.iid(clients=2))
    assert len(fed.train.y) == 48


# ---- names, comparisons, notebooks


def test_names_stand_for_objects() -> None:
    task = rota.Task("logistic", "digits", steps=1)  # type: ignore[arg-type]
    run = rota.run([task], {"name": "kvib", "fraction": 0.25}, estimator="unbiased", rounds=2)
    assert run.experiment.sampler == rota.sampling.KVib(budget=5)
    plain = rota.Task(rota.models.logistic, rota.data.digits(), steps=1)
    again = rota.run([plain], rota.sampling.KVib(budget=5), rounds=2)
    assert run.rounds["loss"] == again.rounds["loss"]
    for given in ({"sampler": "kvibb"}, {"estimator": "fedavgg"}, {"admission": "x"}):
        with pytest.raises(rota.BadInput, match=r"unknown|has no names"):
            rota.run([plain], rounds=1, **given)  # type: ignore[arg-type]
    with pytest.raises(rota.BadInput, match="unknown model"):
        rota.Task("logistics", "digits")  # type: ignore[arg-type]


def test_a_comparison_in_python(tmp_path: Path) -> None:
    task = rota.Task(rota.models.logistic, rota.data.digits(), steps=1)
    seen: list[str] = []
    found = rota.compare(
        [task],
        {"sampler": ["uniform", rota.sampling.Full()], "task.lr": [0.1, 0.01]},
        seeds=2,
        rounds=2,
        out=tmp_path / "c",
        watch=lambda name, record: seen.append(name),
    )
    assert len(found.runs) == 8
    assert len(seen) == 16
    assert found.table["sampler"] == ["uniform"] * 4 + ["full"] * 4
    assert found.table["task.lr"][:4] == [0.1, 0.1, 0.01, 0.01]
    alone = rota.run([task], "uniform", rounds=2, seed=1)
    assert found.runs["uniform-0.1-seed1"].rounds["loss"] == alone.rounds["loss"]
    assert "paired by seed" in str(found)
    assert "<table>" in found._repr_html_()
    assert found.report() == tmp_path / "c" / "report.html"
    again = rota.compare(
        [task],
        {"sampler": ["uniform"], "task.lr": [0.1]},
        seeds=2,
        rounds=2,
        out=tmp_path / "c",
        resume=True,
    )
    assert again.table["loss"] == found.table["loss"][:2]
    both = [rota.sampling.Uniform(2), rota.sampling.Uniform(budget=4)]  # of one kind
    found = rota.compare([task], {"sampler": both}, rounds=1)
    assert list(found.runs) == ["uniform_2-seed0", "uniform_4-seed0"]
    assert found.table["sampler"] == ["uniform 2", "uniform 4"]


def test_a_comparison_of_a_recipe() -> None:
    found = rota.compare("fedavg-digits", {"sampler.budget": [2, 4]}, rounds=1)
    assert list(found.runs) == ["2-seed0", "4-seed0"]
    assert [len(run.records[0]["cohort"]["digits"]) for run in found.runs.values()] == [2, 4]


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ({"sampler": "kvib"}, "give a list"),
        ({"task.lrr": [1]}, "did you mean 'lr'"),
        ({"samplers": ["kvib"]}, "did you mean 'sampler'"),
        ({"task.lr": [0.1, 0.1]}, "twice"),
    ],
)
def test_comparisons_that_make_no_sense(vary: Any, says: str) -> None:
    task = rota.Task(rota.models.logistic, rota.data.digits())
    with pytest.raises(rota.BadInput, match=says):
        rota.compare([task], vary, rounds=1)


def test_runs_and_federations_show_themselves(tmp_path: Path) -> None:
    fed = rota.data.digits()
    run = rota.run([rota.Task(rota.models.logistic, fed)], rounds=1, out=tmp_path / "a")
    assert "<td>20</td>" in fed._repr_html_()
    assert "accuracy" in run._repr_html_()
    assert run.report() == tmp_path / "a" / "report.html"
    assert run.report(tmp_path / "b.html").exists()
    with pytest.raises(rota.BadInput, match="no folder to report on"):
        rota.run([rota.Task(rota.models.logistic, fed)], rounds=1).report()


# ---- measures of one's own


def margin(now: int, models: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    outputs = models["digits"](data["digits"].test.x)
    top = outputs.topk(2, dim=1).values
    return {"margin": (top[:, 0] - top[:, 1]).mean(), "at": now}


def test_a_measure_of_ones_own_is_a_column(tmp_path: Path) -> None:
    task = rota.Task(rota.models.logistic, rota.data.digits())
    run = rota.run(
        [task], rounds=3, evaluate=2, metrics=[margin, "cost"], out=tmp_path / "a", seed=1
    )
    assert run.rounds["at"] == [None, 2.0, 3.0]
    last = margin(3, run.models, {"digits": task.data})["margin"]
    assert run.rounds["margin"][-1] == pytest.approx(last.item())
    plain = rota.run([task], rounds=3, evaluate=2, seed=1)
    assert run.rounds["loss"] == plain.rounds["loss"]
    page = run.report().read_text(encoding="utf-8")
    assert "<h3>Margin</h3>" in page


@pytest.mark.parametrize(
    ("gives", "says"),
    [(3, "a dict of numbers"), ({"loss": 1}, "has already"), ({"a": "b"}, "give a number")],
)
def test_measures_that_are_none(gives: Any, says: str) -> None:
    task = rota.Task(rota.models.logistic, rota.data.digits())
    with pytest.raises(rota.BadInput, match=says):
        rota.run([task], rounds=1, metrics=[lambda now, models, data: gives])


def test_a_recipe_names_a_measure_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gauge.py").write_text("def two(now, models, data):\n    return {'two': 2 * now}\n")
    text = 'rounds = 2\nmetrics = ["gauge:two"]\n[[task]]\ndata = "digits"\nmodel = "logistic"\n'
    (tmp_path / "own.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = recipe.resolve(recipe.read("own.toml"))
    experiment = recipe.build(config)
    run = rota.run(experiment.tasks, rounds=2, metrics=experiment.metrics)
    assert run.rounds["two"] == [2, 4]
    (tmp_path / "bad.toml").write_text(text.replace("gauge:two", "os:system"))
    with pytest.raises(rota.BadInput, match="--allow os"):
        recipe.read("bad.toml")
