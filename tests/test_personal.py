"""Personal models: formulas against plain loops, what they cost, and what they go together with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, federation, linear, network
from test_store import contents, stop_after
from torch import Tensor, nn

import rota
from rota.data.federation import Federation
from rota.engine import Options
from rota.estimate import ESTIMATORS, FedAvg, memory
from rota.grouping import Ifca
from rota.personal import PERSONALS, Ditto, FedPer, FedRep, FineTuning
from rota.personal.layers import freeze, places
from rota.plan import Task
from rota.running.run import Interrupted, Run
from rota.sampling import Full, Uniform
from rota.submodel import Fixed
from rota.world.drift import Drift

SIZES = [5, 12, 7, 9, 8]
LR, ROUNDS = 0.3, 3
METHODS = {"fine-tuning": FineTuning, "ditto": Ditto, "fedper": FedPer, "fedrep": FedRep}


def blobs() -> Federation:
    return federation(SIZES, own_test=True)


def plain(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, classes))


def task(model: Any = plain, **changes: Any) -> Task:
    """One gradient step of all examples per pass, so that their order does not matter."""
    return replace(Task(model, blobs(), lr=LR, batch=None, name="blobs"), **changes)


# ---- formulas: each method as a loop of its own


def descend(
    module: nn.Module,
    client: int,
    trained: Callable[[str], bool] = lambda name: True,
    pull: tuple[float, nn.Module] | None = None,
    times: int = 1,
) -> None:
    """Steps of gradient descent on all examples of a client, on some of the parameters."""
    x, y = blobs().train.of(client)
    for _ in range(times):
        loss = F.cross_entropy(module(x), y)
        if pull:
            strength, to = pull
            pairs = zip(module.parameters(), to.parameters(), strict=True)
            loss = loss + strength / 2 * sum(((p - q.detach()) ** 2).sum() for p, q in pairs)
        names, params = zip(*module.named_parameters(), strict=True)
        for name, p, slope in zip(names, params, torch.autograd.grad(loss, params), strict=True):
            if trained(name):
                p.data -= LR * slope


def average(modules: list[nn.Module], into: nn.Module, some: Callable[[str], bool]) -> None:
    share = torch.tensor(SIZES) / sum(SIZES)
    sides = [dict(module.named_parameters()) for module in modules]
    for name, p in into.named_parameters():
        if some(name):
            p.data = sum(w * side[name].data for w, side in zip(share, sides, strict=True))  # type: ignore[assignment]


def accuracy(module: nn.Module, client: int) -> float:
    x, y = blobs().test.of(client)
    return float((module(x).argmax(1) == y).float().mean())


def everything(name: str) -> bool:
    return True


def body(name: str) -> bool:
    return name.startswith("0.")


def is_head(name: str) -> bool:
    return not body(name)


def by_loop(method: str, first: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The shared model and each client's own after some rounds in which all clients train."""
    shared, own = copy.deepcopy(first), [copy.deepcopy(first) for _ in SIZES]
    for _ in range(ROUNDS):
        theirs = []
        for client, mine in enumerate(own):
            local = copy.deepcopy(shared)
            if method == "ditto":
                descend(mine, client, pull=(0.7, shared))
                descend(local, client)
            elif method == "fine-tuning":
                descend(local, client)
            else:
                local[2].load_state_dict(mine[2].state_dict())  # type: ignore[index]
                if method == "fedrep":
                    descend(local, client, is_head, times=2)
                    descend(local, client, body)
                else:
                    descend(local, client)
                mine[2].load_state_dict(local[2].state_dict())  # type: ignore[index]
            theirs.append(local)
        average(theirs, shared, body if method in ("fedper", "fedrep") else everything)
    for client, mine in enumerate(own):
        if method == "fine-tuning":
            mine.load_state_dict(shared.state_dict())
            descend(mine, client, times=2)
        elif method != "ditto":
            mine[0].load_state_dict(shared[0].state_dict())  # type: ignore[index]
    return shared, own


OPTIONS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"epochs": 2},
    "ditto": {"strength": 0.7},
    "fedper": {},
    "fedrep": {"epochs": 2},
}


def flat(module: nn.Module, some: Callable[[str], bool] = everything) -> Tensor:
    return torch.cat([p.data.flatten() for name, p in module.named_parameters() if some(name)])


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_what_its_paper_says(method: str, engine: str) -> None:
    mine = task()
    run = rota.run(
        [mine],
        Full(),
        estimator=FedAvg(),
        personal=METHODS[method](**OPTIONS[method]),
        rounds=ROUNDS,
        engine=engine,
        device="cpu",
    )
    first = mine.build(rota.rng.key(0, "model", 0))
    shared, own = by_loop(method, first)
    torch.testing.assert_close(run.state.models[0].params, flat(shared), rtol=1e-4, atol=1e-6)
    kept = run.state.policies["personal"]
    if method == "fine-tuning":
        assert kept == {}
    else:
        memory.settle(kept)
        part = everything if method == "ditto" else is_head
        known = torch.stack([flat(each, part) for each in own])
        torch.testing.assert_close(kept["memory.0"], known, rtol=1e-4, atol=1e-6)
    told = run.records[-1]["groups_of_clients"]["blobs"]["own"]
    expected = [accuracy(each, client) for client, each in enumerate(own)]
    np.testing.assert_allclose([told[str(c)] for c in range(len(SIZES))], expected, atol=1e-6)
    x, y = blobs().test.x, blobs().test.y
    whole = [float((each(x).argmax(1) == y).float().mean()) for each in own]
    assert run.records[-1]["accuracy"] == pytest.approx(np.mean(whole), abs=1e-6)


