"""Every sampler and every estimator runs on an engine of threads, whatever its clients reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear, network
from contract import Threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rota
from rota import loop
from rota.admission import Admission, admit
from rota.data import Federation
from rota.engine import make
from rota.errors import BadInput
from rota.estimate import ESTIMATORS, SERVERS
from rota.experiment import Experiment
from rota.plan import Chunk, Costs, Job, Model, Plan, Seen, Task, whole
from rota.probe import price
from rota.recipe import registry
from rota.running.check import check
from rota.sampling import SAMPLERS, Full
from rota.weights import Weights

SIZES = [9, 12, 20, 31, 8, 17]
FAULTS = {0: "shape", 1: "dtype", 2: "nan", 3: "huge", 4: "twice"}
PARTNERS = {"mmfl-vre": "stale-vre", "mmfl-gvr": "stale-vr"}


def fleet(faults: dict[int, str], deadline: float = 30.0, **chosen: Any) -> tuple[Any, Threads]:
    """An experiment with only a roster, and clients that each hold nothing but their own data."""
    data = federation(SIZES)
    owners = np.split(np.arange(len(data.train.y)), data.train.offsets[1:-1])
    clients = []
    for client, rows in enumerate(owners):
        pairs: list[Any] = [None] * len(SIZES)
        pairs[client] = data.train.x[rows], data.train.y[rows]
        mine = rota.from_clients(pairs, (data.test.x, data.test.y), classes=data.classes)
        task = Task(linear, mine, lr=0.1, batch=5, name="blobs")
        clients.append(make("sequential", Experiment([task], seed=3), "cpu"))
    experiment = Experiment([Task(linear, data.roster, lr=0.1, batch=5)], seed=3, **chosen)
    check(experiment)
    return experiment, Threads(clients, faults, deadline)


def sampler_of(name: str) -> Any:
    kind = SAMPLERS[name]
    sized = "budget" in registry.options("samplers", kind)
    return kind(**({"budget": 4} if sized else {}))


def play(experiment: Experiment, engine: Any, rounds: int = 3) -> tuple[Any, list[dict[str, Any]]]:
    state, lines = loop.begin(experiment, engine), []
    for _ in range(rounds):
        state, line = loop.play(experiment, engine, state)
        lines.append(line)
        for model in state.models:
            assert torch.isfinite(model.params).all()
            assert model.params.abs().max() < 100
    return state, lines


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(name: str) -> None:
    estimator = ESTIMATORS[PARTNERS.get(name, "unbiased")]()
    experiment, engine = fleet(FAULTS, sampler=sampler_of(name), estimator=estimator)
    _, lines = play(experiment, engine)
    assert any(line["models"]["blobs"]["trained"] for line in lines)
    reasons = {each["client"]: each["reason"] for line in lines for each in line["failures"]}
    for client, word in {0: "shape", 1: "dtype", 2: "finite", 3: "large"}.items():
        assert word in reasons.get(client, word)
    assert 5 not in reasons


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator(name: str, server: str) -> None:
    """With faulty clients the models are those of a run in which these clients just fail."""
    sampler = sampler_of("mmfl-gvr" if name == "stale-vr" else "full")
    policies = {"estimator": ESTIMATORS[name](), "server": SERVERS[server]()}
    states = []
    for faults in (FAULTS, dict.fromkeys([0, 1, 2, 3], "nan")):
        experiment, engine = fleet(faults, sampler=sampler, **policies)
        states.append(play(experiment, engine)[0])
    one, two = (state.models[0].params for state in states)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_measured_costs_arrive_untouched() -> None:
    """Also with a probe before the draw and with controls: the server computes nothing again."""
    for name, estimator in (("full", "unbiased"), ("optimal", "unbiased"), ("full", "scaffold")):
        experiment, engine = fleet({}, sampler=sampler_of(name), estimator=ESTIMATORS[estimator]())
        state = loop.begin(experiment, engine)
        asked = name == "optimal"
        for now in (1, 2):
            before, (state, line) = state, loop.play(experiment, engine, state)
            drawn = [engine.reported[now, client, 0] for client in line["cohort"]["blobs"]]
            first = max(1000.0 + client + client / 8 for client in range(6)) if asked else 0.0
            assert line["seconds"] == pytest.approx(before.seconds + first + max(drawn), abs=1e-9)
            everybody = sum(1000.0 + client + client / 8 for client in range(6)) if asked else 0.0
            assert line["client_seconds"] == pytest.approx((sum(drawn) + everybody) / 2, abs=1e-9)
            size = state.models[0].nbytes * (1 + (estimator == "scaffold"))
            up = len(drawn) * (size + 7) + 6 * 7 * asked
            down = 6 * (size + 3) + 3 * len(drawn) if asked else len(drawn) * (size + 3)
            assert line["bytes_up"] == before.bytes_up + up
            assert line["bytes_down"] == before.bytes_down + down


def test_late_replies_are_dropped_and_silent_clients_have_no_reply() -> None:
    faults = {1: "late", 4: "silent"}
    experiment, engine = fleet(faults, deadline=0.4, sampler=Full())
    _, lines = play(experiment, engine)
    for line in lines:
        assert {each["client"]: each["reason"] for each in line["failures"]} == {
            1: "no reply",
            4: "no reply",
        }
        assert line["models"]["blobs"]["trained"] == 4


def test_replies_that_nobody_asked_for_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    experiment, engine = fleet({2: "stranger", 4: "twice"}, deadline=0.4, sampler=Full())
    quiet, other = fleet({2: "silent"}, deadline=0.4, sampler=Full())
    one, two = (play(e, m)[0].models[0].params for e, m in ((experiment, engine), (quiet, other)))
    torch.testing.assert_close(one, two)
    assert "not asked for" in caplog.text


# --- admission


MODEL = Model(0, Weights(torch.zeros(4), torch.tensor([0.0, -float("inf")])))
PLAN = Plan(np.arange(5), np.zeros(5, np.int64), np.ones(5), np.full(5, 0.2))
JOB = whole([MODEL], PLAN, 3)


def reply(rows: list[int], update: Any = None, buffers: Any = None, **changed: Any) -> Chunk:
    n = len(rows)
    ones = np.ones(n)
    return Chunk(
        rows=np.array(rows, np.int64),
        model=changed.get("model", 0),
        now=changed.get("now", 3),
        lr=0.1,
        update=torch.ones(n, 4) if update is None else update,
        buffers=MODEL.buffers.expand(n, -1).clone() if buffers is None else buffers,
        loss=ones,
        steps=np.ones(n, np.int64),
        examples=ones,
        costs=changed.get("costs", Costs(ones, ones, ones.astype(int), ones.astype(int))),
        reason=changed.get("reason", [""] * n),
    )


def reasons(chunk: Chunk, most: float = np.inf) -> list[str]:
    admitted = admit(chunk, JOB, Seen.nothing(5), most)
    assert admitted is not None
    return admitted.reason


def test_a_good_reply_passes_as_it_is() -> None:
    chunk = reply([0, 3])
    assert admit(chunk, JOB, Seen.nothing(5)) is chunk


def test_a_constant_infinite_buffer_is_no_failure_but_a_new_one_is() -> None:
    changed = MODEL.buffers.expand(2, -1).clone()
    changed[1, 0] = float("inf")
    assert reasons(reply([0, 1], buffers=changed)) == ["", "the update is not finite"]


def test_a_norm_above_the_limit_fails() -> None:
    update = torch.ones(2, 4)
    update[1] *= 100
    assert reasons(reply([0, 1], update), most=50.0) == [
        "",
        "the update's norm is above the limit of 50",
    ]


def test_the_limit_follows_the_norms_seen() -> None:
    admission = Admission(times=10)
    state = admission.init(1)
    assert admission.limit(state, 0) == np.inf
    state = admission.learn(state, 0, np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert admission.limit(state, 0) == 30.0
    for _ in range(50):
        state = admission.learn(state, 0, np.full(10, 7.0))
    assert admission.limit(state, 0) == 70.0
    with pytest.raises(BadInput, match="above 1"):
        Admission(times=1.0).init(1)


class Spoiler:
    """An engine whose replies are changed on their way."""

    def __init__(self, experiment: Experiment, spoil: Callable[[Chunk, Job], Chunk]) -> None:
        self.engine, self.spoil = make("sequential", experiment, "cpu"), spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, job: Job) -> Any:
        for chunk in self.engine.train(job):
            yield self.spoil(chunk, job)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("huge", [1e30, 1e20, 3e38])
def test_huge_replies_neither_reach_models_nor_moments(
    blobs: Federation, server: str, huge: float
) -> None:
    """A finite but huge update is the one that fails; the others are not blamed afterwards."""
    experiment = Experiment(
        [Task(linear, blobs, batch=5)], Full(), server=SERVERS[server](), seed=1
    )

    def spoil(chunk: Chunk, job: Job) -> Chunk:
        wrong = job.plan.client[chunk.rows[0]] == 2 and job.now == 1
        return replace(chunk, update=chunk.update * 0 + huge) if wrong else chunk

    state, lines = play(experiment, Spoiler(experiment, spoil))
    assert [each["client"] for each in lines[0]["failures"]] == [2]
    assert [line["failures"] for line in lines[1:]] == [[], []]
    for moment in state.policies["server"].values():
        assert torch.isfinite(moment).all()


@pytest.mark.parametrize("estimator", ["unbiased", "fedavg", "fedvarp"])
def test_huge_buffers_do_not_overflow_a_models(blobs: Federation, estimator: str) -> None:
    """A running variance near the largest float, weighted, would be infinite for ever."""

    def spoil(chunk: Chunk, job: Job) -> Chunk:
        wrong = job.plan.client[chunk.rows[0]] == 2 and job.now == 1
        return replace(chunk, buffers=chunk.buffers * 0 + 3e38) if wrong else chunk

    sampler = SAMPLERS["uniform"](5, "independent")
    policies = {"estimator": ESTIMATORS[estimator](), "rounds": 3, "seed": 2}
    experiment = Experiment([Task(network, blobs, batch=5)], sampler, **policies)
    state, lines = play(experiment, Spoiler(experiment, spoil))
    assert torch.isfinite(state.models[0].buffers).all()
    assert 2 in lines[0]["cohort"]["blobs"]
    assert [[each["client"] for each in line["failures"]] for line in lines] == [[2], [], []]


class Masked(nn.Linear):
    """A mask of the least floats, whose weighted sum is infinite."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, torch.finfo(torch.float32).min]))


