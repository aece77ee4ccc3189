"""The C library against plain torch: operators in every form it has, what it leaves to stacks, and what happens without a compiler."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from conftest import federation
from torch import nn

from rota import rng
from rota.data.federation import Federation, Part
from rota.engine import Batched, make
from rota.engine.native import build
from rota.experiment import Experiment
from rota.plan import Plan, Task, whole

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
SIZES = [7, 4, 9]


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "1")


def images(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, integers: int = 0
) -> Federation:
    generator = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    x = (
        torch.randint(0, integers, (total, *shape), generator=generator)
        if integers
        else torch.randn(total, *shape, generator=generator).to(dtype)
    )
    part = Part(x, torch.randint(0, 3, (total,), generator=generator), np.cumsum([0, *SIZES]))
    return Federation("test", part, part, 3)


def engines(task: Task) -> tuple[Batched, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """The batched engine, and the updates of the clients in it and in the sequential one."""
    plan = Plan(
        np.arange(len(SIZES)), np.zeros(len(SIZES), int), np.ones(len(SIZES)), np.ones(len(SIZES))
    )
    plain, fast = (make(name, Experiment([task]), "cpu") for name in ("sequential", "batched"))
    assert isinstance(fast, Batched)
    one, two = (
        {
            r: u
            for c in e.train(whole(plain.initial(), plan, 1))
            for r, u in zip(c.rows.tolist(), c.update, strict=True)
        }
        for e in (plain, fast)
    )
    return fast, one, two


class Letters(nn.Module):
    """Words, their sum, a slice, a stack and a power: odds and ends of text models."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.words(x)
        first, last = torch.sigmoid(seen[:, 0]), torch.tanh(seen[:, -1]) ** 3
        return self.out(torch.cat([first * last, seen.mean(1)], 1))  # type: ignore[no-any-return]


def conv(
    channels: int, outputs: int, size: int, stride: int = 1, padding: int = 0, bias: bool = True
) -> nn.Conv2d:
    return nn.Conv2d(channels, outputs, size, stride, padding, bias=bias)