def test_the_shared_model_is_as_without_ditto_and_without_fine_tuning() -> None:
    runs = [
        rota.run([task(network, batch=4)], Uniform(3), personal=personal, rounds=3)
        for personal in (None, Ditto(), FineTuning())
    ]
    for run in runs[1:]:
        assert torch.equal(run.state.models[0].params, runs[0].state.models[0].params)


@pytest.mark.parametrize("method", METHODS)
def test_engines_agree_on_networks_with_statistics_and_masks(method: str) -> None:
    both = [
        rota.run(
            [task(network, batch=4, weight_decay=0.1, momentum=0.5, clip=1.0)],
            Uniform(3),
            personal=METHODS[method](),
            rounds=3,
            engine=engine,
            device="cpu",
        )
        for engine in HERE
    ]
    states = [run.state for run in both]
    for state in states:
        if state.policies["personal"]:
            memory.settle(state.policies["personal"])
    one, two = (
        [*state.models[0].weights, *([kept["memory.0"]] if kept else [])]
        for state in states
        for kept in [state.policies["personal"]]
    )
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert both[0].records[-1]["own_mean"] == pytest.approx(both[1].records[-1]["own_mean"])


# ---- a part of a network that trains


@pytest.mark.parametrize("part", ["head", "body"])
def test_what_does_not_train_is_a_buffer_and_its_numbers_are_found_again(part: Any) -> None:
    mine = task(network)
    module = mine.build()
    both = torch.cat(rota.weights.read(module))
    cut = rota.weights.read(freeze(copy.deepcopy(module), 1, part))
    found = places(mine, 1, part)
    assert torch.equal(both[found.params], cut.params)
    assert torch.equal(both[found.buffers], cut.buffers)
    assert len(cut.params) == (27 if part == "head" else 56)


def test_a_head_must_leave_a_body() -> None:
    with pytest.raises(rota.BadInput, match=r"personal\.layers is 2, but the model has 2 layers"):
        rota.run([task()], Full(), personal=FedPer(layers=2), rounds=1)


# ---- costs


def cost(personal: Any, **changes: Any) -> Run:
    return rota.run([task(batch=4)], Uniform(3), personal=personal, rounds=2, **changes)


def test_ditto_trains_twice_and_heads_do_not_travel() -> None:
    usual = cost(None)
    ditto, fedper, fedrep = cost(Ditto()), cost(FedPer()), cost(FedRep())
    trained = usual.summary["client_seconds"]
    assert ditto.summary["client_seconds"] == pytest.approx(2 * trained)
    assert fedper.summary["client_seconds"] == pytest.approx(trained)
    assert fedrep.summary["client_seconds"] == pytest.approx(2 * trained)
    assert ditto.state.bytes_up == usual.state.bytes_up
    head = 4 * (6 * 3 + 3)
    for run in (fedper, fedrep):
        assert usual.state.bytes_up - run.state.bytes_up == 2 * 3 * head
        assert usual.state.bytes_down - run.state.bytes_down == 2 * 3 * head
    assert cost(FineTuning()).summary["client_seconds"] == pytest.approx(trained)


def test_controls_of_heads_do_not_travel_either() -> None:
    usual = cost(None, estimator=ESTIMATORS["scaffold"]())
    heads = cost(FedPer(), estimator=ESTIMATORS["scaffold"]())
    assert usual.state.bytes_up - heads.state.bytes_up == 2 * 2 * 3 * 4 * (6 * 3 + 3)
    assert not heads.state.policies["estimator"]["common.0"][-21:].any()


def test_a_slower_clients_own_work_is_on_the_clock() -> None:
    assert cost(Ditto()).state.seconds > cost(None).state.seconds


# ---- together with other policies, and over interruptions


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_works_with_estimators(method: str, estimator: str) -> None:
    if estimator in ("stale-vr", "stale-vre"):
        pytest.skip("it needs a sampler that asks clients")
    run = rota.run(
        [task(batch=4), task(batch=4, name="other")],
        Uniform(2),
        estimator=ESTIMATORS[estimator](),
        personal=METHODS[method](),
        rounds=3,
    )
    assert all(np.isfinite(run.rounds["own_mean"]))


