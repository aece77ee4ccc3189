"""Before round 1, tokens and labels are checked against the tables that they index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import federation, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rota
from rota.data import fit, lookups
from rota.data.federation import Federation
from rota.errors import BadInput
from rota.models.text import OneHot
from rota.plan import Task

TOKENS = 10
LENGTH = 6


def tokens(dtype: torch.dtype = torch.int64, own_test: bool = False) -> Federation:
    """Three clients with 4, 5 and 6 sequences of tokens 0..9; the test set has 7."""
    generator = np.random.default_rng(0)

    def draw(n: int) -> tuple[Tensor, np.ndarray]:
        x = torch.from_numpy(generator.integers(TOKENS, size=(n, LENGTH))).to(dtype)
        return x, generator.integers(3, size=n)

    test = [draw(2) for _ in range(3)] if own_test else draw(7)
    return rota.from_clients([draw(n) for n in (4, 5, 6)], test, classes=3)


def spoil(data: Federation, part: str, row: int, column: int, token: int) -> Federation:
    piece = getattr(data, part)
    x = piece.x.clone()
    x[row, column] = token
    return replace(data, **{part: replace(piece, x=x)})


class Net(nn.Module):
    """Looks tokens up as `look` says, with a table of ten rows, and has three outputs."""

    def __init__(self, look: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4, 3)
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.look(self.table, x)
        out: Tensor = self.head(values.float().reshape(len(x), -1, 4).mean(1))
        return out


def hot(table: nn.Embedding, x: Tensor) -> Tensor:
    return F.one_hot(x, TOKENS).float() @ table.weight


def gathered(table: nn.Embedding, x: Tensor) -> Tensor:
    return table.weight.expand(len(x), -1, -1).gather(1, x[:, :, None].expand(-1, -1, 4))


def with_start(table: nn.Embedding, x: Tensor) -> Tensor:
    return table(torch.cat([torch.zeros_like(x[:, :1]) + 3, x], dim=1))


def with_places(table: nn.Embedding, x: Tensor) -> Tensor:
    """The places are looked up as well, and do not depend on the tokens."""
    return table(x) + table(torch.arange(LENGTH))


def added(table: nn.Embedding, x: Tensor) -> Tensor:
    x = x.clone()
    x += 1
    x -= 1
    return table(x)


def written(table: nn.Embedding, x: Tensor) -> Tensor:
    room = torch.zeros(x.shape, dtype=torch.int64)
    room[:, :] = x
    return table(room)


def written_into_a_view(table: nn.Embedding, x: Tensor) -> Tensor:
    room = torch.zeros(x.shape, dtype=torch.int64)
    room[:, 2:].copy_(x[:, 2:])
    return table(room)


DIRECT: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "embedding": lambda table, x: table(x),
    "transposed": lambda table, x: table(x.T).transpose(0, 1),
    "flat": lambda table, x: table(x.flatten()).view(len(x), LENGTH, 4),
    "long": lambda table, x: table(x.contiguous().long()),
    "steps": lambda table, x: torch.stack([table(now) for now in x.unbind(1)], 1),
    "columns": lambda table, x: torch.stack([table(x[:, i]) for i in range(LENGTH)], 1),
    "joined": lambda table, x: table(torch.cat([x[:, 3:], x[:, :3]], dim=1)),
    "padded": with_start,
    "places": with_places,
    "one-hot": hot,
    "item": lambda table, x: table.weight[x],
    "index_select": lambda table, x: table.weight.index_select(0, x.reshape(-1)),
    "gather": gathered,
    "bag": lambda table, x: F.embedding_bag(x, table.weight),
    "rota's one-hot": lambda table, x: OneHot(TOKENS)(x).float() @ table.weight,
}
COMPUTED: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "plus": lambda table, x: table(x + 1 - 1),
    "in place": lambda table, x: table(x.clone().add_(0)),
    "added in place": added,
    "written": written,
    "written into a view": written_into_a_view,
    "counted": lambda table, x: table((x * torch.ones_like(x)).cummax(1).values),
    "other functions": lambda table, x: torch.stack(
        [torch.zeros(TOKENS).scatter_(0, row, 1.0) @ table.weight for row in x]
    ),
}


class Hot(nn.Module):
    """rota's one-hot layer as a module of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.one_hot, self.head = OneHot(TOKENS), nn.Linear(TOKENS, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.one_hot(x).float().mean(1))
        return out


