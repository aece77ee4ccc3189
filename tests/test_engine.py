"""One suite for all engines: each must do what a plain training loop, written out here, does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HERE, federation, linear, network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rota
from rota import rng, weights
from rota.data.federation import Federation, Part
from rota.engine import Batched, Engine, backends, local, make, native, trials
from rota.engine import parts as engine_parts
from rota.engine.backends.graphs import in_parts
from rota.engine.flops import step_flops
from rota.engine.group import Group, Result
from rota.engine.rules import Unbatchable
from rota.engine.schedule import batches, examples_of, grid, local_steps, widths
from rota.engine.stack import active
from rota.engine.steps import Steps
from rota.engine.trials import same_step
from rota.experiment import Experiment
from rota.models import MODELS
from rota.plan import Chunk, Local, Model, Plan, Task, whole
from rota.running.check import check
from rota.submodel.choice import Random, Wanted
from rota.submodel.cut import SubModel, keep
from rota.submodel.units import find_units
from rota.weights import Weights
from rota.world.devices import Devices


@pytest.fixture(autouse=True, scope="module", params=["native", "stacks"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with the C library and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTA_NATIVE", "1" if request.param == "native" else "0")
        yield request.param


def pairs(clients: list[int], models: list[int] | None = None) -> Plan:
    n = len(clients)
    return Plan(
        np.array(clients, np.int64), np.array(models or [0] * n, np.int64), np.ones(n), np.ones(n)
    )


def divided(plan: Plan, task: Task, models: list[Model], widths: list[float], now: int = 1) -> Plan:
    """The plan in which each row holds a part of this width, of units that the round draws."""
    units = find_units(task.build(), task.federation.train.x[:2])
    cut, parts = np.zeros(len(plan), np.int64), []
    for s, model in enumerate(models):
        for width in sorted({*widths} - {1.0}):
            generator = np.random.default_rng([s, now, int(100 * width)])
            kept = Random().keep({}, Wanted(s, model, units, width, now), generator)
            parts.append(SubModel(s, width, 0.1, keep(units, kept)))
            cut[(plan.model == s) & (np.array(widths) == width)] = len(parts)
    return replace(plan, cut=cut, cuts=tuple(parts))


def collect(
    engine: Engine,
    models: list[Model],
    plan: Plan,
    now: int = 1,
    local: Local | None = None,
    how: Any = "plain",
) -> dict[int, tuple[torch.Tensor, torch.Tensor, Chunk]]:
    """Plan row -> (update, buffers, its chunk)."""
    out = {}
    for chunk in engine.train(replace(whole(models, plan, now, local), how=how)):
        assert (plan.model[chunk.rows] == chunk.model).all()
        for at, row in enumerate(chunk.rows.tolist()):
            assert row not in out
            out[row] = (chunk.update[at], chunk.buffers[at], chunk)
    assert sorted(out) == [*range(len(plan))]
    return out


def plain(task: Task, start: Weights, client: int, model: int = 0) -> tuple[Weights, float, int]:
    """Local training written out: shuffled mini-batches, SGD, FedProx's pull. No dropout."""
    module = task.build()
    weights.load(module, start)
    module.train()
    x, y = task.data.train.of(client)
    size = len(y) if task.batch is None else task.batch
    key = rng.as_tensor([rng.key(0, "train", 1, client, model)])[0]
    origin = [p.detach().clone() for p in module.parameters()]
    losses, seen, step, epoch = [], 0, 0, 0
    least = 2 if any(isinstance(m, nn.BatchNorm1d) for m in module.modules()) else 1
    per_epoch = len(y) // size + (len(y) % size >= least)
    total = task.steps if task.steps is not None else task.epochs * per_epoch
    while step < total:
        order = rng.permutation(rng.fold(key, epoch), len(y))
        for first in range(0, len(y), size):
            if step == total:
                break
            batch = order[first : first + size]
            if len(batch) < least:
                continue
            loss = F.cross_entropy(module(x[batch]), y[batch])
            pull = sum(
                ((p - o) ** 2).sum() for p, o in zip(module.parameters(), origin, strict=True)
            )
            grads = torch.autograd.grad(loss + task.prox / 2 * pull, list(module.parameters()))
            with torch.no_grad():
                for p, g in zip(module.parameters(), grads, strict=True):
                    p -= task.lr * g
            losses.append(loss.item())
            seen += len(batch)
            step += 1
        epoch += 1
    return weights.read(module), float(np.mean(losses)), seen


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, classes)
    )