@pytest.mark.parametrize("weights", [[0.9, 0.9], [1.0, -1.0], [0.0, 0.0]])
def test_buffers_that_cannot_be_averaged_stay_as_they_are(
    blobs: Federation, weights: list[float]
) -> None:
    class Two:
        def init(self, shares: Any, rounds: int) -> dict[str, Any]:
            return {}

        def draw(self, state: Any, shares: Any, generator: Any) -> Plan:
            return Plan(np.arange(2), np.zeros(2, int), np.ones(2), np.array(weights))

        def observe(self, state: Any, shares: Any, plan: Any, seen: Any) -> Any:
            return state

    experiment = Experiment([Task(Masked, blobs)], Two(), rounds=2, seed=1)
    state, lines = play(experiment, make("sequential", experiment, "cpu"), rounds=2)
    assert state.models[0].buffers.tolist() == [0.0, torch.finfo(torch.float32).min]
    assert [line["failures"] for line in lines] == [[], []]


@pytest.mark.parametrize("steps", [0.0, -1.0, np.nan])
def test_a_reply_without_a_step_fails(blobs: Federation, steps: float) -> None:
    """Or a control, which is divided by the steps, would make all clients' updates NaN."""

    def spoil(chunk: Chunk, job: Job) -> Chunk:
        wrong = job.plan.client[chunk.rows[0]] == 2 and job.now == 1
        return replace(chunk, steps=chunk.steps * steps) if wrong else chunk

    tasks, scaffold = [Task(linear, blobs, batch=5)], ESTIMATORS["scaffold"]()
    experiment = Experiment(tasks, Full(), scaffold, rounds=3, seed=1)
    state, lines = play(experiment, Spoiler(experiment, spoil))
    assert lines[0]["failures"] == [{"client": 2, "model": "blobs", "reason": "it took no step"}]
    assert [line["failures"] for line in lines[1:]] == [[], []]
    assert torch.isfinite(state.policies["estimator"]["common.0"]).all()