def model(name: str) -> nn.Module:
    return Hot() if name == "rota's one-hot" else Net((DIRECT | COMPUTED)[name])


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize(
    ("part", "row", "where"),
    [
        ("train", 11, "train token 97 at client 2, row 2 is outside the model's"),
        ("train", 0, "train token 97 at client 0, row 0 is outside the model's"),
        ("test", 5, "test token 97 at row 5 is outside the model's"),
    ],
)
def test_a_token_outside_the_table_is_named(name: str, part: str, row: int, where: str) -> None:
    task = Task(model(name), tokens())
    fit.check(task, "own")
    found = lookups.find(task.build(), task.federation.train.x[:2])
    assert found.traced
    wrong = replace(task, data=spoil(task.federation, part, row, 3, 97))
    with pytest.raises(BadInput, match=f"data 'own': {where} .* 10: give numbers from -?[0-9]+ to"):
        fit.check(wrong, "own")


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize(
    ("part", "row", "where"),
    [
        ("train", 11, "the train example at client 2, row 2: "),
        ("test", 5, "the test example at client 2, row 1: "),
    ],
)
def test_where_the_index_is_computed_the_extremes_are_tried(
    name: str, part: str, row: int, where: str
) -> None:
    task = Task(model(name), tokens(own_test=True))
    fit.check(task, "own")
    wrong = replace(task, data=spoil(task.federation, part, row, 3, 97))
    with pytest.raises(BadInput, match=f"data 'own': the model cannot take {where}.*ind"):
        fit.check(wrong, "own")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_narrow_tokens_are_looked_up_too(dtype: torch.dtype) -> None:
    task = Task(Net(lambda table, x: table(x.long())), tokens(dtype))
    fit.check(task, "own")
    if dtype == torch.bool:
        return
    with pytest.raises(BadInput, match="train token 11 at client 1, row 0 is outside the model's"):
        fit.check(replace(task, data=spoil(task.federation, "train", 4, 0, 11)), "own")


def test_tokens_may_be_real_numbers() -> None:
    x = torch.tensor([[0.0, 9.0], [3.0, 4.0], [2.0, 12.0]])
    data = rota.from_clients([(x[:2], [0, 1])], (x[1:], [2, 0]))
    with pytest.raises(BadInput, match="data 'own': test token 12 at row 1 is outside the model's"):
        fit.check(Task(Net(lambda table, x: table(x.long())), data), "own")


def test_negative_tokens_are_refused() -> None:
    data = spoil(spoil(tokens(), "train", 6, 1, -1), "train", 14, 2, -4)
    sentence = (
        "train token -1 at client 1, row 2 is outside the model's embedding of 10, as are 1 more"
    )
    with pytest.raises(BadInput, match=sentence):
        fit.check(Task(model("embedding"), data), "own")
    fit.check(Task(model("item"), data), "own")  # table[-1] is the last row


def test_a_named_client_is_named() -> None:
    data = replace(spoil(tokens(), "train", 6, 1, 10), ids=("north", "south", "west"))
    with pytest.raises(BadInput, match=r"at client 1 \(south\), row 2 is outside"):
        fit.check(Task(model("embedding"), data), "own")


