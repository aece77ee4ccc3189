"""Sub-models: capacities, choices of units, and what estimators make of parts of models."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rota
from rota import loop, rng
from rota.arrays import Array
from rota.data import Federation
from rota.engine import local, make
from rota.engine.nested import draw, scale
from rota.engine.schedule import batches
from rota.errors import BadInput
from rota.estimate import Adam, FedAvg, FedVarp, Unbiased
from rota.experiment import Experiment
from rota.plan import Chunk, Costs, Job, Model, Plan, Seen, Task, duty
from rota.running.run import execute
from rota.sampling import Full, KVib, Uniform
from rota.submodel import (
    CAPACITIES,
    SUBMODELS,
    Exclude,
    Fixed,
    Fjord,
    Invariant,
    Ordered,
    Stragglers,
    Whole,
    hold,
)
from rota.submodel.choice import Importance, Random, Rolling, Wanted, split
from rota.submodel.cut import SubModel, build, keep
from rota.submodel.times import DRIFT, POWER, UNSURE, Times
from rota.submodel.told import told
from rota.submodel.units import find_units
from rota.weights import read

SIZES = [9, 12, 20, 31, 8, 17]


def small(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, classes)
    )


MODULE = small((4,), 3)
UNITS = find_units(MODULE, torch.zeros(2, 4))
WEIGHTS = read(MODULE)
MODEL = Model(0, WEIGHTS)


def part(width: float, share: float, kept: list[Array] | None = None) -> SubModel:
    if kept is None:
        kept = [np.arange(count) for count in UNITS.counts(width)]
    return SubModel(0, width, share, keep(UNITS, kept))


def chunk(plan: Plan, row: int, update: torch.Tensor, ok: bool = True) -> Chunk:
    one = np.ones(1)
    return Chunk(
        rows=np.array([row]),
        model=0,
        now=1,
        lr=0.1,
        update=update[None],
        buffers=torch.zeros(1, 0),
        loss=one,
        steps=np.ones(1, np.int64),
        examples=one,
        costs=Costs(one, one, np.ones(1, np.int64), np.ones(1, np.int64)),
        reason=["" if ok else "it broke"],
    )


def test_units_of_a_small_network() -> None:
    assert [layer.size for layer in UNITS.layers] == [8, 6]


def test_the_slowest_client_was_asked() -> None:
    """Also if nobody took any time: client 0 is not in this plan."""
    ones = np.ones(2)
    plan = Plan(np.array([3, 5]), np.zeros(2, int), ones, ones, np.array([0, 1]), (part(0.5, 0.5),))
    seen = Seen.nothing(2)
    seen.costs.seconds[:] = 0.0
    assert told(["a"], plan, seen)["slowest"] == {"client": 3, "seconds": 0.0, "width": 1.0}


# --- estimators


def updates(clients: int) -> torch.Tensor:
    return torch.randn(clients, len(WEIGHTS.params), generator=torch.Generator().manual_seed(1))


def held(parts: tuple[SubModel, ...], of: list[int]) -> Array:
    """owns[i, j]: whether client i holds scalar j."""
    owns = np.ones((len(of), len(WEIGHTS.params)), bool)
    for i, k in enumerate(of):
        if k:
            owns[i] = False
            owns[i, parts[k - 1].places.numpy()] = True
    return owns


def estimate(estimator: Any, plan: Plan, sent: torch.Tensor, failed: tuple[int, ...] = ()) -> Any:
    sums = estimator.begin({}, [WEIGHTS], plan)
    for row, client in enumerate(plan.client.tolist()):
        of = plan.held(row)
        update = sent[client] if of is None else sent[client][of.places]
        estimator.add(sums, plan, chunk(plan, row, update, ok=client not in failed))
    return estimator.finish({}, sums)[0][0]


def test_fedavg_averages_each_scalar_over_the_rows_that_hold_it() -> None:
    parts = (part(0.5, 0.3),)
    plan = Plan(
        np.arange(2), np.zeros(2, int), np.ones(2), np.array([0.7, 0.3]), np.array([0, 1]), parts
    )
    sent, owns = updates(2), torch.from_numpy(held(parts, [0, 1]))
    found = estimate(FedAvg(), plan, sent)
    both = (0.7 * sent[0] + 0.3 * sent[1]) / 1.0
    torch.testing.assert_close(found.update[owns[1]], both[owns[1]])
    torch.testing.assert_close(found.update[~owns[1]], sent[0][~owns[1]])
    assert found.owned.all()


def test_scalars_that_no_row_holds_keep_their_values_and_moments() -> None:
    parts = (part(0.5, 0.6),)
    plan = Plan(np.array([1]), np.zeros(1, int), np.ones(1), np.array([0.6]), np.array([1]), parts)
    sent, owns = updates(2), held(parts, [0, 1])[1]
    for estimator in (Unbiased(), FedAvg()):
        found = estimate(estimator, plan, sent)
        job = Job(1, [MODEL], plan, duty([MODEL], plan))
        server, full = Adam(lr=0.1), Plan(np.arange(1), np.zeros(1, int), np.ones(1), np.ones(1))
        first = estimate(estimator, full, sent)  # of a whole model, so that all moments move
        _, before = loop.apply(server, job, Seen.nothing(1), [first], {})
        (model,), moments = loop.apply(server, job, Seen.nothing(1), [found], before)
        same = (model.params == WEIGHTS.params).numpy()
        assert same[~owns].all()
        assert not same[owns].any()
        vectors = [name for name in moments if moments[name].shape == WEIGHTS.params.shape]
        assert len(vectors) == 2
        for name in vectors:
            np.testing.assert_array_equal((moments[name] == before[name]).numpy(), ~owns)


def test_unbiased_for_the_average_over_those_who_could_hold_a_scalar() -> None:
    """By enumeration of all cohorts of independent coins."""
    share, chance, of = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.5, 0.8, 0.3, 0.9]), [0, 1, 2, 1]
    parts = (part(0.5, 0.4), part(0.7, 0.2, [np.array([1, 2, 4, 5, 7]), np.array([0, 2, 3, 5])]))
    sent, owns = updates(4), held(parts, of)
    expected = np.zeros(len(WEIGHTS.params))
    for coins in itertools.product([False, True], repeat=4):
        drawn = np.flatnonzero(coins)
        probability = float(np.prod(np.where(coins, chance, 1 - chance)))
        if not len(drawn):
            continue
        weight = share[drawn] / chance[drawn]
        plan = Plan(
            drawn, np.zeros(len(drawn), int), chance[drawn], weight, np.array(of)[drawn], parts
        )
        expected += probability * estimate(Unbiased(), plan, sent).update.double().numpy()
    mass = owns * share[:, None]
    target = (mass * sent.double().numpy()).sum(axis=0) / mass.sum(axis=0)
    np.testing.assert_allclose(expected, target, rtol=1e-4, atol=1e-6)


def test_failed_rows_hold_nothing() -> None:
    parts = (part(0.5, 0.3),)
    plan = Plan(
        np.arange(2), np.zeros(2, int), np.ones(2), np.array([0.7, 0.3]), np.array([0, 1]), parts
    )
    found = estimate(FedAvg(), plan, updates(2), failed=(0,))
    np.testing.assert_array_equal(found.owned.numpy(), held(parts, [1])[0])


def test_estimators_that_remember_updates_refuse_parts(blobs: Federation) -> None:
    with pytest.raises(BadInput, match="works on whole models only"):
        rota.run([Task(small, blobs)], Full(), estimator=FedVarp(), capacity=Fixed(), rounds=1)


def test_samplers_that_compare_updates_refuse_parts(blobs: Federation) -> None:
    with pytest.raises(BadInput, match="compares whole updates"):
        rota.run([Task(small, blobs)], rota.sampling.DivFl(2), capacity=Fixed(), rounds=1)


# --- choices


@pytest.mark.parametrize("name", SUBMODELS)
@pytest.mark.parametrize("width", [0.95, 0.5, 0.01])
def test_every_choice_keeps_what_is_wanted(name: str, width: float) -> None:
    choice = SUBMODELS[name]()
    state = choice.init([UNITS])
    for now in (1, 2, 9):
        wanted = Wanted(0, MODEL, UNITS, width, now)
        kept = choice.keep(state, wanted, np.random.default_rng(now))
        again = choice.keep(state, wanted, np.random.default_rng(now))
        assert [len(each) for each in kept] == UNITS.counts(width)
        for each, other in zip(kept, again, strict=True):
            np.testing.assert_array_equal(each, other)
        keep(UNITS, kept)  # in ascending order, without repeats, inside the layer


def wanted(width: float, now: int = 1) -> Wanted:
    return Wanted(0, MODEL, UNITS, width, now)


def test_what_distinguishes_the_choices() -> None:
    generator = np.random.default_rng(0)
    assert [each.tolist() for each in Ordered().keep({}, wanted(0.5), generator)] == [
        [0, 1, 2, 3],
        [0, 1, 2],
    ]
    windows = [Rolling().keep({}, wanted(0.5, now), generator)[1].tolist() for now in (1, 2, 5)]
    assert windows == [[0, 1, 2], [1, 2, 3], [0, 4, 5]]
    drawn = {tuple(Random().keep({}, wanted(0.5), generator)[0].tolist()) for _ in range(30)}
    assert len(drawn) > 10
    first, second = MODULE[0], MODULE[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    score = first.weight.abs().sum(1) + first.bias.abs() + second.weight.abs().sum(0)
    best = sorted(score.topk(4).indices.tolist())
    assert Importance().keep({}, wanted(0.5), generator)[0].tolist() == best


def relative(update: torch.Tensor) -> dict[tuple[int, int], float]:
    """The largest relative change of any scalar that a unit owns, spelled out by indices."""
    change = dict(
        zip(UNITS.params, update.split([s.numel() for s in UNITS.params.values()]), strict=True)
    )
    value = dict(
        zip(
            UNITS.params,
            WEIGHTS.params.split([s.numel() for s in UNITS.params.values()]),
            strict=True,
        )
    )
    out = {}
    for at, layer in enumerate(UNITS.layers):
        for unit in range(layer.size):
            worst = 0.0
            for each in layer.slices:
                shape = UNITS.params[each.tensor]
                d = (
                    change[each.tensor]
                    .view(shape)
                    .index_select(each.axis, torch.tensor(np.atleast_1d(each.index[unit])))
                )
                w = (
                    value[each.tensor]
                    .view(shape)
                    .index_select(each.axis, torch.tensor(np.atleast_1d(each.index[unit])))
                )
                worst = max(worst, float((d.abs() / w.abs()).max()))
            out[at, unit] = worst
    return out


def test_invariant_units_are_those_that_hardly_change_on_three_quarters_of_the_rows() -> None:
    choice = Invariant(threshold=0.3)
    state = choice.init([UNITS])
    generator = torch.Generator().manual_seed(3)
    plan = Plan(np.arange(4), np.zeros(4, int), np.ones(4), np.full(4, 0.25))
    job = Job(1, [MODEL], plan, duty([MODEL], plan), units=(UNITS,))
    scale = torch.tensor([0.1, 0.1, 0.1, 1.0])  # the fourth row changes everything
    sent = (
        torch.rand(4, len(WEIGHTS.params), generator=generator)
        * WEIGHTS.params.abs()
        * scale[:, None]
        * 2
    )
    firm = keep(UNITS, [np.arange(4), np.arange(6)])  # the other four units change on all rows
    loose = torch.ones(len(WEIGHTS.params), dtype=torch.bool)
    loose[firm.places] = False
    sent[:, loose] = 5 * WEIGHTS.params.abs()[loose]
    watched = choice.watch(state, job)
    for row in range(4):
        choice.see(watched, job, chunk(plan, row, sent[row]))
    new = choice.learn(state, watched)
    by_row = [relative(each) for each in sent]
    for at, layer in enumerate(UNITS.layers):
        # a scalar needs three of four votes, and a unit all of its scalars: here rows agree
        expected = [sum(row[at, unit] <= 0.3 for row in by_row) >= 3 for unit in range(layer.size)]
        assert new[f"invariant.0.{at}"].tolist() == expected
    assert any(new["invariant.0.0"])
    assert not all(new["invariant.0.0"])


class Residual(nn.Module):
    """Its units own both axes of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x))
        return self.out(x + self.two(x))


