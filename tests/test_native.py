"""The C library against plain torch, and what it leaves to stacks."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import federation
from torch import Tensor, nn

from rota import rng, weights
from rota.data.federation import Federation, Part
from rota.engine import Batched, Engine, local, make
from rota.engine.backends import Library
from rota.engine.native import ROW, build, structures
from rota.engine.native.structures import PRODUCT
from rota.engine.optimisers import fresh
from rota.experiment import Experiment
from rota.plan import Plan, Task, whole

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
SIZES = [7, 4, 9]


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "1")


def random(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, tokens: int = 0
) -> Federation:
    """Random examples of three clients: tokens, or numbers if `tokens` is 0."""
    generator = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    if tokens:
        x = torch.randint(0, tokens, (total, *shape), generator=generator)
    else:
        x = torch.randn(total, *shape, generator=generator).to(dtype)
    y = torch.randint(0, 3, (total,), generator=generator)
    part = Part(x, y, np.cumsum([0, *SIZES]))
    return Federation("test", part, part, 3)


def engine(name: str, task: Task, seed: int = 0) -> Engine:
    return make(name, Experiment([task], seed=seed), "cpu")


def updates(
    engine: Engine, clients: list[int] | None = None, now: int = 1
) -> dict[int, torch.Tensor]:
    """Each client's update; all clients train, or those given, in that order."""
    chosen = np.arange(len(SIZES)) if clients is None else np.array(clients)
    n = len(chosen)
    plan = Plan(chosen, np.zeros(n, int), np.ones(n), np.ones(n))
    found = {}
    for chunk in engine.train(whole(engine.initial(), plan, now)):
        assert chunk.reason == [""] * len(chunk.rows)
        for row, update in zip(chunk.rows, chunk.update, strict=True):
            found[int(chosen[row])] = update
    return found


def fast(task: Task, native: bool = True) -> Batched:
    """The batched engine, with the C library or without it."""
    made = engine("batched", task)
    assert isinstance(made, Batched)
    assert (isinstance(made.families[0].backend, Library)) == native
    return made


class Letters(nn.Module):
    """Words, their mean, the first and the last one, and a power: operators of text models."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.words(x)
        first, last = torch.sigmoid(seen[:, 0]), torch.tanh(seen[:, -1]) ** 3
        return self.out(torch.cat([first * last, seen.mean(1)], 1))  # type: ignore[no-any-return]


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def wide() -> nn.Module:
    layers = [nn.Linear(70, 41), nn.ReLU(), nn.Linear(41, 37), nn.Tanh(), nn.Linear(37, 3)]
    return nn.Sequential(*layers)


def long() -> nn.Module:
    return nn.Sequential(nn.Linear(1100, 21), nn.ReLU(), nn.Linear(21, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.4), nn.Sigmoid(), nn.Linear(30, 3))


def images(*layers: nn.Module, flat: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 3))


def conv3() -> nn.Module:
    return images(nn.Conv2d(8, 16, 3), nn.ReLU(), flat=16 * 49)


def conv3_padded() -> nn.Module:
    first = nn.Conv2d(2, 9, 3, padding=1)
    return images(first, nn.Conv2d(9, 19, 3, padding=1, bias=False), flat=19 * 56)


def conv5() -> nn.Module:
    first = nn.Conv2d(8, 8, 5, padding=2)
    return images(first, nn.Tanh(), nn.Conv2d(8, 17, 5, padding=1), flat=17 * 35)


def conv7() -> nn.Module:
    first = nn.Conv2d(3, 5, 7, padding=3)
    return images(first, nn.ReLU(), nn.Conv2d(5, 4, 1), flat=4 * 81)


def strides() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return images(first, nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), flat=8 * 4)


def columns() -> nn.Module:
    first = nn.Conv2d(13, 9, 3, stride=2, padding=1)
    return images(first, nn.ReLU(), nn.Conv2d(9, 8, 4, padding=2), flat=240)


def one_colour() -> nn.Module:
    """Vectors of pixels, several of them per line; and a pool that leaves pixels out."""
    first = [nn.Conv2d(1, 7, 3, padding=1), nn.MaxPool2d(2, 3), nn.ReLU()]
    return images(*first, nn.Conv2d(7, 2, (2, 3), bias=False), flat=2 * 2 * 10)


def lines() -> nn.Module:
    return images(nn.Conv2d(2, 19, 3, stride=(2, 1), padding=1), flat=19 * 4 * 8)


def pools() -> nn.Module:
    return images(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), flat=8)


def normalised() -> nn.Module:
    return images(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), flat=128)


def grouped() -> nn.Module:
    first = [nn.GroupNorm(2, 4), nn.Conv2d(4, 12, 3), nn.GroupNorm(4, 12), nn.SiLU()]
    return images(*first, nn.AvgPool2d(2), nn.GroupNorm(3, 12, affine=False), flat=48)


class Groups(nn.Module):
    """GroupNorm of vectors, of sequences, and of volumes; some of their groups are one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.vector = nn.Linear(5, 36), nn.GroupNorm(6, 36)
        self.sequence, self.volume = nn.GroupNorm(3, 3), nn.GroupNorm(1, 2)
        self.out = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.vector(self.first(x)))
        seen = torch.tanh(self.sequence(seen.view(-1, 3, 12)))
        return self.out(self.volume(seen.view(-1, 2, 3, 2, 3)).flatten(1))  # type: ignore[no-any-return]