def test_a_step_that_is_not_finite_is_not_taken(blobs: Federation) -> None:
    """Whatever a server's arithmetic does with it; the largest row is the failed one."""

    class Squares:
        def step(self, params: Any, update: Any, state: Any) -> Any:
            return params - update**9, {"moment": update**9}

    experiment = Experiment([Task(linear, blobs, lr=1e6)], Full(), server=Squares(), seed=1)
    state, line = loop.play(
        experiment, engine := make("sequential", experiment, "cpu"), loop.begin(experiment, engine)
    )
    assert torch.equal(state.models[0].params, engine.initial()[0].params)
    assert not state.policies["server"]
    assert len(line["failures"]) == 1
    assert "not finite" in line["failures"][0]["reason"]


@pytest.mark.parametrize("column", ["seconds", "computing", "up", "down"])
@pytest.mark.parametrize("wrong", [np.inf, 1e300, -1.0, np.nan])
def test_costs_that_no_client_can_have_fail_the_row(column: str, wrong: float) -> None:
    """Or the run's clock and its bytes would not be numbers any more; seconds may be unknown."""
    costs = Costs(*np.ones((4, 2)))
    getattr(costs, column)[1] = wrong
    unknown = np.isnan(wrong) and column in ("seconds", "computing")
    failed = "" if unknown else "the costs are not numbers from 0 to 1e+15"
    assert reasons(reply([0, 1], costs=costs)) == [failed] * 2


