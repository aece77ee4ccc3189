"""Metrics agree with enumeration and with a solver, and do not change the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from scipy.optimize import minimize

import rota
from rota import loop, metrics, recipe
from rota.data.federation import Federation
from rota.engine import make
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.metrics import METRICS, Meter, Updates, look, measure, variance
from rota.plan import Task, whole
from rota.running import run as running
from rota.sampling import SAMPLERS, draw

NEW = {*METRICS, *(f"{name}_total" for name in metrics.SUMMED)}
CLIENTS, DRAWS = 5, 3


def instance(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """x_i = d_i g_i of five clients, and rates that sum to 3, none above 1."""
    generator = np.random.default_rng(seed)
    rates = generator.uniform(0.3, 1, CLIENTS)
    return generator.normal(size=(CLIENTS, 4)) * generator.lognormal(
        0, 1, (CLIENTS, 1)
    ), DRAWS * rates / rates.sum()


def outcomes(procedure: str, rates: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Every cohort: its chance, and its estimate as a combination of the x_i.

    This follows the textbook and not draw.py.
    """
    q = rates / rates.sum()
    if procedure == "independent":
        for coins in product((0, 1), repeat=CLIENTS):
            drawn = np.array(coins)
            yield float(np.where(drawn, rates, 1 - rates).prod()), drawn / rates
    elif procedure == "fixed":
        cohorts = list(combinations(range(CLIENTS), DRAWS))
        for cohort in cohorts:
            yield 1 / len(cohorts), np.isin(np.arange(CLIENTS), cohort) * CLIENTS / DRAWS
    elif procedure == "multinomial":
        for cohort in product(range(CLIENTS), repeat=DRAWS):
            yield (
                float(q[list(cohort)].prod()),
                np.bincount(cohort, minlength=CLIENTS) / (DRAWS * q),
            )
    elif procedure == "systematic":
        for order in permutations(range(CLIENTS)):
            ends = np.array([0.0, *np.cumsum(rates[list(order)])[:-1], DRAWS])
            cuts = np.sort(np.append(ends % 1, 1.0))
            for low, high in pairwise(cuts):
                weight = np.zeros(CLIENTS)
                for hit in (low + high) / 2 + np.arange(DRAWS):
                    client = order[int(np.searchsorted(ends, hit)) - 1]
                    weight[client] = 1 / rates[client]
                yield float(high - low) / math.factorial(CLIENTS), weight
    else:
        for cohort in permutations(range(CLIENTS), DRAWS):
            chance, left, weight = 1.0, 1.0, np.zeros(CLIENTS)
            for turn, client in enumerate(cohort):
                chance *= q[client] / left
                weight[client] = left / q[client] + DRAWS - 1 - turn
                left -= q[client]
            yield chance, weight / DRAWS


def brute(procedure: str, rates: np.ndarray, x: np.ndarray) -> float:
    return sum(
        chance * float(((weight @ x - x.sum(axis=0)) ** 2).sum())
        for chance, weight in outcomes(procedure, rates)
    )


def updates(x: np.ndarray) -> Updates:
    return Updates(np.linalg.norm(x, axis=1), float(np.linalg.norm(x.sum(axis=0))), x @ x.T)


def solved(scores: np.ndarray) -> tuple[float, np.ndarray]:
    """The least l(p) over 0 < p <= 1 that sum to 3, by a general solver."""
    found = minimize(
        lambda p: float((scores**2 / p).sum()),
        np.full(len(scores), DRAWS / len(scores)),
        jac=lambda p: -(scores**2) / p**2,
        bounds=[(1e-4, 1)] * len(scores),
        constraints={"type": "eq", "fun": lambda p: p.sum() - DRAWS},
        options={"ftol": 1e-13, "maxiter": 1000},
    )
    return found.fun, found.x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("procedure", get_args(draw.Procedure))
def test_measures_against_enumeration_and_a_solver(procedure: draw.Procedure, seed: int) -> None:
    x, rates = instance(seed)
    if procedure in draw.CHANCES:
        rates = DRAWS * draw.restrict(np.minimum(rates, 0.9)[None], np.ones((1, CLIENTS)))[0]
    if procedure == "fixed":
        rates = np.full(CLIENTS, DRAWS / CLIENTS)
    got = measure(procedure, rates[None], np.full((1, CLIENTS), 0.2), [updates(x)])
    scores = np.linalg.norm(x, axis=1)
    least, optimal = solved(scores)
    uniform = brute("independent", np.full(CLIENTS, DRAWS / CLIENTS), x)
    assert got["cost"] == pytest.approx((scores**2 / rates).sum())
    assert got["regret"] == pytest.approx((scores**2 / rates).sum() - least, rel=1e-5, abs=1e-6)
    assert got["variance"] == pytest.approx(brute(procedure, rates, x), rel=1e-8)
    assert got["improvement"] == pytest.approx(brute("independent", optimal, x) / uniform, rel=1e-4)
    assert got["quality"] == pytest.approx(
        (brute(procedure, rates, x) - brute("independent", optimal, x)) / uniform, rel=1e-4
    )