class Causal(nn.Module):
    """A block as in GPT, with positions, a mask, and one table for words in and words out."""

    dropped = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(4, 8)
        self.before, self.after, self.last = (nn.LayerNorm(8) for _ in range(3))
        self.split, self.join = nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, long = x.shape
        seen = self.words(x) + self.places(torch.arange(long))
        split = self.split(self.before(seen)).view(rows, long, 3, 2, 4)
        split = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*split, dropout_p=self.dropped, is_causal=True)
        seen = seen + self.join(heads.transpose(1, 2).reshape(rows, long, 8))
        seen = seen + self.narrow(F.gelu(self.wide(self.after(seen))))
        return (self.last(seen) @ self.words.weight.T)[:, -1]


class Dropped(Causal):
    """The same with dropout inside its attention."""

    dropped = 0.3


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.words(x)).mean(1))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A GRU, which changes its intermediate results in place."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gates = nn.Embedding(11, 6), nn.GRU(6, 7, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gates(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


class Memory(nn.Module):
    """Two layers of an LSTM, whose weights get a product from every step in time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(11, 6), nn.LSTM(6, 7, 2, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.memory(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """What is changed in place is read before, through a copy, and after, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 6), nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        copy, b = a.clone(), a.mul_(2.0) * 3
        b.add_(a, alpha=0.5).mul_(1.5)
        b.sigmoid_()
        return self.out(torch.cat([copy, a.view(-1, 6) * b, b.sub(copy, alpha=2.0)], 1))  # type: ignore[no-any-return]


ACTIVATIONS = [
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.ELU(0.7),
    nn.CELU(0.7),
    nn.LeakyReLU(0.2),
    nn.Softplus(2.0, 3.0),
    nn.Hardtanh(-0.5, 0.8),
    nn.Hardswish(),
]


def bends() -> nn.Module:
    return nn.Sequential(*(layer for each in ACTIVATIONS for layer in (nn.Linear(5, 5), each)))


NETWORKS = {
    linear: (5,),
    wide: (70,),
    long: (1100,),
    dropout: (20,),
    conv3: (8, 9, 9),
    conv3_padded: (2, 7, 8),
    conv5: (8, 9, 7),
    conv7: (3, 9, 9),
    strides: (3, 11, 10),
    columns: (13, 8, 9),
    one_colour: (1, 9, 37),
    lines: (2, 7, 8),
    pools: (4, 9, 9),
    normalised: (4, 6, 6),
    grouped: (4, 6, 6),
    bends: (5,),
    InPlace: (5,),
    Letters: (4,),
    Causal: (4,),
    Dropped: (4,),
    Encoder: (4,),
    Gated: (4,),
    Memory: (4,),
    Groups: (5,),
}
"""A network, and the shape of its examples."""
WORDS = (Letters, Causal, Dropped, Encoder, Gated, Memory)