@pytest.mark.parametrize("method", METHODS)
def test_it_works_inside_groups(method: str) -> None:
    """Personal models are the clients', so they go on when groups change."""
    from test_grouping import Halves

    halves = Halves()
    run = rota.run([task(batch=4)], Full(), grouping=halves, personal=METHODS[method](), rounds=4)
    found = run.records[-1]["groups_of_clients"]
    assert sorted(c for group in found.values() for c in group["own"]) == list("01234")
    if method == "ditto":
        alone = rota.run([task(batch=4)], Full(), personal=Ditto(strength=0), rounds=4)
        split = rota.run(
            [task(batch=4)], Full(), grouping=halves, personal=Ditto(strength=0), rounds=4
        )
        one, two = (each.state.policies["personal"] for each in (alone, split))
        for kept in (one, two):
            memory.settle(kept)
        assert torch.equal(one["memory.0"], two["memory.0"])


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("method", ["ditto", "fedper", "fedrep"])
def test_a_resumed_run_is_the_same_bytes(tmp_path: Path, method: str, place: Any) -> None:
    def play(out: Path, **how: Any) -> None:
        personal = METHODS[method](memory=place)
        mine = [task(network, batch=4)]
        rota.run(mine, Uniform(2), personal=personal, rounds=6, out=out, **how)

    play(tmp_path / "whole")
    with pytest.raises(Interrupted):
        play(tmp_path / "parts", watch=stop_after(3, KeyboardInterrupt()))
    play(tmp_path / "parts", resume=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_client_whose_training_fails_keeps_what_it_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = blobs()
    data.train.of(2)[0].fill_(3e38)
    run = rota.run([task(linear, batch=4, data=data)], Full(), personal=Ditto(), rounds=2)
    kept = run.state.policies["personal"]
    memory.settle(kept)
    first = flat(task(linear).build(rota.rng.key(0, "model", 0)))
    assert torch.equal(kept["memory.0"][2], first)
    assert not torch.equal(kept["memory.0"][1], first)
    assert "client 2: its personal training failed, so it keeps what it had" in caplog.text
    assert [each["client"] for each in run.records[0]["failures"]] == [2]


@pytest.mark.parametrize(
    ("personal", "changes", "complaint"),
    [
        (
            Ditto(),
            {"capacity": Fixed((1.0, 0.5))},
            "personal.name is 'ditto', but clients may hold",
        ),
        (FedPer(), {"sampler": rota.sampling.SAMPLERS["ocs"]()}, "the sampler asks clients"),
        (FedPer(), {"grouping": Ifca()}, "ifca asks clients for losses of whole models"),
        (FedRep(), {"channel": rota.channel.Half()}, "channel encodes updates of whole models"),
        (
            FedPer(),
            {"sampler": Uniform(2), "metrics": ["variance"]},
            "metrics measure updates of whole models",
        ),
        (Ditto(strength=-1), {}, "personal.strength is -1: it must be at least 0"),
        (Ditto(epochs=0), {}, "personal.epochs is 0: it must be at least 1"),
        (FineTuning(epochs=0), {}, "personal.epochs is 0: it must be at least 1"),
        (FedRep(epochs=0), {}, "personal.epochs is 0: it must be at least 1"),
        (FedPer(layers=0), {}, "personal.layers is 0: it must be at least 1"),
        (Ditto(memory="ram"), {}, "personal.memory is 'ram'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_go_together_is_one_sentence(
    personal: Any, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(rota.BadInput, match=complaint.replace(".", r"\.")):
        rota.run([task()], **{"sampler": Full(), **changes}, personal=personal, rounds=1)


def test_clients_need_test_sets_of_their_own() -> None:
    shared = Task(plain, federation(SIZES), name="blobs")
    with pytest.raises(rota.BadInput, match=r"set data\.matched_test to true"):
        rota.run([shared], Full(), personal=FineTuning(), rounds=1)


def test_a_report_and_a_summary_say_whose_models_are_tested(tmp_path: Path) -> None:
    from rota.cli.report import write_page
    from rota.cli.summary import sentences, table

    results = []
    for seed, (name, personal) in enumerate((("none", None), ("ditto", Ditto()))):
        out = tmp_path / name
        run = rota.run([task()], Full(), personal=personal, rounds=2, out=out)
        page = write_page([out], tmp_path / "page.html").read_text()
        assert ("With personal models, it is the mean" in page) == (name == "ditto")
        own = f"mean {run.summary['own_mean']:.2%}, worst {run.summary['own_worst']:.2%}"
        assert f"clients on their own test sets: {own}" in "\n".join(sentences(run.summary))
        results.append({**run.summary, "run": f"{name}-seed{seed}"})
    for line, result in zip(table(results), results, strict=True):
        assert f"mean client {result['own_mean']:.2%}  worst client" in line


def test_the_table_has_a_line_on_each() -> None:
    assert set(PERSONALS) == {"none", *METHODS}


def test_real_devices_and_drift_are_refused() -> None:
    pytest.importorskip("flwr")
    from types import SimpleNamespace

    from rota.flower.engine import Remote

    experiment = rota.Experiment([task()], Full(), personal=Ditto())
    fleet: Any = SimpleNamespace(rules=SimpleNamespace(check=lambda: None))
    with pytest.raises(rota.BadInput, match="personal models are for simulations"):
        Remote(experiment, fleet, Options(torch.device("cpu")), [])
    with pytest.raises(rota.BadInput, match=r"drift\.every is given: leave out one of the two"):
        rota.run([task()], Full(), personal=Ditto(), drift=Drift(every=2), rounds=1)
