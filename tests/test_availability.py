"""Availability: the simulated process is what it says, and estimates stay unbiased under it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from conftest import linear
from test_cli import call

import rota
from rota import recipe, rng
from rota.arrays import Array
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.plan import Task
from rota.sampling import KVib, Sampler, Uniform, Vrb
from rota.world.availability import Availability

SHARES = np.array([[0.3, 0.2, 0.1, 0.25, 0.1, 0.05], [0.5, 0.0, 0.2, 0.0, 0.25, 0.05]])
PROCESSES = {
    "independent": Availability(0.4),
    "unequal": Availability(0.4, spread=1.0),
    "diurnal": Availability(0.5, swing=1.5, day=10),
    "markov": Availability(0.4, memory=0.7),
    "all": Availability(0.6, spread=0.5, swing=1.0, day=7, memory=0.5),
}


def watch(process: Availability, rounds: int, clients: int = 6, seed: int = 0) -> Array:
    """The weight of each client in each round: 1 / q if it can be reached, and 0 if not."""
    state, out = process.init(clients), []
    for now in range(1, rounds + 1):
        weight, state = process.step(state, np.ones((1, clients)), seed, now)
        out.append(weight[0])
    return np.array(out)


def test_everybody_is_always_there_unless_said_otherwise() -> None:
    state = Availability().init(6)
    shares, after = Availability(known=False).step(state, SHARES, 0, 1)
    assert shares is SHARES
    assert state == after == {}


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_clients_are_reached_with_their_chances_and_weigh_the_inverse(
    process: Availability,
) -> None:
    """Over many seeds, in rounds 1 to 9: with q_i(t) in each, whatever the memory."""
    clients, seeds = 60, 60
    weight = np.array([watch(process, 9, clients, seed) for seed in range(seeds)])
    chance = np.array(
        [[process.chances(clients, seed, now) for now in range(1, 10)] for seed in range(seeds)]
    )
    assert ((chance > 0) & (chance < 1)).all()
    assert weight[weight > 0] == pytest.approx(1 / chance[weight > 0])
    surprise = ((weight > 0) - chance) / np.sqrt(chance * (1 - chance))
    assert (np.abs(surprise.mean(axis=(0, 2))) < 5 / np.sqrt(clients * seeds)).all()
    assert surprise.std() == pytest.approx(1, abs=0.05)
    error = np.sqrt((1 / chance - 1).mean() / (clients * seeds))
    assert (np.abs(weight.mean(axis=(0, 2)) - 1) < 5 * error).all()


def test_memory_makes_spells() -> None:
    """A two-state chain.

    Neighbouring rounds correlate by the memory, and spells are longer by 1 / (1 - memory).
    """
    for memory in (0.0, 0.8):
        up = watch(Availability(0.5, memory=memory), 2000, clients=40) > 0
        correlation = np.corrcoef(up[1:].ravel(), up[:-1].ravel())[0, 1]
        assert correlation == pytest.approx(memory, abs=0.03)
        ends = (up[:-1] & ~up[1:]).sum()
        assert up.sum() / ends == pytest.approx(1 / (0.5 * (1 - memory)), rel=0.08)


def test_given_the_past_weights_are_unbiased_without_memory_alone() -> None:
    """The weight depends on whether a client was reached in the round before.

    E[weight | reached in the round before] = (memory + (1 - memory) q) / q, and 1 - memory for
    the others. For coins both are 1.
    """
    q = 0.4
    for memory in (0.0, 0.7):
        weight = watch(Availability(q, memory=memory), 200, clients=400)
        before, after = weight[:-1] > 0, weight[1:]
        assert after[before].mean() == pytest.approx((memory + (1 - memory) * q) / q, rel=0.02)
        assert after[~before].mean() == pytest.approx(1 - memory, rel=0.03)


def test_a_day_comes_again() -> None:
    process = Availability(0.5, swing=2.0, day=8)
    chance = np.array([process.chances(200, 0, now) for now in range(1, 17)])
    assert chance[:8] == pytest.approx(chance[8:])
    assert (np.ptp(chance, axis=0) > 0.6).all()
    assert np.ptp(chance.mean(axis=1)) < 0.1, "each client has its own hours"
    assert Availability(0.5, spread=1.0).chances(500, 0, 1).std() > 0.15


def test_a_clients_luck_is_its_own() -> None:
    """It depends on the seed, the round and the client, not on how many others there are."""
    process = PROCESSES["all"]
    few, many, other = watch(process, 5, 4), watch(process, 5, 50), watch(process, 5, 4, seed=1)
    np.testing.assert_array_equal(few, many[:, :4])
    assert (few != other).any()


def test_chances_that_are_not_known_are_estimated() -> None:
    """By the part of the rounds so far: the mean weight in round t is 1 - (1 - q)^t, soon 1."""
    clients, seeds, q = 100, 100, 0.3
    weight = np.mean(
        [watch(Availability(q, known=False), 12, clients, seed) for seed in range(seeds)],
        axis=(0, 2),
    )
    expected = 1 - (1 - q) ** np.arange(1, 13)
    assert weight == pytest.approx(expected, abs=5 / np.sqrt(clients * seeds * q))


def test_chances_of_a_chain_are_learned_slowly() -> None:
    """The mean weight in rounds 1, 10, 50 and 400; docs/samplers.md has these figures."""
    weight = watch(Availability(0.5, memory=0.9, known=False), 400, clients=20_000)
    mean = weight.mean(axis=1)[[0, 9, 49, 399]]
    assert mean == pytest.approx([0.50, 0.85, 1.31, 1.03], abs=0.03)


@pytest.mark.parametrize(
    "sampler",
    [Uniform(2), Uniform(2, "independent"), KVib(2), Vrb(2)],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_the_estimate_is_unbiased_over_who_is_there_and_who_is_drawn(
    process: Availability, sampler: Sampler
) -> None:
    """E[1{reached} 1{drawn} d / (q p)] = d."""
    number = 3000
    weight = np.zeros((number, *SHARES.shape))
    state = sampler.init(SHARES, 10)
    for seed in range(number):
        shares, _ = process.step(process.init(6), SHARES, seed, 1)
        plan = sampler.draw(state, shares, rng.generator(rng.key(seed, "test")))
        weight[seed, plan.model, plan.client] = plan.weight
    error = weight.std(axis=0) / np.sqrt(number)
    assert (np.abs(weight.mean(axis=0) - SHARES) <= 5 * error + 1e-12).all()


def test_a_run_draws_from_those_who_are_there(blobs: Federation) -> None:
    process = Availability(0.4, memory=0.5)
    run = rota.run([Task(linear, blobs)], Uniform(3), availability=process, rounds=20, seed=3)
    state = process.init(6)
    for record in run.records:
        weight, state = process.step(state, np.ones((1, 6)), 3, record["round"])
        there = set(np.flatnonzero(weight[0]))
        cohort = set(record["cohort"]["blobs"])
        assert cohort <= there
        assert len(cohort) == min(3, len(there))
    np.testing.assert_array_equal(run.state.policies["availability"]["luck"], state["luck"])
    counted = np.unique([len(record["cohort"]["blobs"]) for record in run.records])
    assert len(counted) > 1


def test_a_round_in_which_nobody_is_there_changes_nothing(blobs: Federation) -> None:
    run = rota.run([Task(linear, blobs)], KVib(2), availability=Availability(1e-9), rounds=2)
    assert run.records[0]["cohort"] == {"blobs": []}
    assert run.records[0]["accuracy"] == run.records[1]["accuracy"]
    assert run.records[1]["bytes_down"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chance": 0.0}, "availability.chance is 0: it must be above 0 and at most 1"),
        ({"chance": 1.1}, "availability.chance is 1.1: it must be above 0 and at most 1"),
        ({"spread": -1.0}, "availability.spread is -1: it must be at least 0"),
        ({"swing": -1.0}, "availability.swing is -1: it must be at least 0"),
        ({"memory": 1.0}, "availability.memory is 1: it must be at least 0 and below 1"),
        ({"day": 1}, "availability.day is 1 rounds: it must be at least 2"),
    ],
)
def test_processes_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as mistake:
        Availability(**options).init(3)
    assert str(mistake.value) == sentence


def test_in_a_recipe(tmp_path: Path) -> None:
    settings = [
        "rounds=2",
        "availability.chance=0.5",
        "availability.memory=0.3",
        "availability.known=false",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    outcome = call(
        "run", "fedavg-digits", *words, "--engine", "sequential", "--out", tmp_path / "a"
    )
    assert outcome.status == 0, outcome.err
    config = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert config["availability"] == {
        "chance": 0.5,
        "spread": 0.0,
        "swing": 0.0,
        "day": 24,
        "memory": 0.3,
        "known": False,
    }
    assert recipe.resolve(tomllib.loads(tomli_w.dumps(config))) == config
    assert recipe.build(config).availability == Availability(0.5, memory=0.3, known=False)
    outcome = call(
        "run", "fedavg-digits", "--set", "availability.chanse=0.5", "--out", tmp_path / "b"
    )
    assert (outcome.status, outcome.err) == (
        2,
        "rota: unknown key 'availability.chanse': did you mean 'chance'?\n",
    )