WORK = {
    "mini-batches": {"batch": 7},
    "one batch": {"batch": None, "epochs": 3},
    "steps": {"batch": 4, "steps": 11},
    "one step": {"batch": 6, "steps": 1},
    "epochs": {"batch": 7, "epochs": 2, "lr": 0.02},
    "prox": {"batch": 5, "epochs": 2, "prox": 0.7},
}
SIZES = [9, 23, 16, 40]


@pytest.mark.parametrize("name", HERE)
class TestEveryEngine:
    @pytest.mark.parametrize("work", WORK.values(), ids=WORK)
    @pytest.mark.parametrize("model", [linear, mlp])
    def test_a_row_is_a_plain_training_loop(
        self, name: str, work: dict[str, float], model: object
    ) -> None:
        task = Task(model, federation(SIZES), **work)  # type: ignore[arg-type]
        engine = make(name, Experiment([task]), "cpu")
        models = engine.initial()
        for row, (update, buffers, chunk) in collect(engine, models, pairs([2, 0, 3])).items():
            end, loss, seen = plain(task, models[0], [2, 0, 3][row])
            torch.testing.assert_close(models[0].params - update, end.params, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(buffers, end.buffers, rtol=1e-4, atol=1e-5)
            at = chunk.rows.tolist().index(row)
            assert chunk.loss[at] == pytest.approx(loss, rel=1e-4)
            assert chunk.examples[at] == seen
            assert chunk.reason[at] == ""

    def test_a_row_depends_on_nothing_beside_it(self, name: str) -> None:
        task = Task(network, federation(SIZES), batch=7)
        engine = make(name, Experiment([task]), "cpu")
        models = engine.initial()
        together = collect(engine, models, pairs([0, 1, 2, 3]))
        alone = collect(engine, models, pairs([2]))
        reordered = collect(engine, models, pairs([3, 2]))
        torch.testing.assert_close(together[2][0], alone[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(together[2][0], reordered[1][0], rtol=1e-4, atol=1e-6)

    def test_repeated_it_is_bit_identical(self, name: str) -> None:
        task = Task(network, federation(SIZES), batch=7)
        first, second = (
            collect(e, e.initial(), pairs([0, 1, 3]))
            for e in (make(name, Experiment([task]), "cpu") for _ in range(2))
        )
        assert all(torch.equal(first[row][0], second[row][0]) for row in first)

    def test_dropout_is_each_clients_own_and_each_rounds(self, name: str) -> None:
        """Two clients with the same data have other orders and masks, and so has another round."""
        x, y = torch.randn(12, 4), torch.arange(12) % 3
        task = Task(network, rota.from_clients([(x, y), (x, y)], (x, y)), batch=None)
        engine = make(name, Experiment([task]), "cpu")
        models = engine.initial()
        updates = [u for u, _, _ in collect(engine, models, pairs([0, 1])).values()]
        updates.append(collect(engine, models, pairs([0]), now=2)[0][0])
        assert not any(torch.allclose(updates[i], updates[j]) for i, j in ((0, 1), (0, 2), (1, 2)))

    def test_several_models_in_one_plan(self, name: str) -> None:
        one, two = (
            Task(linear, federation(SIZES), batch=7),
            Task(mlp, federation(SIZES, seed=1), batch=None, lr=0.05),
        )
        engine = make(name, Experiment([one, two]), "cpu")
        models = engine.initial()
        plan = pairs([3, 0, 3], [1, 0, 0])
        for row, (update, _, _) in collect(engine, models, plan).items():
            client, model = int(plan.client[row]), int(plan.model[row])
            end, _, _ = plain([one, two][model], models[model], client, model)
            torch.testing.assert_close(
                models[model].params - update, end.params, rtol=1e-4, atol=1e-5
            )

    def test_a_single_example_cannot_be_batch_normalised(self, name: str) -> None:
        engine = make(name, Experiment([Task(mlp, federation([9, 1, 5]), batch=4)]), "cpu")
        reasons = {
            row: chunk.reason[chunk.rows.tolist().index(row)]
            for row, (_, _, chunk) in collect(engine, engine.initial(), pairs([0, 1, 2])).items()
        }
        assert reasons == {0: "", 1: local.TOO_FEW, 2: ""}

    def test_an_empty_plan_gives_nothing(self, name: str) -> None:
        engine = make(name, Experiment([Task(linear, federation(SIZES))]), "cpu")
        assert collect(engine, engine.initial(), pairs([])) == {}

    @pytest.mark.parametrize("own_test", [False, True])
    def test_evaluation(self, name: str, own_test: bool) -> None:
        task = Task(network, federation(SIZES, own_test=own_test))
        engine = make(name, Experiment([task]), "cpu")
        models = engine.initial()
        module = task.build()
        weights.load(module, models[0])
        module.eval()
        score = engine.evaluate(models)[0]
        outputs = module(task.data.test.x)
        assert score.loss == pytest.approx(
            F.cross_entropy(outputs, task.data.test.y).item(), rel=1e-5
        )
        hits = (outputs.argmax(1) == task.data.test.y).double()
        assert score.accuracy == pytest.approx(float(hits.mean()))
        if own_test:
            assert score.by_client is not None
            assert score.by_client == pytest.approx(hits.view(len(SIZES), 10).mean(1).numpy())
        else:
            assert score.by_client is None

    def test_seconds_come_from_the_device_profile(self, name: str) -> None:
        task = Task(linear, federation(SIZES), batch=7)
        devices = Devices(gflops=2e-6, mbps=0.08, spread=0.4)
        engine = make(name, Experiment([task], devices=devices), "cpu")
        models = engine.initial()
        profile = devices.profile(len(SIZES), 0)
        speed, link = profile.speed, profile.link
        flops = 3 * 2 * 4 * 3  # forward and backward of a 4 x 3 product
        for row, (_, _, chunk) in collect(engine, models, pairs([1, 3])).items():
            client = [1, 3][row]
            expected = SIZES[client] * flops / speed[client] + 2 * models[0].nbytes / link[client]
            assert chunk.costs.seconds[chunk.rows.tolist().index(row)] == pytest.approx(expected)
        assert speed[1] != speed[3]

    def test_m_workers_with_one_step_are_one_machine(self, name: str) -> None:
        """The mean of equal workers' whole-data gradients is the gradient of all data."""
        data = federation([12] * 5)
        task = Task(linear, data, lr=0.3, batch=None, steps=1)
        run = rota.run([task], rota.sampling.Full(), rounds=20, engine=name, device="cpu")
        module = task.build(rng.key(0, "model", 0))
        for _ in range(20):
            grads = torch.autograd.grad(
                F.cross_entropy(module(data.train.x), data.train.y), list(module.parameters())
            )
            with torch.no_grad():
                for p, g in zip(module.parameters(), grads, strict=True):
                    p -= 0.3 * g
        torch.testing.assert_close(
            run.state.models[0].params, weights.read(module).params, rtol=1e-4, atol=1e-5
        )


@given(
    st.integers(1, 50),
    st.integers(1, 60) | st.none(),
    st.integers(1, 3),
    st.integers(1, 20) | st.none(),
)
@settings(max_examples=100, deadline=None)
def test_batches_cover_every_epoch_once(
    examples: int, batch: int | None, epochs: int, steps: int | None
) -> None:
    task = replace(Task(linear, federation([3])), batch=batch, epochs=epochs, steps=steps)
    found = batches(task, examples, torch.tensor(7))
    per_epoch = 1 if batch is None else -(-examples // batch)
    for first in range(0, len(found) - per_epoch + 1, per_epoch):
        assert sorted(torch.cat(found[first : first + per_epoch]).tolist()) == [*range(examples)]
    assert len(found) == (epochs * per_epoch if steps is None else steps)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 20) | st.none())
@settings(max_examples=100, deadline=None)
def test_single_examples_are_left_out_for_batchnorm(
    examples: int, batch: int, steps: int | None
) -> None:
    task = replace(Task(linear, federation([3])), batch=batch, epochs=2, steps=steps)
    found = batches(task, examples, torch.tensor(7), least=2)
    assert all(len(piece) >= 2 for piece in found)
    if batch == 1 or examples == 1:
        assert found == []
    else:
        assert len(found) == (steps or 2 * (examples // batch + (examples % batch > 1)))


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.4), nn.Dropout1d(0.4), nn.Dropout2d(0.4), nn.Dropout3d(0.4)]
)
def test_addressed_dropout_keeps_the_mean_and_drops_as_often_as_asked(layer: nn.Module) -> None:
    layer.train()
    x = torch.ones(
        200,
        30,
        *[3] * {"Dropout1d": 1, "Dropout2d": 2, "Dropout3d": 3}.get(type(layer).__name__, 0),
    )
    mode = local.Dropout(torch.tensor(3))
    with mode:
        first, second = layer(x), layer(x)
        mode.start(1)
        third = layer(x)
        mode.start(0)
        again = layer(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert float((first == 0).float().mean()) == pytest.approx(0.4, abs=0.03)
    assert float(first.mean()) == pytest.approx(1.0, abs=0.05)
    if first.dim() > 2:
        assert bool(((first == 0).flatten(2).float().mean(2) % 1 == 0).all()), "whole channels"
    layer.eval()
    with mode:
        assert torch.equal(layer(x), x)


def test_lstm_flops_are_counted() -> None:
    x = torch.randint(0, 80, (4, 80))
    task = Task(
        rota.models.lstm_shakespeare, rota.from_clients([(x, x[:, 0])], (x, x[:, 0]), classes=80)
    )
    products = 80 * (4 * 128 * (80 + 128) + 4 * 128 * (128 + 128)) + 128 * 80
    assert step_flops(task, task.federation.train.x) == 3 * 2 * products


def test_flops_are_counted_where_a_single_example_has_no_statistics() -> None:
    """BatchNorm without running statistics takes none of a single pixel, as small images leave."""
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    task = Task(
        rota.models.preact_resnet18, rota.from_clients([(x, y)], (x, y), classes=10), batch=4
    )
    rest = [64 * 8**2 * 3 * 9, 512 * 10]  # the first convolution and the last layer
    wide = [
        4 * 64**2 * 9 * 8**2,
        *(
            (c // 2 * c * 9 + 3 * c**2 * 9 + c // 2 * c) * s**2
            for c, s in ((128, 4), (256, 2), (512, 1))
        ),
    ]
    assert step_flops(task, task.federation.train.x) == 3 * 2 * sum([*rest, *wide])


class Mixing(nn.Linear):
    """Centres its outputs over the mini-batch: padding would change them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out - out.mean(0)


class Counting(nn.Linear):
    """Asks for a number in the middle of its forward pass, which no tracer can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if float(x.sum()) > 0 else 1.0)


def frozen() -> nn.Module:
    """The first layer stays as it is."""
    first = nn.Linear(4, 5)
    first.requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(5, 3))


class Unused(nn.Linear):
    """Has parameters that take no part."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.spare = nn.Parameter(torch.ones(5))


class Following(nn.Linear):
    """Keeps a moving average of its inputs, which no gradient shows."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Slowing(nn.Linear):
    """Numbers its mini-batches, and learns less from each."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.number += 1
        return super().forward(x) / (1 + self.number)


class Foreign(nn.Linear):
    """Leaves torch on its way, so nothing can be counted without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(2 * x.numpy()))