NETWORKS = {
    "linear": ((5,), lambda: nn.Linear(5, 3)),
    "wide": (
        (70,),
        lambda: nn.Sequential(
            nn.Linear(70, 41), nn.ReLU(), nn.Linear(41, 37), nn.Tanh(), nn.Linear(37, 3)
        ),
    ),
    "dropout": (
        (20,),
        lambda: nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.4), nn.Sigmoid(), nn.Linear(30, 3)),
    ),
    "3x3": (
        (8, 9, 9),
        lambda: nn.Sequential(conv(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 3)),
    ),
    "3x3 padded": (
        (2, 7, 8),
        lambda: nn.Sequential(
            conv(2, 9, 3, 1, 1), conv(9, 19, 3, 1, 1, False), nn.Flatten(), nn.Linear(19 * 56, 3)
        ),
    ),
    "5x5": (
        (8, 9, 7),
        lambda: nn.Sequential(
            conv(8, 8, 5, 1, 2),
            nn.Tanh(),
            conv(8, 17, 5, 1, 1),
            nn.Flatten(),
            nn.Linear(17 * 35, 3),
        ),
    ),
    "7x7": (
        (3, 9, 9),
        lambda: nn.Sequential(
            conv(3, 5, 7, 1, 3), nn.ReLU(), conv(5, 4, 1), nn.Flatten(), nn.Linear(4 * 81, 3)
        ),
    ),
    "stride": (
        (3, 11, 10),
        lambda: nn.Sequential(
            conv(3, 8, 3, 2, 1), nn.ReLU(), conv(8, 8, 3, 2), nn.Flatten(), nn.Linear(8 * 4, 3)
        ),
    ),
    "columns": (
        (13, 8, 9),
        lambda: nn.Sequential(
            conv(13, 9, 3, 2, 1), nn.ReLU(), conv(9, 8, 4, 1, 2), nn.Flatten(), nn.Linear(240, 3)
        ),
    ),
    "long": ((1100,), lambda: nn.Sequential(nn.Linear(1100, 21), nn.ReLU(), nn.Linear(21, 3))),
    "pool": (
        (4, 9, 9),
        lambda: nn.Sequential(
            nn.MaxPool2d(3, 2, 1), conv(4, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        ),
    ),
    "batchnorm": (
        (4, 6, 6),
        lambda: nn.Sequential(
            conv(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
        ),
    ),
    "letters": ((4,), Letters),
}


@needs_compiler
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("batch", [3, None])
def test_operators_agree_with_torch(name: str, batch: int | None) -> None:
    shape, build_it = NETWORKS[name]
    fast, one, two = engines(
        Task(
            lambda: build_it().double(),
            images(shape, integers=11 * (name == "letters")),
            lr=0.1,
            batch=batch,
            epochs=2,
        )
    )
    assert fast.families[0].native is not None, "it must not have fallen back"
    for row, update in one.items():
        torch.testing.assert_close(two[row], update, rtol=1e-8, atol=1e-11)


@needs_compiler
def test_short_products_round_little_more_than_plain_ones() -> None:
    """Winograd's convolutions in single precision, against double: within a few times the error of torch's own."""
    shape, build_it = NETWORKS["5x5"]
    torch.manual_seed(0)
    module = build_it()
    _, exact, _ = engines(Task(module.double(), images(shape), lr=0.1, batch=3))
    _, plain, fast = engines(Task(module.float(), images(shape, torch.float32), lr=0.1, batch=3))
    for row, right in exact.items():
        ours, theirs = (
            float((found[row].double() - right).norm() / right.norm()) for found in (fast, plain)
        )
        assert ours < 10 * theirs + 1e-6


@needs_compiler
def test_a_row_does_not_depend_on_the_others() -> None:
    task = Task(lambda: NETWORKS["wide"][1](), images((70,), torch.float32), batch=3)
    fast = make("batched", Experiment([task]), "cpu")
    start = fast.initial()
    alone = next(
        iter(
            fast.train(
                whole(start, Plan(np.array([1]), np.zeros(1, int), np.ones(1), np.ones(1)), 4)
            )
        )
    ).update[0]
    for order in ([1, 0, 2], [2, 1]):
        n = len(order)
        chunk = next(
            iter(
                fast.train(
                    whole(start, Plan(np.array(order), np.zeros(n, int), np.ones(n), np.ones(n)), 4)
                )
            )
        )
        assert torch.equal(chunk.update[chunk.rows.tolist().index(order.index(1))], alone)


@needs_compiler
def test_results_take_the_place_only_of_results_that_nobody_holds() -> None:
    library = (
        engines(Task(lambda: nn.Linear(5, 3).double(), images((5,)), batch=3))[0].families[0].native
    )
    assert library is not None
    library.spare.clear()
    held = library.room(4, 6)
    address, part = held.data_ptr(), held[1]
    assert library.room(2, 6).data_ptr() != address
    del held
    assert library.room(2, 6).data_ptr() != address, "a part of it is held"
    del part
    assert library.room(4, 6).data_ptr() == address
    assert library.room(5, 6).shape == (5, 6)


@needs_compiler
def test_a_number_that_is_none_is_not_swallowed() -> None:
    """A rectifier or a pool must not turn a diverged model into a sound one."""
    data = images((4, 9, 9), torch.float32)
    data.train.x[:] = float("nan")
    fast = make("batched", Experiment([Task(NETWORKS["pool"][1], data, batch=3)]), "cpu")
    chunk = next(
        iter(
            fast.train(
                whole(
                    fast.initial(), Plan(np.array([0]), np.zeros(1, int), np.ones(1), np.ones(1)), 1
                )
            )
        )
    )
    assert not torch.isfinite(chunk.update).all()


@needs_compiler
def test_what_it_lacks_runs_in_stacks() -> None:
    task = Task(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)).double(),
        images((5,)),
        batch=3,
    )
    fast, one, two = engines(task)
    assert fast.families[0].native is None
    for row, update in one.items():
        torch.testing.assert_close(two[row], update, rtol=1e-7, atol=1e-10)


def test_without_a_compiler_the_stacks_do_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._library.cache_clear()
    fast = make(
        "batched", Experiment([Task(lambda: nn.Linear(4, 3), federation([4, 5]), batch=3)]), "cpu"
    )
    build._library.cache_clear()
    assert isinstance(fast, Batched)
    assert fast.families[0].native is None


@needs_compiler
def test_a_compiler_that_fails_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._library.cache_clear()
    with pytest.raises(build.Unavailable, match="failed"):
        build.library(torch.float32)
    build._library.cache_clear()


@needs_compiler
def test_structures_are_as_large_as_in_c() -> None:
    """Fields are eight bytes each on both sides; a field more on one would shift all others."""
    lib = build.library(torch.float32)
    lib.rota_sizes.restype = None
    sizes = (ctypes.c_int64 * 3)()
    lib.rota_sizes(sizes)
    assert list(sizes) == [
        ctypes.sizeof(build.Instruction),
        ctypes.sizeof(build.Work),
        build.ROW.itemsize,
    ]


@needs_compiler
def test_orders_are_those_of_rng() -> None:
    """One example a step and a model that remembers: the order of the steps shows."""
    x = torch.eye(6, dtype=torch.float64)
    part = Part(x, torch.zeros(6, dtype=torch.int64), np.array([0, 6]))
    task = Task(
        lambda: nn.Linear(6, 2).double(),
        Federation("order", part, part, 2),
        lr=1.0,
        batch=1,
        weight_decay=0.5,
        steps=6,
    )
    plan = Plan(np.array([0]), np.zeros(1, int), np.ones(1), np.ones(1))
    updates = []
    for name in ("sequential", "batched"):
        engine = make(name, Experiment([task], seed=3), "cpu")
        updates.append(next(iter(engine.train(whole(engine.initial(), plan, 5)))).update)
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-9, atol=1e-12)
    assert rng.permutation(rng.as_tensor([1])[0], 6).tolist() != [*range(6)]