@pytest.mark.parametrize("against", [0, 1, 2])
def test_a_tensor_of_which_units_own_both_axes_votes_once(against: int) -> None:
    """Of four rows, `against` change that tensor; nothing else changes."""
    module = Residual()
    units, weights = find_units(module, torch.zeros(2, 4)), read(module)
    assert [layer.name for layer in units.layers] == ["one"]
    choice = Invariant(threshold=0.3)
    plan = Plan(np.arange(4), np.zeros(4, int), np.ones(4), np.full(4, 0.25))
    model = Model(0, weights)
    job = Job(1, [model], plan, duty([model], plan), units=(units,))
    update = torch.zeros_like(weights.params)
    split(units, update)["two.weight"].fill_(9)
    state = choice.init([units])
    watched = choice.watch(state, job)
    for row in range(4):
        choice.see(watched, job, chunk(plan, row, update if row < against else 0 * update))
    new = choice.learn(state, watched)
    assert new["invariant.0.0"].tolist() == [against < 2] * 8


@pytest.mark.parametrize("by", [1, 3, 7])
def test_the_votes_are_s3s(by: int) -> None:
    """Units of both sorts, on several random updates; `by` rows come in a chunk."""
    found = [each for seed in range(5) for each in voted(seed, by)]
    assert 3 < sum(found) < len(found) - 3