ODD = {
    "following": (Following, "changes a buffer in another way than BatchNorm does"),
    "slowing": (Slowing, "counts mini-batches, or remembers something else of them"),
    "foreign": (lambda: Foreign(4, 3), "has an operation that is only known for one client"),
    "mixing": (lambda: Mixing(4, 3), "mixes the examples of a mini-batch"),
    "counting": (lambda: Counting(4, 3), "decides by its values what to compute"),
    "frozen": (frozen, "has frozen parameters"),
    "unused": (Unused, "has unused parameters"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_said(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(ODD[kind][0], federation(SIZES), batch=7, weight_decay=0.1, name="odd")
    plain, fast = (
        make("sequential", Experiment([task]), "cpu"),
        make("batched", Experiment([task]), "cpu"),
    )
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith(
        "task 'odd' runs on the sequential engine, one client at a time: its model "
    )
    assert ODD[kind][1] in said
    models = plain.initial()
    one, two = (collect(engine, models, pairs([0, 3])) for engine in (plain, fast))
    assert all(torch.equal(one[row][0], two[row][0]) for row in one)
    assert all(torch.equal(one[row][1], two[row][1]) for row in one)
    still = {"frozen": slice(0, 25), "unused": slice(15, 20)}.get(kind, slice(0, 0))
    assert all(not update[still].any() and update.any() for update, *_ in one.values())


class Again(nn.Module):
    """One BatchNorm layer that is used three times, after nothing is kept of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.gone = nn.Dropout(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.norm(x)) + self.gone(x))
        out: torch.Tensor = self.last(self.norm(x.tanh()))
        return out


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_layer_that_is_used_again_has_statistics_of_all_its_inputs(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", native)
    data = federation(SIZES)
    parts = (replace(part, x=part.x.double()) for part in (data.train, data.test))
    task = Task(lambda: Again().double(), Federation("d", *parts, 3), batch=7, epochs=2)
    plain, fast = (make(name, Experiment([task]), "cpu") for name in ("sequential", "batched"))
    assert isinstance(fast, Batched)
    assert fast.families
    models = plain.initial()
    one, two = (collect(engine, models, pairs([0, 3])) for engine in (plain, fast))
    for row, (update, buffers, chunk) in one.items():
        assert not chunk.reason[0]
        torch.testing.assert_close(two[row][0], update)
        torch.testing.assert_close(two[row][1], buffers)


@pytest.mark.parametrize("engine", HERE)
def test_training_does_not_change_the_data(engine: str) -> None:
    """Not even with a first layer that works in place."""
    data = federation(SIZES)
    before = data.train.x.clone()
    for first in (nn.Dropout(0.5, inplace=True), nn.Flatten()):
        task = Task(lambda f=first: nn.Sequential(f, nn.Linear(4, 3)), data, batch=7)
        what = Experiment([task])
        check(what)
        machine = make(engine, what, "cpu")
        collect(machine, machine.initial(), pairs([0, 3]))
        machine.evaluate(machine.initial())
    assert torch.equal(data.train.x, before)


@pytest.mark.parametrize("spoilt", [0, 2, 3])
def test_a_trial_that_rounding_spoils_is_repeated(
    spoilt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def compare(*given: Any) -> None:
        seen.append(given[3].tolist())
        if len(seen) <= spoilt:
            raise Unbatchable("a ReLU was turned")
        same_step(*given)

    for module in (trials, native):
        monkeypatch.setattr(module, "same_step", compare)
    fast = make(
        "batched", Experiment([Task(linear, federation(SIZES), batch=7, momentum=0.5)]), "cpu"
    )
    assert isinstance(fast, Batched)
    assert len(fast.families) == (spoilt < 3)
    assert len(seen) == min(3, spoilt + 1)
    assert len({example for pick in seen for example in pick}) == sum(len(pick) for pick in seen), (
        "other examples each time"
    )


ZOO = {
    "logistic": (60,),
    "linear": (60,),
    "mlp": (60,),
    "two_nn": (1, 28, 28),
    "s2_small": (1, 28, 28),
    "s2_classic": (1, 28, 28),
    "s2_wide": (1, 16, 16),
    "cnn": (1, 12, 12),
    "kvib_cnn": (1, 28, 28),
    "fluid_femnist": (1, 12, 12),
    "leaf_femnist": (1, 8, 8),
    "mmfl_cnn": (1, 12, 12),
    "mmfl_emnist": (1, 28, 28),
    "pfl_cnn": (3, 12, 12),
    "vgg9": (3, 16, 16),
    # smaller images leave a single pixel; its statistics over two examples magnify rounding
    "resnet18": (3, 16, 16),
    "preact_resnet18": (3, 16, 16),
    "lstm_shakespeare": (4,),
    "leaf_lstm": (4,),
    "mmfl_lstm": (4,),
    "resnet8": (3, 16, 16),
    "lenet": (1, 16, 16),
    "transformer": (4,),
}
SLOW = {"resnet18", "preact_resnet18", "leaf_femnist", "vgg9"}


def test_every_model_is_compared() -> None:
    assert set(ZOO) == set(MODELS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ZOO]
)
def test_stacked_and_plain_training_agree_to_the_last_digits_of_float64(name: str) -> None:
    """Every model of the zoo, with unequal clients and a partial last batch, in any stack.

    Two of the clients hold a half of the model.
    """
    generator = torch.Generator().manual_seed(0)
    sizes, shape = [5, 8, 6, 3], ZOO[name]
    text = "lstm" in name or name == "transformer"
    x = (
        torch.randint(0, 80, (22, *shape), generator=generator)
        if text
        else torch.randn(22, *shape, generator=generator).double()
    )
    classes = 80 if text else 10
    part = Part(x, torch.randint(0, classes, (22,), generator=generator), np.cumsum([0, *sizes]))

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        wanted = inspect.signature(MODELS[name]).parameters
        return MODELS[name](
            **{k: v for k, v in {"shape": shape, "classes": classes}.items() if k in wanted}
        ).double()

    task = Task(build, Federation("zoo", part, part, classes), lr=0.05, batch=3)
    plain, fast = (make(engine, Experiment([task]), "cpu") for engine in ("sequential", "batched"))
    assert isinstance(fast, Batched)
    assert fast.families, "the model must be stackable"
    models = plain.initial()
    plan = divided(pairs([0, 1, 2, 3]), task, models, [1.0, 0.5, 0.5, 1.0])
    expected = collect(plain, models, plan)
    for most in (1, 4):
        fast.families[0].backend.most = lambda _, most=most: most  # type: ignore[method-assign]
        for row, (update, buffers, _) in collect(fast, models, plan).items():
            torch.testing.assert_close(update, expected[row][0], rtol=1e-7, atol=1e-10)
            torch.testing.assert_close(buffers, expected[row][1], rtol=1e-7, atol=1e-10)
    assert all(fast.families[0].smaller.values()), "the smaller model must be stackable"


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_random_networks_plans_and_work(data: st.DataObject) -> None:
    """Both engines agree on random networks, cohorts, widths, optimisers and stack sizes."""
    sizes = data.draw(st.lists(st.integers(2, 14), min_size=2, max_size=6))
    layers = data.draw(
        st.lists(st.sampled_from(["linear", "tanh", "dropout", "layernorm", "relu"]), max_size=4)
    )

    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        parts = {
            "tanh": nn.Tanh,
            "relu": nn.ReLU,
            "dropout": lambda: nn.Dropout(0.4),
            "layernorm": lambda: nn.LayerNorm(5),
        }
        body = [nn.Linear(5, 5) if layer == "linear" else parts[layer]() for layer in layers]
        return nn.Sequential(nn.Linear(shape[0], 5), *body, nn.Linear(5, classes)).double()

    raw = federation(sizes)
    fed = replace(
        raw,
        train=replace(raw.train, x=raw.train.x.double()),
        test=replace(raw.test, x=raw.test.x.double()),
    )
    work = data.draw(
        st.fixed_dictionaries(
            {"batch": st.sampled_from([1, 3, 5, None]), "epochs": st.integers(1, 2)},
            optional={
                "momentum": st.just(0.9),
                "weight_decay": st.just(0.1),
                "clip": st.just(0.5),
                "prox": st.just(0.3),
                "steps": st.integers(1, 5),
                "lr_decay": st.just(0.5),
            },
        )
    )
    clients = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True, min_size=1))
    task = Task(build, fed, lr=0.05, **work)
    plain, fast = (make(engine, Experiment([task]), "cpu") for engine in ("sequential", "batched"))
    most = data.draw(st.sampled_from([1, 2, 6]))
    assert isinstance(fast, Batched)
    fast.families[0].backend.most = lambda _: most  # type: ignore[method-assign]
    models = plain.initial()
    width = st.sampled_from([1.0, 0.9, 0.6, 0.3])
    widths = data.draw(st.lists(width, min_size=len(clients), max_size=len(clients)))
    plan = divided(pairs(clients), task, models, widths, now=2)
    vectors = torch.randn(3, len(clients), len(models[0].params), dtype=torch.float64)
    start, anchor, shift = (
        (lambda rows, each=each: each[rows]) if data.draw(st.booleans()) else None
        for each in vectors
    )
    nothing = torch.zeros(len(clients), 0, dtype=torch.float64)
    begin = None if start is None else lambda rows: Weights(start(rows), nothing[rows])
    local = Local(begin, anchor, shift)
    one, two = (collect(engine, models, plan, 2, local) for engine in (plain, fast))
    for row, (update, _, chunk) in one.items():
        assert not any(chunk.reason)
        torch.testing.assert_close(two[row][0], update, rtol=1e-7, atol=1e-10)


def hidden(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 12), nn.Tanh(), nn.Linear(12, classes))


class TestParts:
    """Two models of one task, and rows of several widths."""

    task = Task(hidden, federation(SIZES), batch=7)
    plan = pairs([0, 1, 3, 2, 1, 3], [0, 0, 0, 1, 1, 1])
    widths: ClassVar[list[float]] = [0.5, 0.51, 1.0, 0.5, 0.5, 0.3]

    def engine(self) -> Batched:
        made = make("batched", Experiment([self.task]), "cpu")
        assert isinstance(made, Batched)
        return made

    def agree(self, fast: Batched, now: int = 1, how: str = "plain") -> None:
        plain = make("sequential", Experiment([self.task]), "cpu")
        first = plain.initial()[0]
        other = replace(first, weights=Weights(1.1 * first.params, first.buffers))
        plan = divided(self.plan, self.task, [first, other], self.widths, now)
        one, two = (
            collect(engine, [first, other], plan, now, None, how) for engine in (plain, fast)
        )
        for row, (update, _, chunk) in one.items():
            mine = two[row][2].of(np.flatnonzero(two[row][2].rows == row))
            assert mine.reason == chunk.reason == [""]
            torch.testing.assert_close(mine.update[0], update, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(mine.costs.computing, chunk.costs.computing)

    @pytest.mark.parametrize("how", ["plain", "scaled"])
    def test_those_of_one_shape_share_a_network_in_all_rounds(self, how: str) -> None:
        """Of all models, whatever their widths are called, and whichever units they keep."""
        fast, scaled = self.engine(), how == "scaled"
        self.agree(fast, 1, how)
        made = dict(fast.families[0].smaller)
        assert made.keys() == {(scaled, (6,)), (scaled, (3,))}
        for now in (2, 3):
            self.agree(fast, now, how)
            assert fast.families[0].smaller == made

    def test_nested_mini_batches_train_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self, "widths", [0.5, 0.5, 1.0, 0.5, 0.5, 1.0])
        fast = self.engine()
        self.agree(fast, 1, "nested")
        assert not fast.families[0].smaller

    def test_old_networks_go_and_rare_shapes_train_one_by_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_parts, "SHAPES", 1)
        fast, alone = self.engine(), []
        one_by_one = fast._one_by_one
        monkeypatch.setattr(
            fast, "_one_by_one", lambda job, rows: alone.append(rows) or one_by_one(job, rows)
        )
        self.agree(fast)
        assert [rows.tolist() for rows in alone] == [[5]]
        assert fast.families[0].smaller.keys() == {(False, (6,))}
        monkeypatch.setattr(self, "widths", [0.3, 0.3, 0.3, 1.0, 1.0, 0.3])
        self.agree(fast, 2)
        assert len(alone) == 1
        assert fast.families[0].smaller.keys() == {(False, (3,))}

    def test_a_width_that_cannot_be_stacked_is_said(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        choose = backends.choose

        def picky(steps: Steps, *rest: Any) -> Any:
            if len(steps.module[0].weight) == 3:  # type: ignore[index]
                raise Unbatchable("is too thin")
            return choose(steps, *rest)

        monkeypatch.setattr(backends, "choose", picky)
        fast = self.engine()
        for now in (1, 2):
            self.agree(fast, now)
        (line,) = caplog.messages
        assert line == (
            "task 'blobs', width 0.3, runs on the sequential engine, one client at a time: its "
            "model is too thin"
        )

    def test_a_diverged_model_has_parts_too(self) -> None:
        """Its numbers do not decide whether the smaller network can be stacked."""
        fast = self.engine()
        first = fast.initial()[0]
        lost = replace(first, weights=Weights(first.params * np.nan, first.buffers))
        plan = divided(pairs([0, 1]), self.task, [lost], [0.5, 1.0])
        fast.losses(whole([lost], plan, 1))  # which loads the network with them
        collect(fast, [lost], plan)
        assert all(fast.families[0].smaller.values())


OPTIMISERS = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.05},
    "clip": {"clip": 0.3},
    "decay": {"lr_decay": 0.5},
}


@pytest.mark.parametrize("work", OPTIMISERS.values(), ids=OPTIMISERS)
def test_local_optimisers_agree(work: dict[str, float]) -> None:
    task = Task(linear, federation(SIZES), batch=7, **work)  # type: ignore[arg-type]
    plain, fast = (make(engine, Experiment([task]), "cpu") for engine in ("sequential", "batched"))
    models = plain.initial()
    one, two = (collect(engine, models, pairs([3, 1, 0]), now=3) for engine in (plain, fast))
    for row in one:
        torch.testing.assert_close(two[row][0], one[row][0], rtol=1e-4, atol=1e-6)
    usual = collect(plain, models, pairs([3, 1, 0]), now=3)
    other = collect(
        make("sequential", Experiment([Task(linear, federation(SIZES), batch=7)]), "cpu"),
        models,
        pairs([3, 1, 0]),
        now=3,
    )
    assert not torch.allclose(usual[0][0], other[0][0]), "the option must matter"


def test_models_that_differ_in_lr_share_stacks() -> None:
    data = federation(SIZES)
    tasks = [Task(linear, data, lr=lr, name=str(lr)) for lr in (0.01, 0.1, 0.3)]
    plain, fast = (make(engine, Experiment(tasks), "cpu") for engine in ("sequential", "batched"))
    assert isinstance(fast, Batched)
    assert [family.tasks for family in fast.families] == [[0, 1, 2]]
    plan = pairs([0, 0, 2, 3, 2], [0, 1, 1, 2, 2])
    one, two = (collect(engine, plain.initial(), plan) for engine in (plain, fast))
    for row in one:
        torch.testing.assert_close(two[row][0], one[row][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("library", ["0", "1"])
def test_models_of_different_data_share_stacks_where_that_is_faster(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROTA_NATIVE", library)
    monkeypatch.setattr(backends, "joins", lambda _: True)
    one_data, other_data = federation(SIZES), federation([5, 40, 3, 8, 21])
    tasks = [
        Task(linear, data, lr=lr, name=str(lr))
        for lr, data in ((0.01, one_data), (0.1, other_data), (0.3, one_data))
    ]
    plain, fast = (make(engine, Experiment(tasks), "cpu") for engine in ("sequential", "batched"))
    assert isinstance(fast, Batched)
    assert [family.tasks for family in fast.families] == [[0, 1, 2]]
    plan = pairs([0, 0, 2, 3, 2, 1, 1], [0, 1, 1, 2, 2, 0, 1])
    one, two = (collect(engine, plain.initial(), plan) for engine in (plain, fast))
    for row in one:
        torch.testing.assert_close(two[row][0], one[row][0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        fast.losses(whole(plain.initial(), plan, 1)).loss,
        plain.losses(whole(plain.initial(), plan, 1)).loss,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (network, (4,)),
        (rota.models.kvib_cnn, (1, 16, 16)),
        (rota.models.preact_resnet18, (3, 8, 8)),
        (rota.models.mmfl_lstm, (3,)),
    ],
)
def test_a_step_made_from_other_widths_is_the_traced_one(
    model: Any, shape: tuple[int, ...]
) -> None:
    """Node by node: after two widths have been traced, no other is."""
    x = (
        torch.zeros(7, *shape)
        if len(shape) > 1 or model is network
        else torch.zeros(7, *shape, dtype=torch.int64)
    )
    part = Part(x, torch.arange(7) % 3, np.array([0, 7]))
    task = Task(model, Federation("some", part, part, 3), lr=0.1, batch=None)
    made, traced = (Steps(task, task.build(), part.x, part.y) for _ in range(2))
    for fused in (True, False):
        for rows, width in ((2, 6), (1, 2), (2, 2), (2, 5), (1, 3), (4, 7)):
            made.get(rows, width, fused)
            traced.ends = [width, width]  # so that it is no other's
            traced.get(rows, width, fused)
            one, other = (steps.made[rows, width, fused].graph for steps in (made, traced))
            assert str(one) == str(other)
    assert {width for _, width in made.traced} == {6, 2}
    assert {width for _, width in traced.traced} == {6, 2, 5, 3, 7}


def test_a_step_whose_computation_depends_on_the_width_is_traced_anew() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(len(x))

    part = Part(torch.zeros(7, 4), torch.arange(7) % 3, np.array([0, 7]))
    task = Task(
        lambda shape, classes: Odd(shape[0], classes),
        Federation("some", part, part, 3),
        lr=0.1,
        batch=None,
    )
    steps = Steps(task, task.build(), part.x, part.y)
    for width in (6, 2, 4):
        steps.get(2, width, True)
    assert {width for _, width in steps.traced} == {6, 2, 4}


@pytest.mark.parametrize(
    ("least", "expected"), [(1, [500, 250, 125, 16, 8, 1]), (16, [500, 250, 125, 16, 16, 16])]
)
def test_smaller_clients_share_the_batch_size_and_its_halves(
    least: int, expected: list[int]
) -> None:
    task = Task(rota.models.logistic, federation([2, 3]), batch=500)
    assert widths(task, np.array([900, 250, 70, 9, 8, 1]), least=least).tolist() == expected


def test_padding_is_little_on_power_law_clients() -> None:
    """K-Vib's Synthetic instance, whose clients have 50 to 5,744 examples, all in one stack."""
    task = Task(rota.models.logistic, rota.data.synthetic_kvib(), lr=0.02, batch=64)
    sizes = task.data.train.sizes
    wide, steps = widths(task, sizes, 1, 1), local_steps(task, sizes, 1)
    slots = sum(
        int(width)
        * sum(active(sorted(steps[wide == width], reverse=True), int((wide == width).sum())))
        for width in set(wide)
    )
    assert 1 - examples_of(task, sizes, 1).sum() / slots < 0.2


@given(st.integers(1, 2000))
def test_the_grid_holds_and_wastes_little(n: int) -> None:
    assert n <= grid(n) <= n * 1.125


def test_a_group_without_memory_is_trained_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[list[int]] = []
    sizes: list[tuple[int, int]] = []

    def train(group: Group) -> Result:
        tried.append(group.row.tolist())
        if len(group) > 2:
            raise torch.OutOfMemoryError("full")
        update = group.start.params[group.line]
        steps = group.steps
        return Result(group.row, update, update[:, :0], steps, steps, steps, [""] * len(group))

    ones, n = np.ones(5, np.int64), 5
    group = Group(
        width=7,
        key=3,
        start=Weights(torch.arange(10.0).view(5, 2), torch.zeros(5, 0)),
        row=np.array([4, 2, 8, 6, 1]),
        client=np.arange(n),
        task=ones,
        first=ones,
        examples=ones,
        batch=ones,
        per_epoch=ones,
        steps=ones,
        processed=ones,
        rate=np.ones(n),
        line=np.arange(n)[::-1].copy(),
        anchor=None,
        shift=torch.zeros(5, 2),
    )
    results = in_parts(group, train, lambda width, rows: sizes.append((width, rows)))
    assert tried == [[4, 2, 8, 6, 1], [4, 2, 8], [4, 2], [8], [6, 1]]
    assert sizes == [(7, 3), (7, 2)]
    assert [row for result in results for row in result.row] == [4, 2, 8, 6, 1]
    found = torch.cat([result.update for result in results])
    assert torch.equal(found, group.start.params.flip(0))
    assert "no memory for 5 rows together: continuing with 3 at a time" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        in_parts(group.of(np.array([0])), lambda _: train(group), lambda *_: None)
