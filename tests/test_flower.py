"""Real devices: the engine over letters, and over real Flower processes."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from fleets import Nodes, Without, dealt, posted

from rota import loop, recipe
from rota.channel import Quantised
from rota.engine import Options, make
from rota.errors import BadInput
from rota.estimate import ESTIMATORS
from rota.experiment import Experiment
from rota.flower import spec
from rota.flower.engine import Remote, await_clients
from rota.flower.fleet import Rules
from rota.flower.serve import Meeting
from rota.flower.superlink import free_port
from rota.grouping import Ifca
from rota.personal import PERSONALS
from rota.plan import Task, whole
from rota.running.check import check
from rota.sampling import SAMPLERS, Full
from rota.sampling.draw import everybody
from rota.submodel import SUBMODELS, Fixed, Whole
from rota.testing import engines
from rota.world.drift import Drift

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="Flower is not installed: pip install 'rota[flower]'",
)
CPU = Options(torch.device("cpu"))
PATIENT = Rules(deadline=240, ordered=True)


# --- the engine, with nodes in this process


@pytest.fixture
def build(tmp_path: Path) -> Any:
    made: list[Remote] = []

    def build(experiment: Experiment) -> Remote:
        made.append(posted(experiment, tmp_path / str(len(made))))
        return made[-1]

    return build


@pytest.mark.parametrize(
    "suite", [*engines.CHECKS, engines.check_same, engines.check_local, engines.check_losses]
)
def test_it_is_an_engine(suite: Any, build: Any) -> None:
    suite(build)


def setting(momentum: float = 0.5, **policies: Any) -> Experiment:
    """Two tasks: one with dropout and BatchNorm, whose clients hold parts of the model."""
    one, two = federation([9, 12, 20, 31, 8, 17]), federation([7, 0, 16, 11, 5, 9], seed=1)
    tasks = [
        Task(network, one, lr=0.1, batch=4, epochs=2, momentum=momentum, lr_decay=0.9, name="a"),
        Task(linear, two, lr=0.2, batch=6, steps=3, prox=0.1, name="b"),
    ]
    policies = {"sampler": Full(), "capacity": Fixed(sizes=(1.0, 0.5)), **policies}
    return Experiment(tasks, seed=3, rounds=20, **policies)


def same(one: Any, two: Any) -> bool:
    """Whether two states have the same models, bit for bit."""
    pairs = zip(one.models, two.models, strict=True)
    return all(
        torch.equal(a, b) for x, y in pairs for a, b in zip(x.weights, y.weights, strict=True)
    )


POLICIES: dict[str, dict[str, Any]] = {
    "parts": {},
    "quantised": {"channel": Quantised(bits=4)},
    "nested": {"submodel": SUBMODELS["fjord"]()},
    "distilled": {"submodel": SUBMODELS["fjord"](distil=True)},
    "scaled": {"submodel": SUBMODELS["heterofl"]()},
    "groups": {"grouping": Ifca(groups=2), "capacity": Whole()},
    "scaffold": {"estimator": ESTIMATORS["scaffold"](), "capacity": Whole(), "momentum": 0.0},
    "losses": {"sampler": SAMPLERS["mmfl-lvr"](budget=5)},
    "norms": {"sampler": SAMPLERS["mmfl-gvr"](budget=5)},
}


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_a_run_is_that_of_the_reference_engine(policies: Any, tmp_path: Path) -> None:
    experiment = setting(**policies)
    check(experiment)
    engine = posted(experiment, tmp_path, 3, Rules(ordered=True))
    plain = make("sequential", experiment, "cpu")
    mine, other = loop.begin(experiment, engine), loop.begin(experiment, plain)
    for _ in range(3):
        mine, line = loop.play(experiment, engine, mine)
        other, _ = loop.play(experiment, plain, other)
        assert not line["failures"]
    assert same(mine, other)


def test_what_cannot_be_sent_is_refused() -> None:
    data = federation([5, 6])
    for task, words in (
        (Task(linear((4,), 3), data), "a module as its model"),
        (Task(lambda shape, classes: linear(shape, classes), data), "cannot import"),
        (Task(linear, data, loss=lambda outputs, y: outputs.sum(1)), "the loss of task"),
    ):
        with pytest.raises(BadInput, match=words):
            spec.tell(task, "a")


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [("personal", name, "personal models are for simulations") for name in list(PERSONALS)[1:]]
    + [("drift", "every", "only a simulation can change clients' data")],
)
def test_what_only_a_simulation_can_do_is_refused(
    kind: str, name: str, words: str, tmp_path: Path
) -> None:
    """Before the server waits for its clients, and by the engine."""
    own = federation([5, 6], own_test=True)
    policy = Drift(every=2) if kind == "drift" else PERSONALS[name]()
    experiment = Experiment([Task(linear, own, name="a")], policies={kind: policy})
    with pytest.raises(BadInput, match=words):
        posted(experiment, tmp_path)
    table = {"every": 2} if kind == "drift" else {"name": name}
    config = recipe.resolve({"task": [{"data": "digits", "model": "logistic"}], kind: table})
    fleet: Any = None
    with pytest.raises(BadInput, match=words):
        Meeting(fleet).build(config, 2, 0.0, tmp_path / "clients.json")


def test_a_client_trains_only_what_its_owner_allows(tmp_path: Path) -> None:
    experiment = Experiment([Task(linear, federation([5, 6]), name="a")], sampler=Full())
    engine = posted(experiment, tmp_path, allow=())
    _, line = loop.play(experiment, engine, loop.begin(experiment, engine))
    assert {each["reason"] for each in line["failures"]} == {
        "this client does not run conftest:linear: its owner has to allow it, with --allow conftest"
    }


# --- real processes


@needs_flower
@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flwr's own
def test_real_processes_give_the_same_numbers_with_any_policies(tmp_path: Path) -> None:
    from rota.flower.serve import fleet_at

    port = free_port()
    nodes = Nodes(f"127.0.0.1:{port}", dealt(setting(), tmp_path, 3))
    try:
        with fleet_at(f"127.0.0.1:{port}", rules=PATIENT) as fleet:
            fleet.tasks = setting().names
            await_clients(fleet, [str(client) for client in range(6)], 240)
            for name, policies in POLICIES.items():
                experiment = setting(**policies)
                engine, plain = Remote(experiment, fleet, CPU, ()), make("sequential", experiment)
                mine, other = (loop.begin(experiment, each) for each in (engine, plain))
                for _ in range(2):
                    mine, line = loop.play(experiment, engine, mine)
                    other, _ = loop.play(experiment, plain, other)
                    assert not line["failures"], name
                assert same(mine, other), name
    finally:
        nodes.close()


@needs_flower
def test_the_inside_of_flwr_is_the_one_that_was_written_for() -> None:
    """A new version of flwr: see that tests/test_flower.py passes, and name it in VERSIONS."""
    import flwr

    from rota.flower import inside

    assert flwr.__version__.rpartition(".")[0] in inside.VERSIONS


@needs_flower
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flwr's own
def test_real_processes_give_the_same_numbers_and_a_killed_node_is_failed_rows(
    tmp_path: Path,
) -> None:
    """With TLS, keys, and a gate, as between machines."""
    from rota.flower import keys as made
    from rota.flower.serve import fleet_at

    experiment, port, keys = setting(), free_port(), tmp_path / "keys"
    made.certify(keys, ["fleet.example.org"])
    for name in "012":
        made.node_key(keys / "nodes" / name)
    plain = Without(make("sequential", experiment, "cpu"))
    nodes = Nodes(f"127.0.0.1:{port}", dealt(experiment, tmp_path, 3), keys)
    try:
        with fleet_at(f"0.0.0.0:{port}", keys, rules=PATIENT) as fleet:
            fleet.tasks = experiment.names
            await_clients(fleet, [str(client) for client in range(6)], 240)
            engine = Remote(experiment, fleet, CPU, ())
            mine, other = loop.begin(experiment, engine), loop.begin(experiment, plain)

            def play(mine: Any, other: Any) -> tuple[Any, Any, set[int]]:
                mine, line = loop.play(experiment, engine, mine)
                other, _ = loop.play(experiment, plain, other)
                assert same(mine, other), line["failures"]
                return mine, other, {each["client"] for each in line["failures"]}

            for _ in range(2):
                mine, other, failed = play(mine, other)
                assert not failed
            job = whole(mine.models, everybody(experiment.shares), 3)
            losses = [each.losses(job, 5).loss for each in (engine, plain)]
            assert np.array_equal(*losses, equal_nan=True)
            nodes.end(1)  # kill -9
            # the round ends when the rows of the others are there, however long they take
            rows = sum(int((task.data.roster.sizes > 0).sum()) for task in experiment.tasks)
            lost = sum(int((task.data.roster.sizes[[1, 4]] > 0).sum()) for task in experiment.tasks)
            plain.failed, fleet.rules = {1, 4}, replace(PATIENT, enough=(rows - lost) / rows)
            mine, other, failed = play(mine, other)
            assert failed == {1, 4}
            nodes.start(1)  # the same node comes back
            plain.failed, fleet.rules = set(), PATIENT
            mine, other, failed = play(mine, other)
            assert not failed
            assert len(fleet.members) == 3
            assert np.isfinite(mine.seconds)
            assert mine.seconds > 0
    finally:
        nodes.close()
