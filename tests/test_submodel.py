"""Sub-models: capacities, choices of units, and what estimators make of parts of models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear
from torch import nn

import rota
from rota import loop
from rota.arrays import Array
from rota.data import Federation
from rota.engine import make
from rota.errors import BadInput
from rota.estimate import Adam, FedAvg, FedVarp, Unbiased
from rota.experiment import Experiment
from rota.plan import Chunk, Costs, Job, Model, Plan, Seen, SubModel, Task, duty
from rota.running.run import execute
from rota.sampling import Full, KVib, Uniform
from rota.submodel import CAPACITIES, SUBMODELS, Fixed, Invariant, Ordered, Stragglers, Whole
from rota.submodel.choice import Importance, Random, Rolling, Wanted
from rota.submodel.cut import keep
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
        server = Adam(lr=0.1)
        (model,), moments = loop.apply(server, job, Seen.nothing(1), [found], {})
        same = (model.params == WEIGHTS.params).numpy()
        assert same[~owns].all()
        assert not same[owns].any()
        for moment in moments.values():
            if moment.shape == WEIGHTS.params.shape:
                assert not moment[torch.from_numpy(~owns)].any()


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
    assert state["threshold.0"][0] > 10  # by half of the least change of 10 per round, three times


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


def observe(capacity: Stragglers, state: Any, seconds: Array) -> Any:
    clients = len(seconds)
    plan = Plan(np.arange(clients), np.zeros(clients, int), np.ones(clients), np.full(clients, 0.1))
    seen = Seen.nothing(clients)
    seen.costs.seconds[:] = seconds
    return capacity.observe(state, np.full((1, clients), 0.1), plan, seen)


def test_the_slowest_become_stragglers_and_meet_the_target() -> None:
    capacity, time = Stragglers(share=0.2), np.array([1.0] * 8 + [1.25, 2.0])
    state = capacity.init(np.full((1, 10), 0.1), 0)
    for _ in range(6):
        state = observe(capacity, state, time * state["width"])
    assert state["width"].tolist() == [1.0] * 8 + [0.85, 0.5]
    assert float(state["target"]) == pytest.approx(1.0)
    exact = Stragglers(share=0.2, sizes=())
    state = exact.init(np.full((1, 10), 0.1), 0)
    for _ in range(6):
        state = observe(exact, state, time * state["width"])
    assert state["width"][8:] == pytest.approx([0.8, 0.5])


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_five_per_cent_makes_nobody_a_straggler_and_no_straggler_a_normal_client(
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    capacity, time = Stragglers(share=0.2), np.array([1.0] * 8 + [1.25, 1.6])
    state = capacity.init(np.full((1, 10), 0.1), 0)
    slow = []
    for _ in range(200):
        noise = np.exp(0.05 * generator.standard_normal(10))
        state = observe(capacity, state, time * state["width"] * noise)
        slow.append((state["width"] < 1).tolist())
    assert all(each == [False] * 8 + [True, True] for each in slow[3:])


def test_stragglers_change_when_conditions_do() -> None:
    capacity = Stragglers(share=0.2)
    state = capacity.init(np.full((1, 5), 0.2), 0)
    for slowest in (4, 2):
        time = np.ones(5)
        time[slowest] = 2.0
        for _ in range(15):
            state = observe(capacity, state, time * state["width"])
        assert np.flatnonzero(state["width"] < 1).tolist() == [slowest]


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


@pytest.mark.parametrize("submodel", SUBMODELS)
def test_resume_is_exact(submodel: str, blobs: Federation, tmp_path: Path) -> None:
    experiment = Experiment(
        [Task(small, blobs, batch=5)],
        Uniform(4),
        FedAvg(),
        devices=rota.Devices(gflops=1e-4, spread=1.0),
        capacity=Stragglers(share=0.4),
        submodel=SUBMODELS[submodel](),
        rounds=8,
    )
    whole = execute(experiment, out=tmp_path / "whole")

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(experiment, out=tmp_path / "broken", watch=stop)
    again = execute(experiment, out=tmp_path / "broken", resume=True)
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


def test_engines_agree_on_parts(blobs: Federation) -> None:
    states = []
    for engine in ("sequential", "batched"):
        experiment = Experiment(
            [Task(small, blobs, batch=5)],
            Full(),
            FedAvg(),
            capacity=Fixed(sizes=(1.0, 0.5)),
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