def test_models_are_summed_and_ratios_are_of_sums() -> None:
    parts = [instance(seed) for seed in (0, 1)]
    rates, shares = np.stack([rates for _, rates in parts]), np.full((2, CLIENTS), 0.2)
    seen = [updates(x) for x, _ in parts]
    both = measure("independent", rates.clip(0, 1), shares, seen)
    alone = [measure("independent", rates[[s]].clip(0, 1), shares[[s]], [seen[s]]) for s in (0, 1)]
    for name in metrics.SUMMED:
        assert both[name] == pytest.approx(alone[0][name] + alone[1][name])  # type: ignore[operator]
    uniform = [sum((CLIENTS / DRAWS - 1) * each.scores**2) for each in seen]
    weighted = sum(one["improvement"] * weight for one, weight in zip(alone, uniform, strict=True))  # type: ignore[operator]
    assert both["improvement"] == pytest.approx(weighted / sum(uniform))
    # the excess of the applied over the optimal, and the optimal itself, are all of the variance
    assert both["improvement"] + both["quality"] == pytest.approx(both["variance"] / sum(uniform))  # type: ignore[operator]


def test_a_model_without_clients_and_updates_of_zero() -> None:
    nothing = measure(
        "independent", np.zeros((1, 3)), np.zeros((1, 3)), [Updates(np.zeros(0), 0.0, None)]
    )
    assert nothing == {"cost": 0, "regret": 0, "variance": 0, "improvement": None, "quality": None}
    still = measure(
        "independent",
        np.full((1, 3), 0.5),
        np.full((1, 3), 1 / 3),
        [Updates(np.zeros(3), 0.0, None)],
    )
    assert still["improvement"] is None
    assert still["regret"] == 0


def test_everybody_is_looked_at_as_if_drawn(blobs: Federation) -> None:
    """The scores are those of the updates that drawn clients send, with the same randomness."""
    tasks = [Task(network, blobs, batch=6, name="a"), Task(linear, blobs, name="b")]
    setting = rota.Experiment(tasks, SAMPLERS["full"]())
    engine = make("auto", Experiment(tasks, devices=setting.devices, seed=3), "cpu")
    models = loop.begin(setting, engine).models
    seen = look(engine, models, setting.shares, 7, products=True)
    plan = draw.independent(np.full((2, 6), 0.7), setting.shares, np.random.default_rng(0))
    assert len(plan) > 3
    for chunk in engine.train(whole(models, plan, 7)):
        client = plan.client[chunk.rows]
        norms = (
            setting.shares[chunk.model, client]
            * torch.linalg.vector_norm(chunk.update, dim=1).numpy()
        )
        assert seen[chunk.model].scores[client] == pytest.approx(norms, rel=1e-4)
    for each in seen:
        assert each.products is not None
        assert np.sqrt(np.diag(each.products)) == pytest.approx(each.scores, rel=1e-6)
        assert np.sqrt(each.products.sum()) == pytest.approx(each.total, rel=1e-4)


@pytest.mark.parametrize(
    "name",
    ["kvib", "kvib-full", "optimal", "vrb", "avare", "osmd-adaptive", "uniform", "proportional"],
)
def test_asking_changes_nothing_else(blobs: Federation, name: str) -> None:
    tasks = [Task(network, blobs, batch=6, name="a"), Task(linear, blobs, lr=0.05, name="b")]
    availability = rota.Availability(chance=0.8)
    runs: list[Any] = [
        rota.run(
            tasks,
            SAMPLERS[name](budget=2),
            availability=availability,
            rounds=4,
            seed=5,
            metrics=asked,
        )  # type: ignore[call-arg]
        for asked in ((), METRICS)
    ]
    plain, measured = (run.records for run in runs)
    assert not NEW & plain[0].keys()
    assert all(line.keys() >= NEW for line in measured)
    assert [
        {key: value for key, value in line.items() if key not in NEW} for line in measured
    ] == plain
    for one, two in zip(*(run.state.models for run in runs), strict=True):
        assert torch.equal(one.params, two.params)
    for name in metrics.SUMMED:
        assert [line[f"{name}_total"] for line in measured] == pytest.approx(
            np.cumsum([line[name] for line in measured]).tolist()
        )
        assert runs[1].summary[f"{name}_total"] == measured[-1][f"{name}_total"]


def test_the_oracle_has_no_regret_and_uniform_has_the_variance_of_its_cohort(
    blobs: Federation,
) -> None:
    task = Task(linear, blobs)
    oracle = rota.run([task], SAMPLERS["optimal"](budget=2), rounds=3, metrics=METRICS).records  # type: ignore[call-arg]
    assert [line["regret"] for line in oracle] == pytest.approx([0, 0, 0], abs=1e-12)
    assert [line["quality"] for line in oracle] == pytest.approx([0, 0, 0], abs=1e-9)
    uniform = rota.run(
        [task], SAMPLERS["uniform"](budget=6), rounds=3, metrics=["variance"]
    ).records  # type: ignore[call-arg]
    assert [line["variance"] for line in uniform] == [0, 0, 0]
    assert "regret" not in uniform[0]


