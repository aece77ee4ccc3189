"""Channels: what an update goes through on its way to the server."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import call

import rota
import rota.testing
from rota.channel import CHANNELS, Half, Quantised, RandomK, TopK, Whole
from rota.engine import make
from rota.plan import Plan, Task, whole
from rota.testing.channels import through, update_of

MEMBERS = [
    Whole(),
    Half(),
    Half("bfloat16"),
    TopK(),
    TopK(1.0),
    RandomK(),
    RandomK(0.5),
    Quantised(2),
    Quantised(4),
    Quantised(8),
]


@pytest.mark.parametrize("channel", MEMBERS, ids=str)
def test_channels_pass_their_suite(channel: Any) -> None:
    rota.testing.check_channel(channel)


def test_every_channel_is_tested() -> None:
    assert {type(channel) for channel in MEMBERS} == set(CHANNELS.values())


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), scale=st.floats(1e-20, 1e20))
@settings(max_examples=30, deadline=None)
def test_errors_are_bounded(size: int, seed: int, scale: float) -> None:
    update = update_of(size) * scale
    largest = float(update.abs().max())
    off = (through(Half("bfloat16"), update, seed) - update).abs()
    assert (off <= update.abs() * 2**-8).all()
    for bits in (2, 4, 8):
        channel = Quantised(bits)  # type: ignore[arg-type]
        off = (through(channel, update, seed) - update).abs()
        assert (off <= 1.001 * largest / channel.levels).all()
    kept = through(TopK(0.3), update, seed)
    here = kept != 0
    assert torch.equal(kept[here], update[here])
    if here.any() and not here.all():
        assert update[~here].abs().max() <= kept[here].abs().min()


def test_top_k_keeps_the_largest() -> None:
    update = torch.tensor([0.5, -3.0, 0.0, 2.0, -0.1])
    assert through(TopK(0.4), update, 0).tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]


def test_random_k_has_the_variance_that_it_says() -> None:
    update, share = update_of(200, torch.float64), 0.25
    found = torch.stack([through(RandomK(share), update, stream) for stream in range(4000)])
    expected = (1 / share - 1) * update.square()
    big = update.abs() > 0.1
    ratio = found.var(dim=0)[big] / expected[big]
    assert ((ratio - 1).abs() < 0.15).all()


@dataclass(frozen=True)
class Wrong(RandomK):
    """A defect each: what the suite has to find."""

    how: str = ""
    unbiased: ClassVar[bool] = True

    def encode(self, update: torch.Tensor, stream: int) -> dict[str, torch.Tensor]:
        if self.how == "changes":
            update[0] += 1
        if self.how == "depends":
            return super().encode(update + torch.rand(()), stream)
        sent = super().encode(update, stream)
        if self.how == "biased":
            sent["values"] = sent["values"] * self.share
        if self.how == "bytes":
            sent["more"] = torch.zeros(1)
        return sent


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("changes", "changes the update"),
        ("depends", "depends on more"),
        ("biased", "says that it is unbiased"),
        ("bytes", "travel"),
    ],
)
def test_the_suite_finds_defects(how: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        rota.testing.check_channel(Wrong(0.5, how))


def small(batch: int | None = 4) -> Task:
    clients = [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in (4, 9, 13, 6)]
    data = rota.from_clients(clients, clients[0], classes=3)
    return Task(lambda: torch.nn.Linear(6, 3), data, batch=batch)


@pytest.mark.parametrize("channel", MEMBERS, ids=str)
def test_engines_agree(channel: Any) -> None:
    """A row's channel does not depend on the engine, nor on the rest of the cohort."""
    torch.manual_seed(0)
    experiment = rota.Experiment([small()], channel=channel)
    some = np.array([3, 1, 2])
    plan = Plan(some, np.zeros(3, np.int64), np.ones(3), np.ones(3))
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name in ("sequential", "batched"):
        engine = make(name, experiment, "cpu")
        for rows in (plan, plan.of(np.array([2, 0]))):
            job = replace(whole(engine.initial(), rows, 5), channel=experiment.channel)
            for chunk in engine.train(job):
                for row, update in zip(rows.client[chunk.rows].tolist(), chunk.update, strict=True):
                    known = found.setdefault(name, {}).setdefault(row, update.clone())
                    torch.testing.assert_close(update, known, rtol=0, atol=1e-6)
    for client, update in found["sequential"].items():
        off = (update - found["batched"][client]).abs()
        step = update.abs().max() / channel.levels if isinstance(channel, Quantised) else 1e-5
        assert (off <= 1.001 * step).all()
        assert (off <= 1e-5).float().mean() > 0.9


@pytest.mark.parametrize("channel", [Whole(), RandomK(0.5), Quantised(2)], ids=str)
@pytest.mark.parametrize("estimator", ["unbiased", "fedvarp", "fedstale"])
def test_estimates_stay_unbiased(channel: Any, estimator: str) -> None:
    """With a sampler, in a first round: the mean of many estimates is full participation's step."""
    torch.manual_seed(0)
    task = small(batch=None)  # so that clients' updates do not depend on the seed
    sampler = rota.sampling.Proportional(2)
    member = rota.estimate.ESTIMATORS[estimator]()
    experiment = rota.Experiment([task], rota.sampling.Full(), member, rounds=1)
    engine = make("sequential", experiment, "cpu")
    start = engine.initial()[0].params.clone()

    def step(given: rota.Experiment) -> torch.Tensor:
        at = rota.loop.begin(given, engine)
        return start - rota.loop.play(given, engine, at)[0].models[0].params

    full = step(experiment).double()
    draws = []
    for seed in range(400):
        one = replace(experiment.using(sampler=sampler, channel=channel), seed=seed)
        engine.seed = seed
        draws.append(step(one).double())
    found = torch.stack(draws)
    error = found.std(dim=0) / len(draws) ** 0.5
    assert ((found.mean(dim=0) - full).abs() <= 5 * error + 1e-6).all()


def test_runs_report_the_bytes_and_resume(tmp_path: Path) -> None:
    """Bytes up are those of the arrays that travel; other models, buffers and norms stay."""
    few = ("fedavg-digits", "--set", "rounds=4", "--set", "task.steps=2", "--json")
    numbers = {}
    for name in CHANNELS:
        done = call("run", *few, "--set", f"channel={name}", "--out", str(tmp_path / name))
        assert done.status == 0, done
        numbers[name] = json.loads(done.out)
    rows = sum(
        len(each["cohort"]["digits"])
        for each in map(json.loads, (tmp_path / "none" / "rounds.jsonl").read_text().splitlines())
    )
    params = numbers["none"]["bytes_up"] // rows // 4
    for name, member in CHANNELS.items():
        assert numbers[name]["bytes_up"] == rows * member().nbytes(params, 4)
        assert numbers[name]["bytes_down"] == numbers["none"]["bytes_down"]
    started = str(tmp_path / "quantised")
    config, longer = f"{started}/config.toml", ("--set", "rounds=6", "--json")
    more = call("run", config, "--resume", "--out", started, *longer)
    again = (*few, "--set", "channel=quantised", "--out", str(tmp_path / "once"))
    once = call("run", *again, *longer)
    first, second = (json.loads(done.out) for done in (more, once))
    assert first["loss"] == second["loss"]
