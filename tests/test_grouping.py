"""Groupings: who learns with whom, what it costs, and what of a run goes on with new groups."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE, federation, linear, network
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import subspace_angles
from scipy.spatial.distance import squareform
from sklearn.metrics import silhouette_score
from test_store import PARTNERS, contents, same, stop_after
from torch import nn

import rota
from rota.arrays import Array
from rota.data import partition
from rota.data.federation import Federation
from rota.engine import make
from rota.estimate import Adam, FedAvg
from rota.experiment import Experiment, State
from rota.grouping import GROUPINGS, Cfl, Groups, Ifca, Local, One, Pacfl, Selective, similar
from rota.grouping.regroup import regroup
from rota.loop import begin, play
from rota.plan import Task
from rota.policies import KINDS
from rota.running.run import Interrupted, Run, execute
from rota.sampling import SAMPLERS, Full
from rota.scores import SCORES
from rota.submodel import Fixed
from rota.world.availability import Availability
from rota.world.drift import Drift

THIRDS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
SIZES = [5, 12, 7, 9, 8, 6, 10, 4, 11, 7, 9, 6]
N = len(SIZES)


def three_ways(balanced: float = 0.0, validation: int = 200, seed: int = 0) -> Task:
    """Nine clients in three partitions of scikit-learn's digits."""
    data = rota.data.digits(
        partition.three_way(balanced, 9), matched_test=True, validation=validation, seed=seed
    )
    return Task(rota.models.logistic, data, lr=0.5, name="digits")