SHAPES = st.sampled_from([(4,), (3,), (5,), (4, 1), (0,), ()])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
VALUES = st.sampled_from([0.0, 1.0, -1e3, 3e38, -3e38, float("nan"), float("inf"), 1e-40])


@st.composite
def replies(draw: st.DrawFn) -> Chunk:
    rows = draw(st.lists(st.integers(-2, 7), min_size=1, max_size=4))
    n = len(rows)
    shape, dtype = draw(SHAPES), draw(DTYPES)
    values = draw(st.lists(VALUES, min_size=n, max_size=n))
    update: Any = torch.zeros(n, *shape, dtype=torch.float64)
    update += torch.tensor(values, dtype=torch.float64).view(n, *[1] * len(shape))
    update = update.to(dtype)
    buffers = draw(st.sampled_from([None, torch.zeros(n, 1), torch.full((n, 2), float("nan"))]))
    if draw(st.integers(0, 9)) == 0:
        update = draw(st.sampled_from([[1.0], "update", np.ones((n, 4)), 3]))
    number = st.sampled_from([1.0, 1.0, 0.0, -1.0, 1e300, np.nan, np.inf])
    costs = [np.full(n, draw(number)) for _ in range(4)]
    return reply(
        rows,
        update,
        buffers,
        costs=Costs(*costs[:2], *(draw(st.sampled_from([each, np.ones(n)])) for each in costs[2:])),
        now=draw(st.sampled_from([3, 3, 3, 2, 4, -1])),
        model=draw(st.sampled_from([0, 0, 0, 1, -1])),
        reason=draw(st.lists(st.sampled_from(["", "", "it broke"]), min_size=n, max_size=n)),
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(replies(), max_size=6))
def test_nothing_harmful_gets_past_admission(chunks: list[Chunk]) -> None:
    """Every admitted reply was asked for once, fits the model, and can be summed."""
    seen, admitted = Seen.nothing(5), list[int]()
    for given_chunk in chunks:
        chunk = admit(given_chunk, JOB, seen)
        if chunk is None:
            continue
        seen.add(chunk)
        admitted += chunk.rows.tolist()
        assert chunk.update.shape == (len(chunk.rows), 4)
        assert chunk.update.dtype == torch.float32
        fine = chunk.update[torch.from_numpy(chunk.ok)]
        assert torch.isfinite(fine).all()
        assert torch.isfinite((fine * 5).square().sum())
    assert 0 <= min(price(PLAN, seen, None)) <= max(price(PLAN, seen, None)) < np.inf
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) <= set(range(5))
    assert (seen.waits(np.arange(5)) == ~np.isin(np.arange(5), admitted)).all()