@needs_compiler
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch", [3, None])
def test_operators_agree_with_torch(network: type[nn.Module], batch: int | None) -> None:
    data = random(NETWORKS[network], tokens=11 if network in WORDS else 0)
    task = Task(lambda: network().double(), data, lr=0.1, batch=batch, epochs=2)
    found = updates(fast(task))
    for client, right in updates(engine("sequential", task)).items():
        torch.testing.assert_close(found[client], right, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("mask", [None, "causal", "words", "numbers"])
def test_attention_that_drops_nothing_is_torchs(mask: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(3, 2, 3, 5, 4, generator=generator).double()
    given = torch.rand(5, 5, generator=generator).double()
    own = {"words": given > 0.4, "numbers": given}.get(mask or "")
    options = {"attn_mask": own, "is_causal": mask == "causal", "scale": 0.7}
    with local.Dropout(torch.tensor(3)):
        found = F.scaled_dot_product_attention(*heads, dropout_p=1e-12, **options)
    right = F.scaled_dot_product_attention(*heads, **options)
    torch.testing.assert_close(found, right)


@needs_compiler
def test_products_that_are_only_summed_are_added_in_place() -> None:
    """Else an LSTM's weights would be written and read once more per step in time."""
    task = Task(lambda: Memory().double(), random((4,), tokens=11), lr=0.1, batch=3)
    backend = fast(task).families[0].backend
    assert isinstance(backend, Library)
    program = backend.native.program(3, fused=True)
    kept = [each.extra[9] for each in program.list[: program.count] if each.code == PRODUCT]
    assert sum(kept) > 2 * 3, "two layers, four letters"


@needs_compiler
def test_short_products_round_little_more_than_plain_ones() -> None:
    """In single precision, Winograd's convolutions err at most ten times as much as torch's own."""
    torch.manual_seed(0)
    module, shape = conv5(), NETWORKS[conv5]
    exact = updates(engine("sequential", Task(module.double(), random(shape), lr=0.1, batch=3)))
    task = Task(module.float(), random(shape, torch.float32), lr=0.1, batch=3)
    ours, theirs = updates(fast(task)), updates(engine("sequential", task))
    for client, right in exact.items():
        error, usual = (float((each[client] - right).norm()) for each in (ours, theirs))
        assert error < 10 * usual + 1e-6 * float(right.norm())


@needs_compiler
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("channels", [(15, 60), (8, 31), (5, 17), (3, 9), (4, 2)])
def test_any_number_of_channels_fits_into_vectors(channels: tuple[int, int], size: int) -> None:
    """Parts of networks have odd numbers of channels: vectors that are only partly filled."""
    few, many = channels

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, few, size, padding=size // 2),
            nn.MaxPool2d(2, 1, 1),
            nn.ReLU(),
            nn.Conv2d(few, many, size),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.LazyLinear(3),
        )

    torch.manual_seed(0)
    module, shape = network().double(), (2, 9, 7)
    module(torch.zeros(1, *shape).double())
    task = Task(module, random(shape), lr=0.1, batch=3)
    found = updates(fast(task))
    for client, right in updates(engine("sequential", task)).items():
        torch.testing.assert_close(found[client], right, rtol=1e-8, atol=1e-11)
    single = updates(fast(Task(module.float(), random(shape, torch.float32), lr=0.1, batch=3)))
    for client, right in found.items():
        torch.testing.assert_close(single[client].double(), right, rtol=1e-3, atol=1e-4)


@needs_compiler
def test_a_row_does_not_depend_on_the_others() -> None:
    made = fast(Task(wide, random((70,), torch.float32), batch=3))
    alone = updates(made, [1], now=4)[1]
    for clients in ([1, 0, 2], [2, 1]):
        assert torch.equal(updates(made, clients, now=4)[1], alone)


@needs_compiler
def test_results_reuse_only_memory_that_nobody_holds() -> None:
    backend = fast(Task(lambda: linear().double(), random((5,)), batch=3)).families[0].backend
    assert isinstance(backend, Library)
    library = backend.native
    held = library.room(4, 6)
    address, part = held.data_ptr(), held[1]
    assert library.room(2, 6).data_ptr() != address
    del held
    assert library.room(2, 6).data_ptr() != address, "a part of it is still held"
    del part
    assert library.room(4, 6).data_ptr() == address
    assert library.room(5, 6).shape == (5, 6)


@needs_compiler
def test_nan_is_not_swallowed() -> None:
    """A max-pool must not pass over one NaN and make damaged data look sound."""
    data = random((4, 9, 9), torch.float32)
    made = fast(Task(pools, data, batch=3))
    data.train.x[:, 0, 4, 4] = float("nan")  # only now: the engine tries its step on some examples
    for update in updates(made).values():
        assert not torch.isfinite(update).all()


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(x)


@needs_compiler
def test_an_operator_without_a_rule_runs_in_stacks() -> None:
    layers = nn.Sequential(nn.Linear(5, 6), Wave(), nn.Linear(6, 3)).double()
    task = Task(layers, random((5,)), batch=3)
    found = updates(fast(task, native=False))
    for client, right in updates(engine("sequential", task)).items():
        torch.testing.assert_close(found[client], right, rtol=1e-7, atol=1e-10)


def test_without_a_compiler_a_task_runs_in_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build._library.cache_clear()
    fast(Task(lambda: nn.Linear(4, 3), federation([4, 5]), batch=3), native=False)
    build._library.cache_clear()


@needs_compiler
def test_structures_are_as_large_as_in_c() -> None:
    """A field that one side lacks would shift all that follow."""
    lib = build.library(torch.float32)
    lib.rota_sizes.restype = None
    sizes = (ctypes.c_int64 * 3)()
    lib.rota_sizes(sizes)
    ours = [ctypes.sizeof(structures.Instruction), ctypes.sizeof(structures.Program)]
    assert list(sizes) == [*ours, ROW.itemsize]


@needs_compiler
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_proximal_term_pulls_to_the_anchor(optimizer: str) -> None:
    """One row pulls to its start and one to another anchor, as in a loop written out here."""
    work = {"batch": None, "epochs": 4, "prox": 0.7, "lr": 0.1, "optimizer": optimizer}
    task = Task(lambda: linear().double(), random((5,)), **work)  # type: ignore[arg-type]
    made = fast(task)
    start, backend = made.initial()[0].weights, made.families[0].backend
    assert isinstance(backend, Library)
    library = backend.native
    anchors = torch.stack([start.params, torch.randn_like(start.params)])
    rows = np.zeros(2, ROW)
    given = {"examples": 7, "batch": 7, "per_epoch": 1, "steps": 4, "rate": 0.1}
    for name, value in given.items():
        rows[name] = value
    begin = start.params[None], start.buffers[None]
    with ThreadPoolExecutor(1) as thread:
        found = library.start(thread, 1, 7, False, rows, *begin, anchor=anchors)()
    x, y = (part[:7] for part in (task.federation.train.x, task.federation.train.y))
    for update, anchor in zip(found.update, anchors, strict=True):
        module = task.build()
        weights.load(module, start)
        optimiser = fresh(task, 1, module.parameters())
        for _ in range(4):
            apart = nn.utils.parameters_to_vector(module.parameters()) - anchor
            optimiser.zero_grad()
            (task.loss(module(x), y).mean() + 0.7 / 2 * apart.square().sum()).backward()
            optimiser.step()
        right = start.params - weights.read(module).params
        torch.testing.assert_close(update, right, rtol=1e-8, atol=1e-11)


@needs_compiler
def test_orders_are_those_of_rng() -> None:
    """With one example per step and weight decay, the result depends on the order."""
    x = torch.eye(6, dtype=torch.float64)
    part = Part(x, torch.zeros(6, dtype=torch.int64), np.array([0, 6]))
    data = Federation("order", part, part, 2)
    work = {"lr": 1.0, "batch": 1, "weight_decay": 0.5, "steps": 6}
    task = Task(lambda: nn.Linear(6, 2).double(), data, **work)  # type: ignore[arg-type]
    found, right = (updates(engine(name, task, 3), [0], 5)[0] for name in ("batched", "sequential"))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    assert rng.permutation(rng.as_tensor([1])[0], 6).tolist() != [*range(6)]