def voted(seed: int, by: int) -> list[bool]:
    """FLuID's rules spelled out for single scalars; some weights, and some updates, are 0."""
    generator = np.random.default_rng(seed)
    value = WEIGHTS.params.double().numpy() * (generator.random(len(WEIGHTS.params)) > 0.03)
    model = Model(0, WEIGHTS._replace(params=torch.from_numpy(value).float()))
    whole, vote, thresholds = 7, 0.75, np.array([0.4, 0.25])  # each layer has its own
    quiet = keep(UNITS, [np.sort(generator.permutation(n)[: n - 2]) for n in (8, 6)]).places
    median = np.full(len(value), 0.25)
    median[quiet.numpy()] = 0.01
    change = generator.lognormal(np.log(median), 0.9, size=(whole, len(value)))
    update = change * value * generator.choice([-1, 1], size=change.shape)
    none = value == 0
    update[:, none] = 0.1 * (generator.random((whole, none.sum())) < 0.1)
    update[generator.random(update.shape) < 0.1] = 0
    # the plan: rows with whole models, two that failed, and a straggler that changes everything
    parts = (part(0.5, 0.2),)
    cut = np.array([0] * (whole + 2) + [1])
    rows = whole + 3
    plan = Plan(np.arange(rows), np.zeros(rows, int), np.ones(rows), np.full(rows, 0.1), cut, parts)
    job = Job(1, [model], plan, duty([model], plan), units=(UNITS,))
    choice = Invariant(threshold=0.4, vote=vote)
    state = {**choice.init([UNITS]), "threshold.0": thresholds}
    watched = choice.watch(state, job)
    sent = torch.from_numpy(update).float()
    for start in range(0, whole, by):  # in chunks of any size
        few = range(start, min(start + by, whole))
        many = [chunk(plan, row, sent[row]) for row in few]
        together = replace(
            many[0],
            rows=np.array(few),
            update=sent[list(few)],
            reason=[""] * len(few),
            **{k: np.repeat(getattr(many[0], k), len(few)) for k in ("loss", "steps", "examples")},
        )
        choice.see(watched, job, together)
    for row in (whole, whole + 1):
        choice.see(watched, job, chunk(plan, row, torch.zeros_like(sent[0]), ok=False))
    choice.see(watched, job, chunk(plan, whole + 2, torch.full((len(parts[0].places),), 1e9)))
    new = choice.learn(state, watched)
    size = np.abs(model.params.numpy())
    votes = [(np.abs(sent.numpy()) <= each * size).sum(axis=0) for each in thresholds]
    assert all(0 < (each >= vote * whole).mean() < 1 for each in votes)
    number = dict(zip(UNITS.params, np.split(np.arange(len(value)), ends()), strict=True))
    found = []
    for at, layer in enumerate(UNITS.layers):
        for unit in range(layer.size):
            owned = [
                np.take(number[e.tensor].reshape(UNITS.params[e.tensor]), e.index[unit], e.axis)
                for e in layer.slices
            ]
            scalars = np.concatenate([each.ravel() for each in owned])
            expected = bool((votes[at][scalars] >= vote * whole).all())
            assert bool(new[f"invariant.0.{at}"][unit]) == expected
            found.append(expected)
    # the threshold begins at the least change of a unit: its largest on any row and scalar
    first = Invariant(vote=vote)
    watched = first.watch(first.init([UNITS]), job)
    for row in range(whole):
        first.see(watched, job, chunk(plan, row, sent[row]))
    at_first = first.learn(first.init([UNITS]), watched)["threshold.0"]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_ = np.abs(sent.numpy()) / np.abs(model.params.numpy())
    relative_[sent.numpy() == 0] = 0
    for at, layer in enumerate(UNITS.layers):
        worst = []
        for unit in range(layer.size):
            owned = [
                np.take(number[e.tensor].reshape(UNITS.params[e.tensor]), e.index[unit], e.axis)
                for e in layer.slices
            ]
            scalars = np.concatenate([each.ravel() for each in owned])
            worst.append(relative_[:, scalars].max())
        least = min((each for each in worst if np.isfinite(each)), default=0.0)
        assert at_first[at] == pytest.approx(least, rel=1e-5)
    return found


def ends() -> Array:
    """Where each tensor but the last ends in the vector of parameters."""
    return np.cumsum([shape.numel() for shape in UNITS.params.values()])[:-1]


def test_invariant_units_are_dropped_first_and_those_dropped_before_come_first_of_all() -> None:
    choice = Invariant()
    state = choice.init([UNITS])
    state["invariant.0.0"] = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool)
    state["dropped.0.0"] = np.array([0, 1, 1, 1, 0, 0, 0, 0], bool)
    for seed in range(20):
        generator = np.random.default_rng(seed)
        assert choice.keep(state, wanted(0.75), generator)[0].tolist() == [0, 3, 4, 5, 6, 7]
        kept = choice.keep(state, wanted(0.5), generator)[0].tolist()
        assert not {0, 1, 2} & set(kept)


def test_thresholds_start_from_the_least_change_and_grow_until_enough_units_are_below() -> None:
    choice = Invariant(warmup=2, growth=0.5)
    state = choice.init([UNITS])
    plan = Plan(
        np.arange(2),
        np.zeros(2, int),
        np.ones(2),
        np.full(2, 0.4),
        np.array([0, 0]),
        (part(0.5, 0.2),),
    )
    job = Job(1, [MODEL], plan, duty([MODEL], plan), units=(UNITS,))
    for round_ in range(1, 6):
        sent = WEIGHTS.params.abs() * (0.1 * round_ if round_ <= 2 else 10.0)
        watched = choice.watch(state, job)
        choice.see(watched, job, chunk(plan, 0, sent))
        state = choice.learn(state, watched)
        if round_ == 2:
            assert state["threshold.0"] == pytest.approx([0.15, 0.15], rel=1e-3)
    # twice by half of the least change, 10; then enough units are below
    assert state["threshold.0"] == pytest.approx([10.15, 10.15], rel=1e-3)