class Columns(nn.Module):
    """One table per column, each of its own size."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 2) for size in sizes)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(sum(table(x[:, i]) for i, table in enumerate(self.tables)))
        return out


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_column_has_its_own_table(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rows = st.tuples(*(st.integers(-1, size) for size in sizes))
    train = data.draw(st.lists(rows, min_size=1, max_size=5))
    test = data.draw(st.lists(rows, min_size=1, max_size=5))
    held = rota.from_clients([(train, [0] * len(train))], (test, [1] * len(test)), classes=3)
    inside = all(0 <= v < size for row in train + test for v, size in zip(row, sizes, strict=True))
    task = Task(Columns(sizes), held)
    if inside:
        fit.check(task, "own")
    else:
        with pytest.raises(BadInput, match=r"token -?[0-9] at row"):
            fit.check(task, "own")


def test_many_columns_are_tried_in_few_rows() -> None:
    """Pictures of whole numbers without any lookup: a bounded number of examples is tried."""
    tried = []

    class Pixels(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            tried.append(len(x))
            return super().forward(x.flatten(1).float())

    x = torch.randint(0, 255, (2000, 3, 16, 16), dtype=torch.uint8)
    data = rota.from_clients([(x, torch.zeros(2000))], (x[:5], torch.zeros(5)))
    loss = lambda outputs, targets: outputs[:, 0] - targets  # noqa: E731
    fit.check(Task(Pixels(768, 3), data, loss=loss, score=loss), "own")
    assert 0 < sum(tried) <= fit.TRIED + 2 + 5 + 4


def sliced(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :2], targets, reduction="none")


def picked(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs[:, :2].log_softmax(1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("loss", [sliced, picked])
def test_labels_fit_the_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    data = federation([5, 6])
    y = torch.zeros_like(data.train.y)
    data = replace(data, train=replace(data.train, y=y), test=replace(data.test, y=data.test.y * 0))
    fit.check(Task(linear, data, loss=loss), "blobs")
    y[7] = 2
    data = replace(data, train=replace(data.train, y=y))
    sentence = "data 'blobs': train label 2 at client 1, row 2 is outside the loss's"
    with pytest.raises(BadInput, match=sentence):
        fit.check(Task(linear, data, loss=loss), "blobs")


def test_parts_must_be_alike() -> None:
    data, other = tokens(), federation([4, 5, 6])
    for wrong, sentence in [
        (
            replace(data, test=replace(data.test, x=data.test.x.float())),
            "test x is float32 of shape ",
        ),
        (replace(data, test=replace(data.test, x=data.test.x.int())), "test x is int32 of shape "),
        (
            replace(data, test=replace(data.test, y=data.test.y.float())),
            "test y is float32 of shape",
        ),
        (
            replace(data, test=other.test),
            r"test x is float32 of shape \(4,\), but train x is int64",
        ),
        (
            replace(data, train=replace(data.train, y=data.train.y[:3])),
            "15 train inputs and 3 targ",
        ),
        (replace(data, train=replace(data.train, offsets=np.array([0, 9, 99]))), "offsets must be"),
        (replace(data, train=replace(data.train, offsets=np.array([0, 9, 5, 15]))), "offsets must"),
        (replace(data, train=replace(data.train, offsets=np.array([0, 7.5, 15]))), "offsets must"),
        (replace(data, train=replace(data.train, offsets=np.zeros((0,), int))), "offsets must be"),
    ]:
        with pytest.raises(BadInput, match=f"data 'own'.*{sentence}"):
            fit.check(Task(model("embedding"), wrong), "own")


def test_the_check_does_not_change_the_data() -> None:
    class Clearing(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            x.zero_()
            return out

    data = tokens()
    before = data.train.x.clone(), data.test.x.clone()
    with pytest.raises(BadInput, match="the model changes its inputs in place"):
        fit.check(Task(Clearing(lambda table, x: table(x + 0)), data), "own")
    assert torch.equal(data.train.x, before[0])
    assert torch.equal(data.test.x, before[1])


def test_the_check_does_not_touch_the_random_numbers() -> None:
    class Noisy(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1) + torch.rand(3)

    task = Task(Noisy(TOKENS, 3), tokens())
    torch.manual_seed(3)
    lookups.find(task.build(), task.federation.train.x[:2])
    mine = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(mine, torch.rand(4))


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_no_engine_sees_a_bad_token(engine: str) -> None:
    task = Task(lambda: model("embedding"), spoil(tokens(), "train", 11, 3, 10**12))
    with pytest.raises(BadInput, match=r"data 'own': train token 1000000000000 at client 2, row 2"):
        rota.run([task], sampler=rota.sampling.Full(), rounds=1, engine=engine)
    two = [replace(task, name="a", data=tokens()), replace(task, name="b")]
    with pytest.raises(BadInput, match=r"task 'b': data 'own': train token 1000000000000 at cli"):
        rota.run(two, sampler=rota.sampling.Full(), rounds=1, engine=engine)