def test_a_client_that_fails_counts_nothing() -> None:
    data = federation([6, 6, 6])
    data.train.of(1)[0][0, 0] = torch.inf
    task = Task(linear, data)
    setting = rota.Experiment([task], SAMPLERS["full"]())
    engine = make("sequential", Experiment([task], devices=setting.devices), "cpu")
    (seen,) = look(engine, loop.begin(setting, engine).models, setting.shares, 1, products=True)
    assert seen.scores[1] == 0
    assert np.isfinite(seen.scores).all()
    assert seen.scores[0] > 0
    assert np.isfinite(seen.total)


def test_sums_go_on_after_a_resume(blobs: Federation, tmp_path: Path) -> None:
    def go(out: Path, resume: bool = False, stop: int = 99) -> None:
        def watch(line: dict[str, Any]) -> None:
            if line["round"] == stop:
                raise RuntimeError("stop")

        sampler = SAMPLERS["kvib"](budget=2)  # type: ignore[call-arg]
        rota.run(
            [Task(linear, blobs)],
            sampler,
            rounds=5,
            metrics=["regret", "variance"],
            out=out,
            resume=resume,
            watch=watch,
        )

    go(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        go(tmp_path / "broken", stop=3)
    go(tmp_path / "broken", resume=True)
    whole, broken = (
        (tmp_path / name / "rounds.jsonl").read_bytes() for name in ("whole", "broken")
    )
    assert whole == broken
    lines = [json.loads(line) for line in whole.splitlines()]
    assert lines[-1]["regret_total"] == pytest.approx(sum(line["regret"] for line in lines))


def test_the_time_it_takes_is_not_the_runs(
    blobs: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Meter):
        def __call__(self, *args: Any) -> Any:
            self.seconds += 1000
            return super().__call__(*args)

    monkeypatch.setattr(running, "Meter", Slow)
    summary = rota.run(
        [Task(linear, blobs)], rounds=3, sampler=SAMPLERS["uniform"](budget=2), metrics=["regret"]
    ).summary  # type: ignore[call-arg]
    assert -3000 < summary["wall_seconds"] < -2900


@pytest.mark.parametrize(
    ("sampler", "asked", "message"),
    [
        ("kvib", ["regrets"], "metrics names an unknown 'regrets': did you mean 'regret'?"),
        (
            "full",
            ["regret"],
            "the sampler 'full', because it does not draw all clients by probabilities of its own",
        ),
        ("rpow-d", ["variance"], "the sampler 'rpow-d', because it does not draw"),
        ("clustered-size", ["variance"], "the sampler 'clustered-size', because it does not draw"),
        ("ocs", ["regret"], "the sampler 'ocs', because it does not draw"),
    ],
)
def test_refused(blobs: Federation, sampler: str, asked: list[str], message: str) -> None:
    options = {"full": {}, "ocs": {"budget": 2, "cohort": 3}}.get(sampler, {"budget": 2})
    with pytest.raises(BadInput, match=message.replace("?", r"\?")):
        rota.run([Task(linear, blobs)], SAMPLERS[sampler](**options), rounds=1, metrics=asked)


def test_a_cohort_of_everybody_is_measured(blobs: Federation) -> None:
    run = rota.run(
        [Task(linear, blobs)], SAMPLERS["ocs"](budget=2, cohort=6), rounds=1, metrics=["regret"]
    )  # type: ignore[call-arg]
    assert run.records[0]["regret"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("procedure", ["sequential", "systematic"])
def test_the_variance_of_some_draws_is_for_few_clients(procedure: str) -> None:
    sampler = SAMPLERS["uniform"](budget=2, procedure=procedure)  # type: ignore[call-arg]
    metrics.check(["cost", "regret"], sampler, np.full((1, 500), 1 / 500), 1)
    with pytest.raises(BadInput, match="up to 200 clients, and there are 500: ask for"):
        metrics.check(["quality"], sampler, np.full((1, 500), 1 / 500), 1)


def test_the_variance_of_many_systematic_draws_is_that_of_a_fixed_size() -> None:
    """With equal chances they are the same, and there are too many clients for all orders."""
    x = np.random.default_rng(0).normal(size=(30, 4)) + 0.3
    got = variance.of("systematic", np.full(30, 0.2), np.zeros(30), 0.0, x @ x.T)
    scores, total = np.linalg.norm(x, axis=1), float(np.linalg.norm(x.sum(axis=0)))
    assert got == pytest.approx(variance.fixed(6, scores, total), rel=0.1)


def test_in_a_recipe() -> None:
    config = recipe.resolve(
        recipe.override(recipe.read("kvib-synthetic"), 'metrics=["regret", "quality"]')
    )
    assert config["metrics"] == ["regret", "quality"]
    assert list(recipe.build(config).metrics) == ["regret", "quality"]
    assert recipe.resolve(recipe.read("kvib-synthetic"))["metrics"] == []
    with pytest.raises(BadInput, match="'metrics' is 'regret', but it takes a list"):
        recipe.resolve(recipe.override(recipe.read("kvib-synthetic"), "metrics=regret"))