# --- capacities


def test_fixed_capacities_are_dealt_out_by_the_seed() -> None:
    shares = np.full((1, 10), 0.1)
    width = Fixed(sizes=(1.0, 0.5), parts=(3, 2)).init(shares, 0)["width"]
    assert sorted(width.tolist()) == [0.5] * 4 + [1.0] * 6
    assert width.tolist() != Fixed(sizes=(1.0, 0.5), parts=(3, 2)).init(shares, 1)["width"].tolist()
    with pytest.raises(BadInput, match="above 0 and up to 1"):
        Fixed(sizes=(1.5,)).init(shares, 0)
    with pytest.raises(BadInput, match="one per size"):
        Fixed(sizes=(1.0, 0.5), parts=(1,)).init(shares, 0)


def test_fixed_capacities_may_be_given_for_each_client() -> None:
    shares = np.full((1, 3), 1 / 3)
    assert Fixed(each=(1, 0.25, 0)).init(shares, 0)["width"].tolist() == [1.0, 0.25, 0.0]
    with pytest.raises(BadInput, match=r"capacity.each has 2 widths for 3 clients"):
        Fixed(each=(1, 0.25)).init(shares, 0)
    with pytest.raises(BadInput, match=r"capacity.each is \[0, 0, 0\]: give fractions"):
        Fixed(each=(0, 0, 0)).init(shares, 0)
    with pytest.raises(
        BadInput, match=r"capacity.sizes is \[-0.5\]: .*, or 0 to leave clients out"
    ):
        Fixed(sizes=(-0.5,)).init(shares, 0)


def observe(capacity: Stragglers, state: Any, seconds: Array) -> Any:
    """A round of the clients whose seconds are known; [clients] or [models, clients]."""
    seconds = np.atleast_2d(seconds)
    model, client = np.nonzero(np.isfinite(seconds))
    plan = Plan(client, model, np.ones(len(client)), np.full(len(client), 0.1))
    seen = Seen.nothing(len(client))
    seen.costs.seconds[:] = seconds[model, client]
    return capacity.observe(state, np.full(seconds.shape, 0.1), plan, seen)


def begun(capacity: Stragglers, clients: int, models: int = 1) -> Any:
    return capacity.init(np.full((models, clients), 1 / clients), 0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_slowest_become_stragglers_and_meet_the_target(power: float) -> None:
    time = np.array([1.0] * 8 + [1.25, 2.0])
    exact = Stragglers(share=0.2, sizes=())
    state = begun(exact, 10)
    for _ in range(15):
        state = observe(exact, state, time * state["width"] ** power)
    assert state["width"][:8].tolist() == [1.0] * 8
    assert state["width"][8:] == pytest.approx([0.8 ** (1 / power), 0.5 ** (1 / power)], rel=0.02)
    assert float(state["target"]) == pytest.approx(1.0)
    assert (time * state["width"] ** power).max() == pytest.approx(1.0, rel=0.02)


def test_the_width_is_the_nearest_of_the_given_sizes() -> None:
    capacity, time = Stragglers(share=0.2), np.array([1.0] * 8 + [1.25, 2.0])
    state = begun(capacity, 10)
    for _ in range(6):
        state = observe(capacity, state, time * state["width"])
    assert state["width"].tolist() == [1.0] * 8 + [0.85, 0.5]  # 0.8 is as near to 0.75 but for k


def test_the_target_is_the_next_slowest_a_quantile_or_given() -> None:
    time = np.array([1.0, 1.1, 1.2, 1.4, 3.0])
    for options, target in (
        ({}, 1.4),
        ({"quantile": 0.5}, 1.2),
        ({"seconds": 0.9}, 0.9),
        ({"share": 0.4}, 1.2),
        ({"share": 0.99}, 1.0),
    ):
        capacity = Stragglers(sizes=(), **options)
        state = begun(capacity, 5)
        for _ in range(2):
            state = observe(capacity, state, time)
        assert float(state["target"]) == pytest.approx(target)
        slow = state["width"] < 1
        most = max(1, round(capacity.share * 5))
        assert slow.sum() == min(most, 4, int((time > 1.1 * target).sum()))
        assert slow[4]
        np.testing.assert_allclose(state["width"][slow], target / time[slow])  # k is 1 at first


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.4])
def test_shares_of_stragglers_have_their_own_sizes(share: float) -> None:
    number = round(20 * share)
    time = np.r_[np.ones(20 - number), np.linspace(1.2, 2.5, number)]
    capacity = Stragglers(share=share, sizes=())
    state = begun(capacity, 20)
    for _ in range(20):
        state = observe(capacity, state, time * state["width"] ** 1.5)
    assert (state["width"] < 1).sum() == number
    assert len(np.unique(state["width"][-number:])) == number
    np.testing.assert_allclose(time * state["width"] ** 1.5, 1.0, rtol=0.03)


def test_clusters_are_groups_of_equal_size_by_speed_with_one_width_each() -> None:
    """FLuID's Table 4: four groups of stragglers, of the widths 0.65, 0.75, 0.85 and 0.95."""
    wanted = np.array([0.66, 0.64, 0.76, 0.74, 0.86, 0.84, 0.95, 0.94])
    time = np.r_[np.ones(12), 1 / wanted]
    for sizes, expected in (
        ((), [0.65, 0.75, 0.85, 0.945]),
        ((0.65, 0.75, 0.85, 0.95), [0.65, 0.75, 0.85, 0.95]),
    ):
        capacity = Stragglers(share=0.4, sizes=sizes, clusters=4, margin=0.01)
        state = begun(capacity, 20)
        for _ in range(2):
            state = observe(capacity, state, time)
        assert state["width"][:12].tolist() == [1.0] * 12
        np.testing.assert_allclose(state["width"][12:], np.repeat(expected, 2))
    few = Stragglers(share=0.1, sizes=(), clusters=4)  # two stragglers are two clusters
    state = begun(few, 20)
    for _ in range(2):
        state = observe(few, state, time)
    assert len(np.unique(state["width"])) == 1 + (state["width"] < 1).sum()


