"""The C library stays inside its memory, whatever the data are, and fails only the rows at fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota.data.federation import Federation, Part
from rota.engine import Batched, make
from rota.engine.native import build
from rota.experiment import Experiment
from rota.plan import Chunk, Plan, Task, whole

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
TOKENS, CLASSES, EACH = 80, 3, 10
BAD = 1  # the client whose data are damaged


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_NATIVE", "1")


class Words(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 8, padding_idx=padding)
        self.out = nn.Linear(40, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).flatten(1))  # type: ignore[no-any-return]


def words(damage: Callable[[Tensor, Tensor], None] = lambda x, y: None) -> Federation:
    """Three clients with texts of five tokens; `damage` gets the tokens and labels of client BAD."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, TOKENS, (3 * EACH, 5), generator=generator)
    y = torch.randint(0, CLASSES, (3 * EACH,), generator=generator)
    mine = slice(BAD * EACH, BAD * EACH + EACH)
    damage(x[mine], y[mine])
    part = Part(x, y, EACH * np.arange(4))
    return Federation("words", part, part, CLASSES)


def train(task: Task, name: str = "batched", native: bool = True) -> Chunk:
    """One round of all clients, as one chunk."""
    engine = make(name, Experiment([task]), "cpu")
    if isinstance(engine, Batched):
        assert (engine.families[0].native is not None) == native
    n = task.data.clients
    plan = Plan(np.arange(n), np.zeros(n, int), np.ones(n), np.ones(n))
    chunks = list(engine.train(whole(engine.initial(), plan, 1)))
    order = np.argsort(np.concatenate([chunk.rows for chunk in chunks]))
    columns = {
        name: np.concatenate([getattr(chunk, name) for chunk in chunks])[order]
        for name in ("rows", "loss", "steps", "examples", "seconds")
    }
    update, buffers = (
        torch.cat([getattr(chunk, name) for chunk in chunks])[torch.from_numpy(order)]
        for name in ("update", "buffers")
    )
    reasons = [reason for chunk in chunks for reason in chunk.reason]
    reason = [reasons[i] for i in order]
    return Chunk(model=0, lr=chunks[0].lr, update=update, buffers=buffers, reason=reason, **columns)


def set_token(value: int) -> Callable[[Tensor, Tensor], None]:
    def damage(x: Tensor, y: Tensor) -> None:
        x[7, 2] = value

    return damage


def set_label(value: int) -> Callable[[Tensor, Tensor], None]:
    def damage(x: Tensor, y: Tensor) -> None:
        y[7] = value

    return damage


BAD_DATA = {
    "a token just outside": (
        set_token(80),
        "a token is outside the embedding: 80 is not in 0..79",
    ),
    "a token far outside": (
        set_token(10**12),
        "a token is outside the embedding: 1000000000000 is not in 0..79",
    ),
    "a negative token": (
        set_token(-1),
        "a token is outside the embedding: -1 is not in 0..79",
    ),
    "the least token": (
        set_token(-(2**63)),
        "a token is outside the embedding: -9223372036854775808 is not in 0..79",
    ),
    "a label just outside": (
        set_label(3),
        "a label is outside the model's outputs: 3 is not in 0..2",
    ),
    "a label far outside": (
        set_label(10**15),
        "a label is outside the model's outputs: 1000000000000000 is not in 0..2",
    ),
    "a negative label": (
        set_label(-1),
        "a label is outside the model's outputs: -1 is not in 0..2",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
@pytest.mark.parametrize("work", [{}, {"momentum": 0.9, "prox": 0.1}, {"optimizer": "adam"}])
def test_an_index_outside_fails_its_row_alone(name: str, work: dict[str, object]) -> None:
    damage, reason = BAD_DATA[name]
    good = train(Task(Words, words(), batch=4, epochs=2, **work))  # type: ignore[arg-type]
    found = train(Task(Words, words(damage), batch=4, epochs=2, **work))  # type: ignore[arg-type]
    others = [row for row in range(3) if row != BAD]
    assert found.reason == [reason if row == BAD else "" for row in range(3)]
    assert torch.equal(found.update[others], good.update[others])
    assert np.array_equal(found.loss[others], good.loss[others])
    assert not found.update[BAD].any()
    assert np.isnan(found.loss[BAD])
    assert (found.steps[BAD], found.examples[BAD]) == (0, 0)
    assert (found.steps[others] == 6).all()


def test_a_failed_row_is_as_in_the_sequential_engine() -> None:
    task = Task(Words, words(set_token(97)), batch=4)
    plain, fast = train(task, "sequential"), train(task)
    assert [bool(reason) for reason in plain.reason] == [bool(reason) for reason in fast.reason]
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fast.buffers, plain.buffers)
    for column in ("steps", "examples", "seconds"):
        assert np.array_equal(getattr(fast, column), getattr(plain, column))


def ignoring(label: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none", ignore_index=label)

    return loss


@pytest.mark.parametrize("label", [-100, 1, 97])
def test_an_ignored_label_has_no_loss(label: int) -> None:
    """As in torch, whether or not the label is one of the classes."""
    task = Task(
        lambda: Words().double(), words(set_label(label)), batch=4, loss=ignoring(label), lr=1.0
    )
    plain, fast = train(task, "sequential"), train(task)
    assert fast.reason == [""] * 3
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(fast.loss, plain.loss)


def test_the_padding_token_has_no_gradient() -> None:
    task = Task(lambda: Words(padding=5).double(), words(set_token(5)), batch=4, lr=1.0)
    plain, fast = train(task, "sequential"), train(task)
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)


class Turned(Words):
    """Rows of the embedding are columns of its weight, so that they are scattered in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words.weight = nn.Parameter(torch.randn(8, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.embedding(x, self.words.weight.t()).flatten(1))  # type: ignore[no-any-return]


class Positions(Words):
    """Every position has a vector of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(5))
        return self.out((self.words(x) + places).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [Turned, Positions])
def test_embeddings_of_every_form(module: type[Words]) -> None:
    task = Task(lambda: module().double(), words(), batch=4, lr=1.0)
    plain, fast = train(task, "sequential"), train(task, native=module is Turned)
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)


def second_label(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets[:, 1], reduction="none")


def test_labels_that_are_scattered_in_memory() -> None:
    data = words()
    both = torch.stack([data.train.y.flip(0), data.train.y], 1)
    part = Part(data.train.x, both, data.train.offsets)
    task = Task(
        lambda: Words().double(),
        Federation("words", part, part, CLASSES),
        batch=4,
        lr=1.0,
        loss=second_label,
        score=second_label,
    )
    plain, fast = train(task, "sequential"), train(task)
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)