def blobs(classes: int = 3) -> Federation:
    """Small clients of three kinds, each with inputs of its own and two classes."""
    data = federation(SIZES, classes=classes)
    train = [data.train.of(client) for client in range(len(SIZES))]
    for client, (x, y) in enumerate(train):
        x += 6.0 * torch.nn.functional.one_hot(torch.tensor(client // 4), 4)
        y.copy_(torch.where(torch.arange(len(y)) % 2 == 0, client // 4, (client // 4 + 1) % 3))
    test = data.test.of(0)
    own = rota.from_clients(train, test, classes=classes, name="blobs", validation=test)
    return own


def small(**changes: Any) -> Task:
    return replace(Task(network, blobs(), batch=4, lr=0.3, name="blobs"), **changes)


def members(run: Run) -> list[list[int]]:
    """The groups of the run's last regrouping."""
    told = [record["groups"] for record in run.records if "groups" in record]
    found: list[list[int]] = next(iter(told[-1].values()))["members"]
    return found


# ---- similarities and groups


def right(*rows: str) -> Array:
    return np.array([[int(letter) for letter in row] for row in rows], np.uint8)


def test_similarities_are_what_they_are_called() -> None:
    a = right("110000", "000000", "111111")
    overlap = [[2 / 6, 0, 2 / 6], [0, 0, 0], [2 / 6, 0, 1]]
    jaccard = [[1, 0, 2 / 6], [0, 0, 0], [2 / 6, 0, 1]]
    agreement = [[1, 4 / 6, 2 / 6], [4 / 6, 1, 0], [2 / 6, 0, 1]]
    for measure, expected in (("overlap", overlap), ("jaccard", jaccard), ("agreement", agreement)):
        np.testing.assert_allclose(similar.similarity(a, a, measure), expected)  # type: ignore[arg-type]


def as_printed(near: Array, threshold: float, best: bool) -> list[int]:
    """The corrected pseudo-code of Selective FedAvg, step by step."""
    groups: list[list[int]] = []
    for i in range(len(near)):
        fits = [(min(near[i, k] for k in group), -g) for g, group in enumerate(groups)]
        able = [each for each in fits if each[0] >= threshold]
        if not able:
            groups.append([i])
        else:
            groups[-(max(able) if best else max(able, key=lambda each: each[1]))[1]].append(i)
    return [g for i in range(len(near)) for g, group in enumerate(groups) if i in group]


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("block", [4, 1024])
def test_clients_are_placed_as_the_corrected_pseudo_code_says(
    best: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similar, "BLOCK", block)
    generator = np.random.default_rng(0)
    for trial in range(30):
        vectors = generator.random((13, 20)) < generator.uniform(0.2, 0.8, (13, 1))
        near = similar.similarity(vectors, vectors, "jaccard")
        threshold = float(generator.choice(near.ravel())) if trial % 2 else generator.random()
        of = similar.place(lambda a, b: near[np.ix_(a, b)], np.full(13, -1), threshold, best)  # noqa: B023
        assert of.tolist() == as_printed(near, threshold, best)


def test_disjoint_blocks_are_three_groups_and_the_printed_comparison_mixes_them() -> None:
    vectors = right(*["110000"] * 2, *["001100"] * 2, *["000011"] * 2)
    near = similar.similarity(vectors, vectors, "overlap")
    for best in (False, True):
        of = similar.place(lambda a, b: near[np.ix_(a, b)], np.full(6, -1), 0.3, best)
        assert of.tolist() == [0, 0, 1, 1, 2, 2]
    printed = similar.place(lambda a, b: -near[np.ix_(a, b)], np.full(6, -1), -0.29)
    assert printed.tolist() == [0, 1, 0, 1, 0, 1], "`<` puts those together that share nothing"


def test_newcomers_join_groups_that_exist() -> None:
    vectors = right("110000", "001100", "110000", "000011", "001000")
    near = similar.similarity(vectors, vectors, "overlap")
    known = np.array([0, 1, -1, -1, -1])
    of = similar.place(lambda a, b: near[np.ix_(a, b)], known, 1 / 6)
    assert of.tolist() == [0, 1, 0, 2, 1]
    assert known.tolist() == [0, 1, -1, -1, -1]


def test_silhouettes_are_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    for _ in range(10):
        points = generator.random((12, 3))
        distance = np.linalg.norm(points[:, None] - points, axis=2)
        of = generator.integers(4, size=12)
        of[:2] = 7, 9  # two clients alone
        known = silhouette_score(distance, of, metric="precomputed")
        assert similar.silhouette(distance, of) == pytest.approx(known)


def crowd(clients: int, examples: int, kinds: int, noise: float) -> tuple[Array, Array]:
    """Vectors of kinds of clients that know different examples, with errors."""
    generator = np.random.default_rng(1)
    kind = generator.integers(kinds, size=clients)
    knows = np.arange(examples) % kinds == kind[:, None]
    return (knows ^ (generator.random((clients, examples)) < noise)).astype(np.uint8), kind


def agree(of: Array, kind: Array) -> bool:
    """Whether two groupings are the same but for their numbers."""
    pairs = len(np.unique(np.stack([of, kind]), axis=1).T)
    return pairs == len(np.unique(of)) == len(np.unique(kind))


def test_a_thousand_clients_of_seven_kinds_are_seven_groups() -> None:
    """How long it takes is in the results of `rota bench groups`."""
    vectors, kind = crowd(1000, 5000, 7, 0.1)
    even, odd = vectors[:, ::2], vectors[:, 1::2]
    threshold = similar.find_threshold(even, odd, "overlap")
    near = similar.similarity(even, even, "overlap")
    of = similar.place(lambda a, b: near[np.ix_(a, b)], np.full(1000, -1), threshold)
    assert agree(of, kind)


def test_many_clients_are_not_compared_in_pairs() -> None:
    vectors, kind = crowd(20_000, 64, 3, 0.05)
    compared = 0

    def near(a: Array, b: Array) -> Array:
        nonlocal compared
        compared += len(a) * len(b)
        return similar.similarity(vectors[a], vectors[b], "agreement")

    of = similar.place(near, np.full(20_000, -1), 0.6, most=4)
    assert compared < 20_000 * (similar.BLOCK + 3 * 4 * 4)
    assert (
        np.mean([(of[kind == k] == np.bincount(of[kind == k]).argmax()).mean() for k in range(3)])
        > 0.99
    )


# ---- whole runs


@pytest.mark.parametrize(
    "grouping", [Selective(), Selective(similarity="agreement"), Pacfl(threshold=0.6), Cfl()]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_true_partitions_are_recovered_where_nothing_is_shared(grouping: Any, seed: int) -> None:
    run = rota.run([three_ways(seed=seed)], Full(), rounds=20, grouping=grouping, evaluate=20)
    assert members(run) == THIRDS
    assert list(run.models) == ["digits.0", "digits.1", "digits.2"]


@pytest.mark.parametrize("grouping", [Selective(), Pacfl(), Cfl()])
def test_one_group_is_plain_fedavg_where_all_is_balanced(grouping: Any) -> None:
    task = three_ways(1.0)
    plain = rota.run([task], Full(), rounds=4)
    run = rota.run([task], Full(), rounds=4, grouping=grouping)
    assert len(run.state.models) == 1
    assert torch.equal(run.state.models[0].params, plain.state.models[0].params)
    np.testing.assert_array_equal(run.state.shares, plain.state.shares)
    assert [each["accuracy"] for each in run.records] == [
        each["accuracy"] for each in plain.records
    ]


def test_the_default_is_one_group() -> None:
    run = rota.run([small()], Full(), rounds=2)
    assert isinstance(run.experiment.policies["grouping"], One)
    again = rota.run([small()], Full(), rounds=2, grouping=One())
    assert same(run.state, again.state)


def test_selective_pays_for_its_extra_round() -> None:
    task = small()
    plain = rota.run([task], Full(), rounds=2)
    run = rota.run([task], Full(), rounds=2, grouping=Selective(alone=3))
    model = run.state.models[0].nbytes
    assert run.state.bytes_up - plain.state.bytes_up == N * model
    assert run.state.bytes_down - plain.state.bytes_down == N * model
    first, usual = run.records[0], plain.records[0]
    assert first["client_seconds"] == pytest.approx(4 * usual["client_seconds"])
    assert first["asked_for_groups"] == 3 * N
    assert run.records[1]["client_seconds"] == pytest.approx(plain.records[1]["client_seconds"])
    assert "groups" not in run.records[1]
    profile = run.experiment.devices.profile(N, 0)
    link = 2 * model / profile.link[0]
    computing = 3 * (usual["seconds"] - link)
    assert run.state.seconds - plain.state.seconds == pytest.approx(computing + link, rel=1e-6)


def test_pacfl_pays_for_its_vectors() -> None:
    task, vectors, wide = small(), 2, 4
    plain = rota.run([task], Full(), rounds=1)
    run = rota.run([task], Full(), rounds=1, grouping=Pacfl(vectors=vectors, threshold=0.0))
    assert run.state.bytes_up - plain.state.bytes_up == N * 4 * (vectors * wide + 1)
    assert run.state.bytes_down == plain.state.bytes_down
    more = run.summary["client_seconds"] - plain.summary["client_seconds"]
    few, many = np.minimum(SIZES, wide), np.maximum(SIZES, wide)
    flops = 4.0 * many * few**2 + 27.0 * few**3
    profile = run.experiment.devices.profile(N, 0)
    clients = np.arange(N)
    _, computing = profile.seconds(clients, flops, np.zeros(N, np.int64), 1)
    assert more == pytest.approx(computing.sum())


def test_local_models_are_trained_alone_for_as_long_as_in_several_rounds() -> None:
    """The vectors are of the models that `local` grouping has after so many rounds."""
    task = small()
    alone = rota.run([task], Full(), rounds=3, grouping=Local())
    experiment = Experiment([task], Full(), grouping=Selective(alone=3))
    engine = make("sequential", experiment, "cpu")
    state, _ = regroup(experiment, engine, begin(experiment, engine))
    held = task.federation.validation
    assert held is not None
    packed = state.policies["grouping"]["right.0"]
    bits = np.unpackbits(packed, axis=1, count=len(held)).astype(bool)
    for client, (module, row) in enumerate(zip(alone.models.values(), bits, strict=True)):
        with torch.no_grad():
            known = (module.eval()(held.x).argmax(1) == held.y).numpy()
        assert (known == row).mean() > 0.98, client


def test_alone_every_client_has_a_model() -> None:
    run = rota.run([small(), small(name="other")], Full(), rounds=2, grouping=Local())
    assert len(run.state.models) == 2 * N
    np.testing.assert_array_equal(run.state.shares, np.concatenate([np.eye(N)] * 2))


def test_ifca_moves_clients_to_the_model_with_the_least_loss() -> None:
    task = three_ways()
    run = rota.run([task], Full(), rounds=6, grouping=Ifca(groups=3))
    engine = make("sequential", run.experiment, "cpu")
    state, toll = regroup(run.experiment, engine, run.state)
    assert toll.told["asked_for_groups"] == 27
    x, y = task.federation.train.x, task.federation.train.y
    owner = np.repeat(np.arange(9), task.federation.train.sizes)
    losses = []
    for module in run.models.values():
        with torch.no_grad():
            each = torch.nn.functional.cross_entropy(module(x), y, reduction="none").numpy()
        losses.append(np.bincount(owner, each) / np.bincount(owner))
    np.testing.assert_array_equal(state.shares.argmax(axis=0), np.argmin(losses, axis=0))
    assert agree(state.shares.argmax(axis=0), np.repeat([0, 1, 2], 3))


@pytest.mark.parametrize("sampler", [Full(), SAMPLERS["uniform"](4)])  # type: ignore[call-arg]
def test_ifca_pays_for_each_model_once(sampler: Any) -> None:
    """All clients fetch three models and report three losses; who is drawn has its model."""
    rounds, groups, number = 2, 3, 8
    run = rota.run([small()], sampler, rounds=rounds, grouping=Ifca(groups=groups))
    model = run.state.models[0].nbytes
    assert run.state.bytes_down == rounds * N * groups * model
    drawn = sum(len(cohort) for r in run.records for cohort in r["cohort"].values())
    assert run.state.bytes_up == drawn * model + rounds * N * groups * number
    asks = SAMPLERS["ocs"](budget=4)  # type: ignore[call-arg]
    both = rota.run([small()], asks, rounds=rounds, grouping=Ifca(groups=groups))
    assert both.state.bytes_down == rounds * N * (groups + 1) * model


def test_cfl_splits_a_group_only_by_updates_since_its_last_split() -> None:
    experiment = Experiment([three_ways()], Full(), grouping=Cfl(), rounds=20)
    engine = make("sequential", experiment, "cpu")
    state, toll = begin(experiment, engine), None
    for _ in range(20):
        after, toll = regroup(experiment, engine, state)
        if "groups" in toll.told:
            break
        state, _ = play(experiment, engine, state)
    assert toll is not None
    assert "groups" in toll.told
    assert set(after.policies["grouping"]["since"].ravel()) == {state.round + 1}
    toll = regroup(experiment, engine, after)[1]
    assert "groups" not in toll.told, "nobody has trained in the new groups"
    memory = {**state.policies["grouping"], "when": state.policies["grouping"]["when"].copy()}
    memory["when"][0, 4] = 0
    waiting = replace(state, policies={**state.policies, "grouping": memory})
    assert "groups" not in regroup(experiment, engine, waiting)[1].told


def test_cfl_weighs_updates_by_the_clients_data() -> None:
    class Given(Cfl):
        def _updates(self, state: Any, at: Any, t: int, clients: Array) -> torch.Tensor:
            return torch.tensor([[3.0, 0.0], [-1.0, 0.0]])

    both = np.arange(2)
    for shares, split in (([0.25, 0.75], True), ([0.5, 0.5], False)):
        at: Any = SimpleNamespace(shares=np.array([shares]))
        assert (Given(calm=0.1)._split({}, at, 0, both) is not None) == split


def test_a_task_whose_model_always_begins_alike_cannot_be_ifcas() -> None:
    with pytest.raises(rota.BadInput, match="ifca needs models that begin differently"):
        rota.run([small(model=network((4,), 3))], Full(), rounds=1, grouping=Ifca())


def test_selective_needs_examples_of_the_server() -> None:
    task = Task(linear, federation(SIZES), name="blobs")
    with pytest.raises(rota.BadInput, match=r"set data\.validation to their number"):
        rota.run([task], Full(), rounds=1, grouping=Selective())


def test_validation_examples_are_nobodys() -> None:
    plain, held = (rota.data.digits(partition.iid(5), validation=n) for n in (0, 300))
    assert held.validation is not None
    assert len(held.validation) == 300
    assert len(plain.train.y) - len(held.train.y) == 300
    rows = {row.tobytes() for row in plain.train.x.numpy()}
    mine = [row.tobytes() for row in held.validation.x.numpy()]
    assert set(mine) <= rows
    both = [*mine, *(row.tobytes() for row in held.train.x.numpy())]
    assert sorted(both) == sorted(row.tobytes() for row in plain.train.x.numpy())
    assert torch.equal(plain.test.x, held.test.x)
    for wrong in (-1, 2000):
        with pytest.raises(rota.BadInput, match=f"validation is {wrong}"):
            rota.data.digits(validation=wrong)


# ---- clients that come later, and new groups later


def test_a_client_that_comes_later_is_placed_by_its_vector() -> None:
    task = three_ways()
    always = rota.run([task], Full(), rounds=8, grouping=Selective())
    seldom = rota.run(
        [task], Full(), rounds=8, grouping=Selective(), availability=Availability(0.5), seed=2
    )
    told = [record for record in seldom.records if "groups" in record]
    asked = [record["asked_for_groups"] / 10 for record in told]
    assert len(told) > 1
    assert sum(asked) == 9, "each client is asked once"
    for record in seldom.records:
        drawn = [client for cohort in record["cohort"].values() for client in cohort]
        assert len(drawn) == len(set(drawn))
    assert sorted(map(sorted, members(seldom))) == members(always)


@pytest.mark.parametrize("grouping", [Pacfl(threshold=0.6), Selective()])
def test_a_kind_of_clients_that_comes_late_gets_a_group_of_its_own(grouping: Any) -> None:
    run = rota.run(
        [three_ways()], Full(), rounds=8, grouping=grouping, availability=Availability(0.4), seed=1
    )
    told = [record["groups"]["digits"]["members"] for record in run.records if "groups" in record]
    assert len(told[0]) == 1, "only clients of one kind could be reached"
    assert sum(record.get("asked_for_groups", 0) for record in run.records) in (9, 90)
    assert sorted(told[-1]) == THIRDS


@pytest.mark.parametrize("name", ["mmfl-gvr", "mmfl-kvib", "kvib", "clustered-size", "pow-d"])
def test_a_budget_for_all_clients_is_none_too_many_while_some_wait_for_a_group(name: str) -> None:
    sampler = SAMPLERS[name](budget=8)
    run = rota.run(
        [three_ways()], sampler, rounds=4, grouping=Pacfl(), availability=Availability(0.4), seed=1
    )
    assert len(run.records[0]["groups"]["digits"]["members"][0]) < 8
    assert len(run.records) == 4


def known_vectors(vectors: Array, known: Array) -> Any:
    """A grouping's state in which the server knows these clients' vectors."""
    return {
        "known": known[None],
        "threshold": np.full(1, np.nan),
        "right.0": np.packbits(vectors, axis=1),
        "examples.0": np.array(vectors.shape[1]),
    }


def test_one_half_of_the_validation_set_forms_the_groups_and_the_other_judges_them() -> None:
    kind, other = np.repeat([0, 1, 2], 3), np.arange(9) % 3
    vectors = np.empty((9, 600), bool)
    for half, of in enumerate((kind, other)):
        vectors[:, half::2] = np.arange(300) % 3 == of[:, None]
    everybody, nowhere = np.ones(9, bool), np.full(9, -1)
    given = Selective(threshold=0.2).groups(known_vectors(vectors, everybody), 0, nowhere)
    assert agree(given, kind), "of the even examples"
    found = Selective().groups(known_vectors(vectors, everybody), 0, nowhere)
    assert found.tolist() == [0] * 9, "on the odd examples, these groups are not alike"
    vectors[:, 1::2] = vectors[:, ::2]
    found = Selective().groups(known_vectors(vectors, everybody), 0, nowhere)
    assert agree(found, kind)


@pytest.mark.parametrize("few", [[0], [0, 4, 8], [0, 1, 2]])
def test_few_clients_do_not_settle_the_threshold_for_those_that_come_later(few: list[int]) -> None:
    """Who is alone, or unlike all others, tells nothing about how alike clients of a kind are."""
    kind = np.repeat([0, 1, 2], 3)
    generator = np.random.default_rng(0)
    vectors = (np.arange(300) % 3 == kind[:, None]) ^ (generator.random((9, 300)) < 0.05)
    state = known_vectors(vectors, np.isin(np.arange(9), few))
    grouping = Selective()
    of = grouping.groups(state, 0, np.full(9, -1))
    state["known"][:] = True
    assert agree(grouping.groups(state, 0, of), kind)


def test_a_group_of_newcomers_begins_where_the_run_began() -> None:
    @dataclass(frozen=True)
    class Late(Halves):
        def regroup(self, state: Any, at: Any) -> Any:
            of = np.zeros((1, N), int)
            of[0, 6:] = 1 if at.now == 3 else -1
            return Groups(of), state

    experiment = Experiment([small()], Full(), grouping=Late(), rounds=4)
    before, engine = played(experiment, 2), make("sequential", experiment, "cpu")
    after, _ = regroup(experiment, engine, before)
    assert after.models[0].weights is before.models[0].weights
    assert torch.equal(after.models[1].params, engine.initial()[0].params)
    assert not torch.equal(after.models[1].params, before.models[0].params)


def test_one_weak_model_is_no_group() -> None:
    """Clients of one kind, of which one learned less than the others."""
    generator = np.random.default_rng(0)
    error = np.where(np.arange(9) == 5, 0.2, 0.1)[:, None]
    hard = generator.random(4000) < 0.1
    vectors = ~(hard | (generator.random((9, 4000)) < error))
    even, odd = vectors[:, ::2], vectors[:, 1::2]
    distance = 1 - similar.similarity(odd, odd, "jaccard")
    assert 0.25 < similar.silhouette(distance, np.eye(9, dtype=int)[5]) < 0.5
    threshold = similar.find_threshold(even, odd, "overlap")
    near = similar.similarity(even, even, "overlap")
    of = similar.place(lambda a, b: near[np.ix_(a, b)], np.full(9, -1), threshold)
    assert of.tolist() == [0] * 9


def test_clients_without_a_group_are_not_drawn() -> None:
    task = three_ways()
    run = rota.run(
        [task], Full(), rounds=1, grouping=Selective(), availability=Availability(0.5), seed=2
    )
    (told,) = [record["groups"]["digits"]["members"] for record in run.records]
    placed = {client for group in told for client in group}
    assert placed < set(range(9))
    assert set(np.flatnonzero(run.state.shares.any(axis=0))) == placed
    np.testing.assert_allclose(run.state.shares.sum(axis=1), 1)


@dataclass(frozen=True)
class Halves:
    """Two groups, which are dealt anew in the third round."""

    def init(self, shares: Array) -> Any:
        return {}

    def regroup(self, state: Any, at: Any) -> Any:
        clients = np.arange(at.of.shape[1])
        if at.now == 1:
            return Groups(np.stack([clients % 2])), state
        return (Groups(np.stack([clients // 6])) if at.now == 3 else None), state


def played(experiment: Experiment, rounds: int) -> State:
    engine = make("sequential", experiment, "cpu")
    state = begin(experiment, engine)
    for _ in range(rounds):
        state, _ = play(experiment, engine, state)
    return state


def test_a_new_group_begins_at_the_mean_of_its_clients_models() -> None:
    experiment = Experiment([small()], Full(), grouping=Halves(), rounds=4)
    before = played(experiment, 2)
    engine = make("sequential", experiment, "cpu")
    after, _ = regroup(experiment, engine, before)
    share = np.array(SIZES) / np.sum(SIZES)
    for s, clients in enumerate((range(6), range(6, N))):
        whole = share[list(clients)].sum()
        expected = sum(share[i] / whole * before.models[i % 2].params for i in clients)
        torch.testing.assert_close(after.models[s].params, expected)
        buffers = sum(share[i] / whole * before.models[i % 2].buffers for i in clients)
        torch.testing.assert_close(after.models[s].buffers, buffers)


def test_what_is_about_clients_goes_on_and_what_is_about_models_begins_again() -> None:
    experiment = Experiment(
        [small()],
        SAMPLERS["kvib"](budget=3),  # type: ignore[call-arg]
        grouping=Halves(),
        server=Adam(),
        capacity=Fixed((1.0, 0.5)),
        availability=Availability(0.9, known=False),
        rounds=4,
    )
    before = played(experiment, 2)
    assert before.policies["server"]
    engine = make("sequential", experiment, "cpu")
    after, _ = regroup(experiment, engine, before)
    for kind in ("availability", "devices"):
        assert after.policies[kind] is before.policies[kind]
    np.testing.assert_array_equal(
        after.policies["capacity"]["width"], before.policies["capacity"]["width"]
    )
    assert after.policies["server"] == {}
    fresh = experiment.sampler.init(after.shares, 2)
    for name, value in fresh.items():
        np.testing.assert_array_equal(after.policies["sampler"][name], value)


@dataclass(frozen=True)
class Movers(Halves):
    """The models stay, and one client moves."""

    def regroup(self, state: Any, at: Any) -> Any:
        of = np.arange(N) % 2
        of[0] = at.now > 2
        if at.now == 1:
            return Groups(of[None]), state
        return Groups(of[None], [[model.weights for model in at.models]]), state


def test_a_server_goes_on_where_models_stay() -> None:
    experiment = Experiment([small()], Full(), grouping=Movers(), server=Adam(), rounds=4)
    before = played(experiment, 2)
    after, _ = regroup(experiment, make("sequential", experiment, "cpu"), before)
    assert after.policies["server"] is before.policies["server"]
    assert not np.array_equal(after.shares, before.shares)


@pytest.mark.parametrize("wrong", [np.zeros(N, int), np.zeros((1, N)), np.full((1, N), -2)])
def test_a_grouping_that_returns_nonsense_is_refused(wrong: Array) -> None:
    @dataclass(frozen=True)
    class Wrong(Halves):
        def regroup(self, state: Any, at: Any) -> Any:
            return Groups(wrong), state

    with pytest.raises(rota.BadInput, match="the grouping's groups have shape"):
        rota.run([small()], Full(), rounds=1, grouping=Wrong())


# ---- all other policies run inside of groups


WITHIN = [
    (kind, name)
    for kind in (
        "sampler",
        "estimator",
        "server",
        "capacity",
        "submodel",
        "availability",
        "channel",
    )
    for name in KINDS[kind].members
]


@pytest.mark.parametrize(("kind", "member"), WITHIN)
def test_every_policy_runs_inside_groups(kind: str, member: str, tmp_path: Path) -> None:
    """Through a new grouping, with nothing special, and resumed to the byte."""
    policy = KINDS[kind].members[member]
    partners = {"capacity": Fixed((1.0, 0.5))} if kind == "submodel" else PARTNERS.get(policy, {})
    grouping = Selective(alone=2, similarity="jaccard", threshold=0.6, every=2)
    experiment = Experiment([small()], Full(), rounds=5, grouping=grouping)
    through(experiment.using(**{kind: policy()}, **partners), tmp_path)


@pytest.mark.parametrize("member", GROUPINGS)
def test_every_grouping_is_resumed_to_the_byte(member: str, tmp_path: Path) -> None:
    grouping = GROUPINGS[member]()
    experiment = Experiment(
        [small(), small(model=linear, name="other")],
        SAMPLERS["kvib"](budget=5),  # type: ignore[call-arg]
        KINDS["estimator"].members["fedvarp"](),
        server=Adam(),
        availability=Availability(0.7, memory=0.5),
        grouping=grouping,
        rounds=6,
    )
    through(experiment, tmp_path)


def through(experiment: Experiment, folder: Path) -> None:
    whole = execute(experiment, engine="sequential", out=folder / "whole")
    for number in (1, 3):
        out = folder / f"run {number}"
        stop = stop_after(number, KeyboardInterrupt())
        with pytest.raises(Interrupted):
            execute(experiment, engine="sequential", out=out, watch=stop)
        resumed = execute(experiment, engine="sequential", out=out, resume=True)
        assert same(resumed.state, whole.state)
        assert contents(out) == contents(folder / "whole")


@pytest.mark.parametrize("member", GROUPINGS)
def test_engines_agree_on_groups(member: str) -> None:
    experiment = Experiment([three_ways()], Full(), grouping=GROUPINGS[member](), rounds=5)
    one, two = (execute(experiment, engine=engine) for engine in ("sequential", "batched"))
    np.testing.assert_array_equal(one.state.shares, two.state.shares)
    for a, b in zip(one.state.models, two.state.models, strict=True):
        torch.testing.assert_close(a.params, b.params, rtol=1e-3, atol=1e-4)


# ---- groupings against plain loops, written from the papers


class ByLoop:
    """Clients that take one gradient step on all their examples per round, in plain torch."""

    lr, rounds = 0.5, 6

    def __init__(self) -> None:
        self.task = small(model=linear, batch=None, lr=self.lr)
        self.data = [self.task.federation.train.of(client) for client in range(N)]
        self.first = self.task.build(rota.rng.key(0, "model", 0))

    def loss(self, module: nn.Module, client: int) -> torch.Tensor:
        x, y = self.data[client]
        return nn.functional.cross_entropy(module(x), y)

    def trained(self, module: nn.Module, client: int, times: int = 1) -> nn.Module:
        local = copy.deepcopy(module)
        for _ in range(times):
            params = list(local.parameters())
            for p, slope in zip(
                params, torch.autograd.grad(self.loss(local, client), params), strict=True
            ):
                p.data -= self.lr * slope
        return local

    def flat(self, module: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    def averaged(self, locals_: dict[int, nn.Module]) -> nn.Module:
        """The mean of local models, weighted by their clients' examples."""
        out = copy.deepcopy(next(iter(locals_.values())))
        whole = sum(SIZES[client] for client in locals_)
        for each in zip(out.parameters(), *(m.parameters() for m in locals_.values()), strict=True):
            parts = zip(locals_, each[1:], strict=True)
            each[0].data = torch.stack([SIZES[c] / whole * p.data for c, p in parts]).sum(0)
        return out

    def fedavg(self, of: list[int]) -> tuple[list[int], dict[int, nn.Module]]:
        """FedAvg in groups that stay as they are."""
        models = dict.fromkeys(set(of), self.first)
        for _ in range(self.rounds):
            models = {
                g: self.averaged({c: self.trained(m, c) for c in range(N) if of[c] == g})
                for g, m in models.items()
            }
        return of, models

    def selective(self) -> tuple[list[int], dict[int, nn.Module]]:
        held, vectors = self.task.federation.validation, []
        assert held is not None
        for client in range(N):
            local = self.trained(self.first, client, times=4)
            vectors.append((local(held.x).argmax(1) == held.y).numpy()[::2])
        near = np.array([[np.mean(a & b) for b in vectors] for a in vectors])
        return self.fedavg(as_printed(near, 0.45, best=False))

    def ifca(self) -> tuple[list[int], dict[int, nn.Module]]:
        """Ghosh et al., Algorithm 1, with model averaging."""
        models = {0: self.first}
        models |= {g: self.task.build(rota.rng.key(0, "ifca", 0, g)) for g in (1, 2)}
        for _ in range(self.rounds):
            loss = [[self.loss(models[g], c).item() for g in models] for c in range(N)]
            of = np.argmin(loss, axis=1).tolist()
            for g in set(of):
                mine = {c: self.trained(models[g], c) for c in range(N) if of[c] == g}
                models[g] = self.averaged(mine)
        return of, models

    def cfl(self) -> tuple[list[int], dict[int, nn.Module]]:
        """Sattler et al., Algorithm 1, over all bipartitions, with thresholds that are relative."""
        of, models, updates = [0] * N, {0: self.first}, dict[int, torch.Tensor]()
        for now in range(1, self.rounds + 1):
            for g in list(models) if now > 2 else []:
                mine = [c for c in range(N) if of[c] == g]
                some = torch.stack([updates[c] for c in mine])
                share = torch.tensor([SIZES[c] for c in mine]) / sum(SIZES[c] for c in mine)
                if len(mine) < 2 or (share @ some).norm() >= 0.9 * some.norm(dim=1).max():
                    continue
                near = torch.nn.functional.cosine_similarity(some[:, None], some[None], dim=2)
                halves = [
                    [c in half for c in range(len(mine))]
                    for size in range(1, len(mine))
                    for half in combinations(range(len(mine)), size)
                ]
                across = [float(near[h][:, [not k for k in h]].max()) for h in map(list, halves)]
                if min(across) <= 0.3:
                    models[len(models)] = models[g]
                    for c, away in zip(mine, halves[int(np.argmin(across))], strict=True):
                        of[c] = len(models) - 1 if away else g
            for g in list(models):
                locals_ = {c: self.trained(models[g], c) for c in range(N) if of[c] == g}
                updates |= {c: self.flat(m) - self.flat(models[g]) for c, m in locals_.items()}
                models[g] = self.averaged(locals_)
        return of, models

    def pacfl(self) -> tuple[list[int], dict[int, nn.Module]]:
        """Vahidian et al.: principal angles between the inputs' first singular vectors."""
        bases = [np.linalg.svd(x.numpy().T, full_matrices=False)[0][:, :2] for x, _ in self.data]
        near = [[np.mean(np.cos(subspace_angles(a, b)) ** 2) for b in bases] for a in bases]
        distance = squareform(1 - np.array(near), checks=False)
        of = fcluster(linkage(distance, "average"), 1 - 0.8, "distance")
        return self.fedavg([int(each) for each in of])


PAPERS = {
    "selective": Selective(alone=4, threshold=0.45),
    "ifca": Ifca(groups=3),
    "cfl": Cfl(calm=0.9, apart=0.3, warmup=2),
    "pacfl": Pacfl(vectors=2, threshold=0.8),
}


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("method", PAPERS)
def test_a_grouping_is_what_its_paper_says(method: str, engine: str) -> None:
    plain = ByLoop()
    of, models = getattr(plain, method)()
    assert 1 < len(set(of)) < N
    run = rota.run(
        [plain.task],
        Full(),
        estimator=FedAvg(),
        grouping=PAPERS[method],
        rounds=plain.rounds,
        engine=engine,
        device="cpu",
    )
    mine = run.state.shares.argmax(axis=0)
    assert agree(mine, np.array(of))
    for client in range(N):
        known = plain.flat(models[of[client]])
        torch.testing.assert_close(
            run.state.models[mine[client]].params, known, rtol=1e-4, atol=1e-5
        )


# ---- what each client gets


def test_each_client_is_tested_with_the_model_of_its_group() -> None:
    task = three_ways()
    run = rota.run([task], Full(), rounds=3, grouping=Selective())
    last, test = run.records[-1], task.federation.test
    own, whole = [], []
    for model, clients in zip(run.models.values(), THIRDS, strict=True):
        for client in clients:
            x, y = test.of(client)
            with torch.no_grad():
                own.append(float((model.eval()(x).argmax(1) == y).float().mean()))
                whole.append(float((model(test.x).argmax(1) == test.y).float().mean()))
    figures = [np.mean(own), min(own), np.quantile(own, 0.1), np.std(own), np.mean(whole)]
    keys = ("own_mean", "own_worst", "own_p10", "own_spread", "shared_mean")
    assert [last[key] for key in keys] == pytest.approx(figures, abs=1e-6)
    assert [run.summary[key] for key in keys] == [last[key] for key in keys]
    of_groups = last["groups_of_clients"]
    for (name, each), clients in zip(of_groups.items(), THIRDS, strict=True):
        assert name in run.models
        assert list(each["own"]) == [str(client) for client in clients]
        assert list(each["own"].values()) == pytest.approx(own[clients[0] : clients[-1] + 1])
        assert each["worst"] == min(each["own"].values())


def test_a_models_spread_over_clients_is_over_those_that_use_it() -> None:
    """Under every grouping; a model that nobody uses has none."""
    for grouping in (Selective(), Ifca(groups=4)):
        run = rota.run([three_ways()], Full(), rounds=3, grouping=grouping)
        last = run.records[-1]
        for name, model in last["models"].items():
            own = list(last["groups_of_clients"][name].get("own", {}).values())
            told = model.get("client_accuracy")
            assert (told is None) == (not own)
            if told is not None:
                known = dict(zip(("p10", "p50", "p90"), np.quantile(own, [0.1, 0.5, 0.9])))  # noqa: B905
                assert told == pytest.approx(known)


def test_personal_models_go_with_models_that_nobody_uses() -> None:
    from rota.personal import Ditto

    run = rota.run([three_ways()], Full(), rounds=3, grouping=Ifca(groups=5), personal=Ditto())
    assert run.records[-1]["own_mean"] > 0.5
    assert np.isfinite(run.summary["accuracy"])


def test_without_test_sets_of_their_own_clients_get_the_shared_one() -> None:
    run = rota.run([small()], Full(), rounds=2, grouping=Local())
    last = run.records[-1]
    assert "own_mean" not in last
    accuracies = [model["accuracy"] for model in last["models"].values()]
    assert last["shared_mean"] == pytest.approx(np.mean(accuracies))
    plain = rota.run([small()], Full(), rounds=2)
    assert "shared_mean" not in plain.records[-1], "there is nothing to tell"


def test_a_report_shows_groups_that_come_later(tmp_path: Path) -> None:
    from rota.cli.report import write_page

    for name, grouping in (("cfl", Cfl()), ("one", One()), ("local", Local())):
        out = tmp_path / name
        rota.run([three_ways()], Full(), rounds=10, grouping=grouping, out=out)
    page = write_page([tmp_path / "cfl"], tmp_path / "cfl.html").read_text()
    assert "Who was grouped with whom" in page
    assert "digits.1" in page
    assert "A diamond is the first test." in page
    assert "trainings or tests of clients" not in page, "cfl asks clients for nothing"
    assert "<dt>Mean client</dt>" in page
    folders = [tmp_path / name for name in ("cfl", "one", "local")]
    both = write_page(folders, tmp_path / "all.html").read_text()
    assert '<th scope="col">Worst client</th>' in both
    assert "<dt>Best mean client</dt>" in both
    assert "cfl: who was grouped with whom" in both
    assert "one: who was grouped with whom" not in both


def regression(**changes: Any) -> Task:
    """Clients of two kinds: one learns the first input, and the other its negative."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.rand(20, 3, generator=generator) for _ in range(6)]
    clients = [(each, each[:, :1] * (1 - client % 2 * 2)) for client, each in enumerate(x)]
    data = rota.from_clients(clients, clients, validation=clients[0], name="slopes")
    options = {"lr": 0.1, "batch": 5, "loss": "mse", "score": "mse", **changes}
    return Task(lambda: torch.nn.Linear(3, 1), data, **options)


@pytest.mark.parametrize(("score", "called"), [("mse", "mse"), ("r2", "r2")])
def test_an_error_does_not_say_which_examples_are_right(score: str, called: str) -> None:
    with pytest.raises(rota.BadInput, match=f"the score '{called}' does not say that: use group"):
        rota.run([regression(score=score)], Full(), rounds=1, grouping=Selective())


def test_a_score_of_the_whole_set_has_vectors_of_right_classes() -> None:
    plain, auc, f1 = (
        rota.run(
            [replace(three_ways(), score=SCORES[score])], Full(), rounds=2, grouping=Selective()
        )
        for score in ("accuracy", "auc", "f1")
    )
    assert members(plain) == THIRDS
    for run in (auc, f1):
        memory = run.state.policies["grouping"]
        known = plain.state.policies["grouping"]
        np.testing.assert_array_equal(memory["right.0"], known["right.0"])
        assert members(run) == THIRDS


def test_a_report_of_groups_says_once_who_holds_what_and_which_score_is_better(
    tmp_path: Path,
) -> None:
    from rota.cli.report import write_page
    from rota.report.history import measured, read

    for name, grouping in (("one", Selective(threshold=0.0)), ("three", Selective())):
        rota.run([three_ways()], Full(), rounds=2, grouping=grouping, out=tmp_path / name)
    page = write_page([tmp_path / "three"], tmp_path / "three.html").read_text()
    assert page.count("ata on each client") == 1
    assert "3 groups, of 3, 3, 3 clients." in page
    assert "One group, of 9 clients." in write_page([tmp_path / "one"], tmp_path / "a").read_text()
    both = [tmp_path / "one", tmp_path / "three"]
    page = write_page(both, tmp_path / "both.html").read_text()
    assert page.count("ata on each client") == 1
    rota.run([regression()], Full(), rounds=3, grouping=Local(), out=tmp_path / "errors")
    run = read(tmp_path / "errors")
    assert measured([run]) == ("mean squared error", "lower")
    assert run.best == min(line["accuracy"] for line in run.tested)


# ---- data that drift


def test_clients_that_move_have_each_others_data() -> None:
    data, drift = three_ways().federation, Drift(every=4)
    of, moved = drift.sources(data.train.sizes, 0, 1), drift.data(data, 0, 1)
    assert sorted(of) == list(range(9))
    assert (of != np.arange(9)).all()
    for client, source in enumerate(of):
        for part in ("train", "test"):
            for mine, theirs in zip(
                getattr(moved, part).of(client), getattr(data, part).of(source), strict=True
            ):
                assert torch.equal(mine, theirs)
    few = Drift(every=4, share=0.3).sources(data.train.sizes, 0, 1)
    assert np.count_nonzero(few != np.arange(9)) == 3
    twice = drift.sources(data.train.sizes, 0, 2)
    assert sorted(twice) == list(range(9))
    assert not np.array_equal(twice, of)
    assert [drift.phase(now) for now in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_clients_of_other_sizes_keep_their_sizes() -> None:
    data = blobs()
    of, moved = Drift(every=1).sources(data.train.sizes, 0, 3), Drift(every=1).data(data, 0, 3)
    assert moved.train.sizes.tolist() == SIZES
    assert moved.test is data.test
    for client, source in enumerate(of):
        mine, theirs = moved.train.of(client)[0], data.train.of(source)[0]
        assert all(torch.equal(x, theirs[k % len(theirs)]) for k, x in enumerate(mine))


def test_clients_whose_data_drift_are_grouped_anew() -> None:
    task, drift = three_ways(), Drift(every=10)
    once, anew = (
        rota.run([task], Full(), rounds=20, grouping=Selective(every=every), drift=drift)
        for every in (None, 10)
    )
    labels = drift.data(task.federation, 0, 1).train.label_counts(10).argmax(axis=1)
    kind = np.searchsorted([4, 7], labels, side="right")
    assert not agree(kind, np.repeat([0, 1, 2], 3))
    of = np.full(9, -1)
    for g, some in enumerate(members(anew)):
        of[some] = g
    assert agree(of, kind), "the groups are those of the new data"
    assert members(once) == THIRDS
    told = [[r["own_mean"] for r in run.records] for run in (once, anew)]
    assert told[0][:10] == told[1][:10]
    assert told[1][-1] > told[0][-1] + 0.05


def test_a_drifting_run_resumes_on_the_data_of_its_round(tmp_path: Path) -> None:
    def play(out: Path, **how: Any) -> None:
        drift = Drift(every=2, share=0.5)
        rota.run([small()], SAMPLERS["uniform"](4), rounds=6, drift=drift, out=out, **how)  # type: ignore[call-arg]

    play(tmp_path / "whole")
    for number in (3, 4):
        out = tmp_path / f"{number}"
        with pytest.raises(Interrupted):
            play(out, watch=stop_after(number, KeyboardInterrupt()))
        play(out, resume=True)
        assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Drift(every=0), r"drift\.every is 0: it must be at least 1"),
        (Drift(every=1, share=0), r"drift\.share is 0: it must be above 0 and at most 1"),
    ],
)
def test_drifts_that_make_no_sense_are_refused(wrong: Drift, complaint: str) -> None:
    with pytest.raises(rota.BadInput, match=complaint):
        rota.run([small()], Full(), rounds=1, drift=wrong)