@pytest.mark.parametrize("ratio", [1.0, 1.02, 1.08, 1.15, 1.3, 2.0])
@pytest.mark.parametrize("sizes", [(), (0.95, 0.85, 0.75, 0.65, 0.5)])
def test_no_client_flips_for_noise_of_five_per_cent(ratio: float, sizes: tuple[float, ...]) -> None:
    """Clients at any distance from the target, 200 rounds, 10 seeds: each changes at most once.

    A client a little above the target may be taken for a straggler once. It must not come and go.
    """
    time = np.array([1.0] * 8 + [ratio, 1.15 * ratio])
    for seed in range(10):
        generator = np.random.default_rng(seed)
        capacity = Stragglers(share=0.2, sizes=sizes)
        state, slow = begun(capacity, 10), []
        for _ in range(200):
            noise = np.exp(0.05 * generator.standard_normal(10))
            state = observe(capacity, state, time * state["width"] ** 1.5 * noise)
            slow.append(state["width"] < 1)
        changes = (np.diff(np.array(slow, int), axis=0, prepend=0) != 0).sum(axis=0)
        assert changes.max() <= 1
        assert not np.any(slow[-1][:8])
        if ratio >= 1.15:
            assert slow[-1][8:].all()


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.4])
def test_no_client_comes_and_goes_whatever_the_share(share: float) -> None:
    """Speeds without gaps, so that some clients are at the limit; 5 % of noise, 200 rounds."""
    time, number = np.geomspace(1.0, 3.0, 20), round(20 * share)
    for seed in range(3):
        generator, capacity = np.random.default_rng(seed), Stragglers(share=share)
        state, slow = begun(capacity, 20), []
        for _ in range(200):
            noise = np.exp(0.05 * generator.standard_normal(20))
            state = observe(capacity, state, time * state["width"] ** 1.5 * noise)
            slow.append(state["width"] < 1)
        changes = np.diff(np.array(slow, int), axis=0, prepend=0) != 0
        assert changes.sum(axis=0).max() <= 2
        assert changes[20:].sum() <= 3
        assert number - 1 <= slow[-1].sum() <= number


def test_noise_does_flip_a_client_that_is_judged_by_its_last_time_alone() -> None:
    """So that the test above can fail: the same clients without memory or margin come and go."""
    time, changes = np.array([1.0] * 9 + [1.05]), 0
    generator = np.random.default_rng(0)
    before = False
    for _ in range(200):
        noisy = time * np.exp(0.05 * generator.standard_normal(10))
        capacity = Stragglers(share=0.1, margin=0.0, warmup=1)
        slow = bool(observe(capacity, begun(capacity, 10), noisy)["width"][9] < 1)
        before, changes = slow, changes + (slow != before)
    assert changes > 20


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_stragglers_change_when_conditions_do(power: float) -> None:
    capacity = Stragglers(share=0.2, sizes=())
    state = begun(capacity, 5)
    for slowest in (4, 2, 0):
        time = np.ones(5)
        time[slowest] = 2.0
        state = observe(capacity, state, time * state["width"] ** power)
        state = observe(capacity, state, time * state["width"] ** power)
        assert np.flatnonzero(state["width"] < 1).tolist() == [slowest]  # after two rounds
        for _ in range(10):
            state = observe(capacity, state, time * state["width"] ** power)
        assert np.flatnonzero(state["width"] < 1).tolist() == [slowest]
        assert (time * state["width"] ** power).max() == pytest.approx(1.0, rel=0.05)


def test_clients_that_are_sampled_rarely() -> None:
    """1000 clients, of which 5 % take part in a round, with 5 % of noise: the slowest are known."""
    generator = np.random.default_rng(0)
    time = np.exp(0.25 * generator.standard_normal(1000))
    capacity = Stragglers(share=0.2, sizes=())
    state = begun(capacity, 1000)
    assert state["width"].tolist() == [1.0] * 1000
    for _ in range(200):
        took = generator.random(1000) < 0.05
        noise = np.exp(0.05 * generator.standard_normal(1000))
        seconds = np.where(took, time * state["width"] ** 1.5 * noise, np.nan)
        state = observe(capacity, state, seconds)
        never = np.isnan(state["time"])
        assert (state["width"][never] == 1).all()  # nobody is judged unseen
    slow, target = state["width"] < 1, float(state["target"])
    assert target == pytest.approx(np.quantile(time, 0.8), rel=0.05)
    assert slow[time > 1.2 * target].mean() > 0.98
    assert not slow[time < 0.9 * target].any()
    after = time[slow] * state["width"][slow] ** 1.5
    assert np.quantile(after / target, 0.9) < 1.12


def test_calibration_may_be_less_frequent() -> None:
    capacity, time = Stragglers(every=5, warmup=3), np.array([1.0] * 4 + [2.0])
    state, widths = begun(capacity, 5), []
    for _ in range(12):
        state = observe(capacity, state, time * state["width"])
        widths.append(float(state["width"][4]))
    assert [i for i in range(1, 12) if widths[i] != widths[i - 1]] in ([4], [4, 9])
    assert widths[:4] == [1.0] * 4


def test_with_several_models_a_client_is_compared_model_by_model() -> None:
    """The second model costs ten times as much. A client that trains it is not slower for that."""
    capacity = Stragglers(share=0.2, sizes=())
    state = begun(capacity, 10, models=2)
    speed = np.array([1.0] * 9 + [1.5])
    generator = np.random.default_rng(0)
    for _ in range(20):
        which = generator.integers(2, size=10)
        seconds = np.full((2, 10), np.nan)
        seconds[which, np.arange(10)] = speed * np.array([1.0, 10.0])[which] * state["width"]
        state = observe(capacity, state, seconds)
    assert np.flatnonzero(state["width"] < 1).tolist() == [9]
    assert state["width"][9] == pytest.approx(1 / 1.5, rel=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": 0.0}, "capacity.share is 0: it must be above 0 and below 1"),
        ({"share": 1.0}, "capacity.share is 1: it must be above 0 and below 1"),
        ({"quantile": 1.5}, "capacity.quantile is 1.5: it must be above 0 and below 1"),
        ({"noise": 0.0}, "capacity.noise is 0: it must be above 0 and below 1"),
        ({"margin": -1.0}, "capacity.margin is -1: it must be from 0 to 10"),
        ({"seconds": 0.0}, "capacity.seconds is 0: it must be above 0"),
        ({"clusters": 0}, "capacity.clusters is 0: it must be at least 1"),
        ({"warmup": 0}, "capacity.warmup is 0: it must be at least 1"),
        ({"every": 0}, "capacity.every is 0: it must be at least 1"),
        ({"sizes": (0.0,)}, "capacity.sizes is [0.0]: give fractions of a model above 0 and up to"),
        ({"quantile": 0.5, "seconds": 1.0}, "are both given: choose one target"),
    ],
)
@pytest.mark.parametrize("member", [Stragglers, Exclude])
def test_stragglers_that_make_no_sense(
    member: type[Stragglers], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as caught:
        begun(member(**options), 5)
    assert words in str(caught.value)


def test_excluded_stragglers_are_left_out() -> None:
    capacity, time = Exclude(share=0.2), np.array([1.0] * 8 + [1.25, 2.0])
    state = begun(capacity, 10)
    for _ in range(6):
        seconds = np.where(capacity.widths(state) > 0, time, np.nan)
        state = observe(capacity, state, seconds)
    assert capacity.widths(state).tolist() == [1.0] * 8 + [0.0, 0.0]


@pytest.mark.parametrize("narrow", [1.0, 0.5])
def test_without_excluded_clients_the_estimate_is_the_average_over_the_others(
    narrow: float, blobs: Federation
) -> None:
    """By the expectation over all cohorts; some of the others may hold parts."""
    experiment = Experiment([Task(small, blobs)], Full(), capacity=Fixed(sizes=(1.0,)))
    engine = make("sequential", experiment, "cpu")
    models = engine.initial()
    units, shares = experiment.units, experiment.shares
    widths = np.array([1.0, 0.0, narrow, 1.0, 0.0, narrow])
    policies = {"capacity": Fixed(each=tuple(widths)), "submodel": Ordered()}
    states = {"capacity": {"width": widths}, "submodel": {}}
    found = hold(policies, units, models, shares, states, 0, 1)
    assert found is not None
    present = found.present(shares)
    assert present.sum() == pytest.approx(1.0)
    assert present[0, widths == 0].tolist() == [0.0, 0.0]
    sent, everything = torch.randn(6, len(models[0].params)), np.arange(len(models[0].params))
    expected = np.zeros(len(everything))
    owns = np.zeros((6, len(everything)))
    for i in np.flatnonzero(widths).tolist():  # each client is drawn alone with chance 1/4
        plan = Plan(np.array([i]), np.zeros(1, int), np.full(1, 0.25), 4 * present[0, [i]])
        plan = found.divide(plan)
        part = plan.held(0)
        places = everything if part is None else part.places.numpy()
        owns[i, places] = shares[0, i]
        sums = Unbiased().begin({}, [models[0].weights], plan)
        Unbiased().add(sums, plan, chunk(plan, 0, sent[i][places]))
        expected += 0.25 * Unbiased().finish({}, sums)[0][0].update.double().numpy()
    average = (owns * sent.double().numpy()).sum(axis=0) / owns.sum(axis=0)
    np.testing.assert_allclose(expected, average, rtol=1e-4, atol=1e-6)


@given(
    time=st.floats(1e-6, 1e6),
    power=st.floats(0.4, 2.8),
    widths=st.lists(st.sampled_from([1.0, 0.9, 0.7, 0.5, 0.3]), min_size=12, max_size=30),
    gaps=st.lists(st.integers(1, 50), min_size=30, max_size=30),
    seed=st.integers(0, 2**31),
)
def test_times_and_powers_are_found_from_any_widths(
    time: float, power: float, widths: list[float], gaps: list[int], seed: int
) -> None:
    """Against T r^k with 2 % of noise; the filter's own variances stay a covariance matrix."""
    generator, times, now = np.random.default_rng(seed), Times.unknown((1, 3)), 0
    where = np.array([0]), np.array([1])
    for width, gap in zip([1.0, *widths], gaps, strict=False):
        now += gap
        seconds = time * width**power * np.exp(0.02 * generator.standard_normal(1))
        times.learn(where, seconds, np.array([width]), now, 0.05)
        var, other, both = (each[where] for each in (times.var, times.power_var, times.both))
        assert (var > 0).all()
        assert (other > 0).all()
        assert (both**2 <= var * other * (1 + 1e-9)).all()
    found = times.of_clients()
    assert np.isnan(found[[0, 2]]).all()
    width = np.mean(widths)  # where it was measured, the predicted time is right
    predicted = found[1] * width ** times.powers()[1]
    assert predicted == pytest.approx(time * width**power, rel=0.25)
    if len(set(widths)) > 2 and widths.count(1.0) > 2:
        assert found[1] == pytest.approx(time, rel=0.15)


def test_the_filter_is_kalmans() -> None:
    """Against the matrix form of the filter, for one pair and times that hold no surprise."""
    generator, times = np.random.default_rng(4), Times.unknown((1, 1))
    where, noise = (np.array([0]), np.array([0])), 0.05
    rounds, widths = [1, 2, 3, 7, 8, 30], [1.0, 1.0, 0.5, 0.5, 0.7, 1.0]
    mean, cov, last = np.array([0.0, POWER]), np.diag([1e5, UNSURE**2]), 0
    for now, width in zip(rounds, widths, strict=True):
        seconds = 3.0 * width**1.2 * np.exp(0.02 * generator.standard_normal())
        times.learn(where, np.array([seconds]), np.array([width]), now, noise)
        h = np.array([1.0, np.log(width)])
        cov = cov + np.diag([(DRIFT * noise) ** 2 * (now - last), 0.0])
        gain = cov @ h / (h @ cov @ h + noise**2)
        mean = mean + gain * (np.log(seconds) - h @ mean)
        cov, last = cov - np.outer(gain, h @ cov), now
        assert times.log[0, 0] == pytest.approx(mean[0], abs=1e-3)
        assert times.power[0, 0] == pytest.approx(mean[1], abs=1e-3)
    assert times.var[0, 0] == pytest.approx(cov[0, 0], rel=1e-3)
    assert times.power_var[0, 0] == pytest.approx(cov[1, 1], rel=1e-3)
    assert times.both[0, 0] == pytest.approx(cov[0, 1], rel=1e-3)


# --- in the round


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("submodel", SUBMODELS)
def test_every_pair_trains_and_costs_less(submodel: str, capacity: str, blobs: Federation) -> None:
    options = {"fixed": {"sizes": (1.0, 0.5)}, "stragglers": {"share": 0.4, "margin": 0.0}}
    chosen = CAPACITIES[capacity](**options.get(capacity, {}))
    run = rota.run(
        [Task(small, blobs, lr=0.1, batch=5)],
        Full(),
        estimator=FedAvg(),
        devices=rota.Devices(gflops=1e-4, spread=0.5),
        capacity=chosen,
        submodel=SUBMODELS[submodel](),
        rounds=5,
    )
    assert run.summary["failures"] == 0
    whole = 6 * run.state.models[0].nbytes
    last = run.rounds["bytes_up"][-1] - run.rounds["bytes_up"][-2]
    assert last == whole if capacity == "whole" else last < whole


def test_parts_train_in_any_company() -> None:
    """Several models, K-Vib, clients that cannot always be reached, parts: with no special code."""
    data = [federation(SIZES, seed=seed) for seed in (0, 1)]
    tasks = [Task(small, each, batch=5, name=f"t{n}") for n, each in enumerate(data)]
    for sampler in (KVib(3), Uniform(3), rota.sampling.Gvr(3), rota.sampling.Optimal(3)):
        run = rota.run(
            tasks,
            sampler,
            availability=rota.Availability(chance=0.8),
            capacity=Fixed(sizes=(1.0, 0.5, 0.25)),
            rounds=6,
        )
        assert run.summary["failures"] == 0
        assert all(torch.isfinite(model.params).all() for model in run.state.models)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("submodel", SUBMODELS)
def test_resume_is_exact(submodel: str, engine: str, blobs: Federation, tmp_path: Path) -> None:
    experiment = Experiment(
        [Task(small, blobs, batch=5)],
        Uniform(4),
        FedAvg(),
        devices=rota.Devices(gflops=1e-4, spread=1.0),
        capacity=Stragglers(share=0.4),
        submodel=SUBMODELS[submodel](),
        rounds=8,
    )
    whole = execute(experiment, out=tmp_path / "whole", engine=engine)

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(experiment, out=tmp_path / "broken", engine=engine, watch=stop)
    again = execute(experiment, out=tmp_path / "broken", engine=engine, resume=True)
    assert torch.equal(whole.state.models[0].params, again.state.models[0].params)
    assert whole.records == again.records


def test_with_stragglers_rounds_are_shorter(blobs: Federation) -> None:
    """The slowest client's rounds come within 10 % of the target, and the whole run is faster."""

    def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )

    task = Task(wide, federation([30] * 10), batch=10)
    devices = rota.Devices(gflops=1e-4, mbps=1e6, spread=0.25)
    seconds = {}
    for capacity in (Whole(), Stragglers(share=0.2, sizes=())):
        run = rota.run(
            [task],
            Full(),
            estimator=FedAvg(),
            devices=devices,
            capacity=capacity,
            rounds=20,
            seed=1,
        )
        clock = np.diff(np.array([0.0, *run.rounds["seconds"]]))
        seconds[type(capacity).__name__] = clock
        if isinstance(capacity, Stragglers):
            target = float(run.state.policies["capacity"]["target"])
            assert clock[-5:].max() < 1.1 * target
    assert seconds["Stragglers"][-5:].sum() < 0.9 * seconds["Whole"][-5:].sum()


@pytest.mark.parametrize("submodel", ["invariant", "fjord", "heterofl"])
def test_engines_agree_on_parts(submodel: str, blobs: Federation) -> None:
    states = []
    for engine in ("sequential", "batched"):
        experiment = Experiment(
            [Task(small, blobs, batch=5)],
            Full(),
            FedAvg(),
            capacity=Fixed(sizes=(1.0, 0.5)),
            submodel=SUBMODELS[submodel](),
            rounds=3,
        )
        states.append(execute(experiment, engine=engine, device="cpu").state)
    torch.testing.assert_close(
        states[0].models[0].params, states[1].models[0].params, rtol=1e-4, atol=1e-5
    )


def test_a_client_of_width_0_is_left_out(blobs: Federation) -> None:
    class Out(Whole):
        def widths(self, state: Any) -> Array | None:
            return np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])

    experiment = Experiment([Task(linear, blobs)], Full(), FedAvg(), capacity=Out())
    engine = make("sequential", experiment, "cpu")
    _, line = loop.play(experiment, engine, loop.begin(experiment, engine))
    assert line["cohort"]["blobs"] == [0, 2, 3, 5]


# --- parts that do not train plainly


def rows(
    data: Federation, how: str, widths: list[float], module: Any = small, steps: int = 1
) -> tuple[Job, list[Chunk]]:
    """Client i trains an ordered part of width widths[i]; cuts are made for 0.5 and 0.25."""
    task = Task(module, data, batch=4, steps=steps, lr=0.3)
    experiment = Experiment([task], devices=rota.Devices(gflops=1e-6), capacity=Fixed())
    engine = make("sequential", experiment, "cpu")
    (model,), units = engine.initial(), experiment.units[0]
    cuts = tuple(
        SubModel(0, width, 0.3, keep(units, [np.arange(n) for n in units.counts(width)]))
        for width in (0.5, 0.25)
    )
    cut = np.array([{1.0: 0, 0.5: 1, 0.25: 2}[width] for width in widths])
    ones = np.ones(len(widths))
    plan = Plan(np.arange(len(widths)), np.zeros(len(widths), int), ones, ones, cut, cuts)
    job = Job(1, [model], plan, duty([model], plan), units=experiment.units, how=how)  # type: ignore[arg-type]
    return job, list(engine.train(job))


@pytest.mark.parametrize("module", [small, network])
@pytest.mark.parametrize("own", [1.0, 0.5])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_fjords_mini_batch_is_that_of_an_ordered_part(
    place: int, own: float, module: Any, blobs: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mini-batch at width p gives the update of an ordered part of width p, and 0 elsewhere."""
    narrower = [width for width in (1.0, 0.5, 0.25) if width <= own]
    if place >= len(narrower):
        pytest.skip("there are fewer widths")
    width = narrower[place]
    monkeypatch.setattr("rota.engine.sequential.draw", lambda key, number, steps: [place] * steps)
    job, chunks = rows(blobs, "nested", [own] * 3, module)
    _, plainly = rows(blobs, "plain", [width] * 3, module)
    params, buffers = job.models[0].weights
    for row, (got, expected) in enumerate(zip(chunks, plainly, strict=True)):
        assert got.ok.all()
        update, after = torch.zeros_like(params), buffers.clone()
        part = next((each for each in job.plan.cuts if each.width == width), None)
        update[slice(None) if part is None else part.places] = expected.update[0]
        after[slice(None) if part is None else part.buffer_places] = expected.buffers[0]
        mine = job.plan.held(row)
        if mine is not None:
            update, after = update[mine.places], after[mine.buffer_places]
        torch.testing.assert_close(got.update[0], update)
        torch.testing.assert_close(got.buffers[0], after)
        assert got.costs.computing == pytest.approx(expected.costs.computing)
    assert sum(float(each.update.norm()) for each in chunks) > 0


def test_fjord_draws_widths_evenly_and_pays_for_their_mean(blobs: Federation) -> None:
    drawn = np.concatenate([draw(key, 3, 50) for key in range(400)])
    count = np.bincount(drawn, minlength=3)
    assert np.abs(count - len(drawn) / 3).max() < 5 * np.sqrt(len(drawn) * 2 / 9)

    def per_example(how: str, width: float, steps: int) -> float:
        (one,) = rows(blobs, how, [width], steps=steps)[1]
        return float((one.costs.computing / one.examples).item())

    mean = np.mean([per_example("plain", width, 1) for width in (1.0, 0.5, 0.25)])
    assert per_example("nested", 1.0, 300) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(("own", "narrow"), [(1.0, 0.5), (1.0, 0.25), (0.5, 0.25)])
def test_the_own_part_teaches_narrower_ones(
    own: float, narrow: float, blobs: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FjORD's self-distillation: one mini-batch against both parts' gradients by hand."""
    widths = [width for width in (1.0, 0.5, 0.25) if width <= own]
    place = widths.index(narrow)
    monkeypatch.setattr("rota.engine.sequential.draw", lambda key, number, steps: [place] * steps)
    job, (_, got) = rows(blobs, "distilled", [own] * 2)
    cut = {part.width: part.cut for part in job.plan.cuts}
    cut[1.0] = keep(UNITS, [np.arange(layer.size) for layer in UNITS.layers])
    x, y = blobs.train.of(1)
    key = local.row_key(0, 1, 1, 0)
    (batch,) = batches(Task(small, blobs, batch=4, steps=1), len(y), rng.as_tensor([key])[0], 1)
    outputs, modules = {}, {}
    for width in (own, narrow):
        modules[width] = build(MODULE, cut[width])
        part = job.models[0].params[cut[width].places]
        nn.utils.vector_to_parameters(part, modules[width].parameters())
        outputs[width] = modules[width](x[batch])
    right = nn.functional.one_hot(y[batch], 3)
    taught = outputs[own].detach().softmax(1)  # no gradient flows back to the teacher
    expected = torch.zeros(len(job.models[0].params))
    for width, goal in ((own, right), (narrow, taught)):
        loss = -(goal * outputs[width].log_softmax(1)).sum(1).mean()
        parameters = list(modules[width].parameters())
        found = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        expected[cut[width].places] += 0.3 * found
    torch.testing.assert_close(got.update[0], expected[cut[own].places])
    _, (_, wide) = rows(blobs, "plain", [own] * 2)
    _, (_, small_one) = rows(blobs, "plain", [narrow] * 2)
    both = wide.costs.computing + small_one.costs.computing
    assert got.costs.computing == pytest.approx(both)


def test_self_distillation_runs_and_needs_cross_entropy(blobs: Federation) -> None:
    given: dict[str, Any] = {
        "estimator": FedAvg(),
        "capacity": Fixed(sizes=(1.0, 0.5)),
        "submodel": Fjord(distil=True),
        "rounds": 8,
    }
    run = rota.run([Task(small, blobs, lr=0.1, batch=5)], Full(), **given)
    assert run.summary["failures"] == 0
    assert run.rounds["accuracy"][-1] > run.rounds["accuracy"][0]
    task = Task(small, blobs, loss=lambda outputs, y: (outputs.argmax(1) - y).float() ** 2)
    with pytest.raises(BadInput, match=r"submodel\.distil needs cross-entropy as the loss"):
        rota.run([task], Full(), **given)


def test_heterofl_scales_smaller_layers_in_training_alone(blobs: Federation) -> None:
    job, (whole, half) = rows(blobs, "scaled", [1.0, 0.5])
    _, (alone, plainly) = rows(blobs, "plain", [1.0, 0.5])
    assert torch.equal(whole.update, alone.update)
    assert not torch.allclose(half.update, plainly.update)
    # the same step by hand: hidden layers of 4 of 8 and 3 of 6 units, twice as large in training
    (part, _), params = job.plan.cuts, job.models[0].params
    x, y = blobs.train.of(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    nn.utils.vector_to_parameters(params[part.places], module.parameters())
    key = local.row_key(0, 1, 1, 0)
    (batch,) = batches(Task(small, blobs, batch=4, steps=1), len(y), rng.as_tensor([key])[0], 1)
    hidden = (2 * module[0](x[batch])).relu()
    hidden = (2 * module[2](hidden)).relu()
    torch.nn.functional.cross_entropy(module[4](hidden), y[batch]).backward()
    gradient = torch.cat([p.grad.view(-1) for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(half.update[0], 0.3 * gradient)
    small_one = scale(build(MODULE, part.cut), MODULE).eval()
    torch.testing.assert_close(small_one(x), build(MODULE, part.cut)(x))


def test_parts_that_are_not_nested_are_refused(blobs: Federation) -> None:
    class Loose(Random):
        trains = "nested"

    task = Task(small, blobs)
    capacity = Fixed(sizes=(1.0, 0.75, 0.5))
    with pytest.raises(BadInput, match=r"the part of width 0\.5 is no part of that of"):
        rota.run([task], Full(), estimator=FedAvg(), capacity=capacity, submodel=Loose(), rounds=2)


@pytest.mark.parametrize("name", ["full", "optimal", "mmfl-gvr", "mmfl-lvr"])
def test_stragglers_are_timed_in_full_if_they_trained_when_they_were_asked(
    name: str, blobs: Federation
) -> None:
    sampler = rota.sampling.SAMPLERS[name](**({} if name == "full" else {"budget": 6}))
    devices = rota.Devices(gflops=1e-4, mbps=1e6, spread=0.5)
    run = rota.run(
        [Task(small, blobs, batch=5)],
        sampler,
        estimator=Unbiased(),
        devices=devices,
        capacity=Stragglers(warmup=9),
        rounds=4,
    )
    time = run.state.policies["capacity"]["time"]
    speed = devices.profile(6, 0).speed
    work = 3 * 2 * (4 * 8 + 8 * 6 + 6 * 3) * blobs.train.sizes
    np.testing.assert_allclose(time, work / speed, rtol=1e-3)
