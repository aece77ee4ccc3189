"""The C library stays inside its memory whatever the data are; it fails only the rows at fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota.arrays import Array
from rota.data.federation import Federation, Part
from rota.engine import Batched, make
from rota.engine.backends import Library
from rota.engine.native import ROW, Native, Result, Unsupported, build
from rota.engine.native.operators import RULES
from rota.engine.native.program import Place, Writer
from rota.engine.native.structures import EACH, LAYER_BACKWARD, PARAMS, PRODUCT, X
from rota.engine.native.translate import _join_updates
from rota.engine.steps import Steps
from rota.experiment import Experiment
from rota.plan import Plan, Task, whole

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
TOKENS, CLASSES, EXAMPLES = 80, 3, 10
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


Damage = Callable[[Tensor, Tensor], None]
"""Changes the tokens and labels of a client."""


def words() -> Federation:
    """Three clients with texts of five tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, TOKENS, (3 * EXAMPLES, 5), generator=generator)
    y = torch.randint(0, CLASSES, (3 * EXAMPLES,), generator=generator)
    part = Part(x, y, EXAMPLES * np.arange(4))
    return Federation("words", part, part, CLASSES)


class Trained(NamedTuple):
    """One round of all clients: a line or number per client."""

    reason: list[str]
    update: Tensor
    loss: Array
    steps: Array
    examples: Array
    bytes_down: Array


def train(task: Task, name: str = "batched", damage: Damage = lambda x, y: None) -> Trained:
    """Train all clients. Client BAD's data are damaged once the engine has checked all data."""
    engine, part = make(name, Experiment([task]), "cpu"), task.federation.train
    if isinstance(engine, Batched):
        assert isinstance(engine.families[0].backend, Library), "it must not have fallen back"
    mine = slice(*part.offsets[BAD : BAD + 2].tolist())
    damage(part.x[mine], part.y[mine])
    n = task.data.clients
    plan = Plan(np.arange(n), np.zeros(n, int), np.ones(n), np.ones(n))
    out = Trained(
        [""] * n,
        torch.empty(n, len(engine.initial()[0].weights.params), dtype=torch.float64),
        *(np.empty(n) for _ in range(4)),
    )
    for chunk in engine.train(whole(engine.initial(), plan, 1)):
        out.update[torch.from_numpy(chunk.rows)] = chunk.update.double()
        out.loss[chunk.rows], out.steps[chunk.rows] = chunk.loss, chunk.steps
        out.examples[chunk.rows], out.bytes_down[chunk.rows] = chunk.examples, chunk.costs.down
        for row, reason in zip(chunk.rows.tolist(), chunk.reason, strict=True):
            out.reason[row] = reason
    return out


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
    task = Task(Words, words(), batch=4, epochs=2, **work)  # type: ignore[arg-type]
    good, found = train(task), train(task, damage=damage)
    others = [row for row in range(3) if row != BAD]
    assert found.reason == [reason if row == BAD else "" for row in range(3)]
    assert torch.equal(found.update[others], good.update[others])
    assert np.array_equal(found.loss[others], good.loss[others])
    assert not found.update[BAD].any()
    assert np.isnan(found.loss[BAD])
    assert (found.steps[BAD], found.examples[BAD]) == (0, 0)
    assert (found.steps[others] == 6).all()


def test_a_failed_row_is_as_in_the_sequential_engine() -> None:
    task = Task(Words, words(), batch=4)
    fast, plain = train(task, damage=set_token(97)), train(task, "sequential")
    assert [bool(reason) for reason in plain.reason] == [bool(reason) for reason in fast.reason]
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-4, atol=1e-6)
    for column in ("steps", "examples", "bytes_down"):
        assert np.array_equal(getattr(fast, column), getattr(plain, column))


def ignoring(label: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none", ignore_index=label)

    return loss


def test_damaged_clients_leave_the_library_to_the_others() -> None:
    """The step is tried on sound examples, wherever these are."""
    good, data = train(Task(Words, words(), batch=None)), words()
    data.train.x[EXAMPLES:, 2] = -1
    found = train(Task(Words, data, batch=None))
    assert [bool(reason) for reason in found.reason] == [False, True, True]
    assert torch.equal(found.update[0], good.update[0])


@pytest.mark.parametrize("label", [-100, 1, 97])
def test_an_ignored_label_has_no_loss(label: int) -> None:
    """As in torch, whether or not the label is one of the classes."""
    task = Task(lambda: Words().double(), words(), batch=4, loss=ignoring(label), lr=1.0)
    fast, plain = train(task, damage=set_label(label)), train(task, "sequential")
    assert fast.reason == [""] * 3
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(fast.loss, plain.loss)


def test_the_padding_token_has_no_gradient() -> None:
    task = Task(lambda: Words(padding=5).double(), words(), batch=4, lr=1.0)
    fast, plain = train(task, damage=set_token(5)), train(task, "sequential")
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
    plain, fast = train(task, "sequential"), train(task)
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


def numbers(features: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * EXAMPLES, features, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (3 * EXAMPLES,), generator=generator)
    part = Part(x, y, EXAMPLES * np.arange(4))
    return Federation("numbers", part, part, CLASSES)


class Unused(nn.Linear):
    """A parameter without any number."""

    def __init__(self) -> None:
        super().__init__(5, CLASSES)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


class Centred(nn.Linear):
    """The mean over all axes, which torch names by none."""

    def __init__(self) -> None:
        super().__init__(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean(dim=[]) * 0.5


class Scaled(nn.Linear):
    """Integers that meet real numbers."""

    def __init__(self) -> None:
        super().__init__(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(5) * 0.5)


ODD = {
    "no features": (0, lambda: nn.Sequential(nn.Linear(0, 4), nn.Tanh(), nn.Linear(4, CLASSES))),
    "no units": (5, lambda: nn.Sequential(nn.Linear(5, 0), nn.Tanh(), nn.Linear(0, CLASSES))),
    "an empty parameter": (5, Unused),
    "a mean over all axes": (5, Centred),
    "integers and real numbers": (5, Scaled),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("batch", [1, 4, None])
def test_odd_sizes_agree_with_torch(name: str, batch: int | None) -> None:
    features, module = ODD[name]
    task = Task(lambda: module().double(), numbers(features), batch=batch, momentum=0.9)
    plain, fast = train(task, "sequential"), train(task)
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)


def labels_as_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets * 0.5).square() + (outputs[:, 1] + targets).square()


@pytest.mark.parametrize("batch", [1, 4])
def test_integer_labels_that_meet_real_numbers(batch: int) -> None:
    """A mini-batch of one has one integer, like a word of randomness, but is none."""
    loss = labels_as_numbers
    module = lambda: nn.Linear(5, CLASSES).double()  # noqa: E731
    task = Task(module, numbers(5), batch=batch, loss=loss, score=loss, lr=0.01)
    plain, fast = train(task, "sequential"), train(task)
    torch.testing.assert_close(fast.update, plain.update, rtol=1e-8, atol=1e-11)


class Either(nn.Linear):
    """An operator on truth values, for which there is a rule on integers alone."""

    def __init__(self) -> None:
        super().__init__(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * ((x > 0) ^ (x > 1)))


def test_a_rule_that_raises_is_no_failure() -> None:
    task = Task(lambda: Either().double(), numbers(5), batch=4)
    engine = make("batched", Experiment([task]), "cpu")
    assert isinstance(engine, Batched)
    assert not isinstance(engine.families[0].backend, Library), "it runs as torch operators"


def made(module: nn.Module | None = None, data: Federation | None = None) -> Native:
    task = Task(module or nn.Linear(5, CLASSES).double(), data or numbers(5), batch=4)
    part = task.federation.train
    return Native(Steps(task, task.build(), part.x, part.y))


def test_a_model_of_two_types_is_left_to_torch() -> None:
    module = nn.Linear(5, CLASSES).double()
    module.register_buffer("scale", torch.ones(3))
    with pytest.raises(Unsupported, match=r"torch.float64 and torch.float32"):
        made(module)


SOUND = {"first": 10, "examples": 10, "batch": 4, "per_epoch": 3, "steps": 3, "rate": 0.1}


def started(native: Native, width: int = 4, **changes: Any) -> Callable[[], Result]:
    """Start one row, with some of what it takes changed."""
    rows = np.zeros(1, ROW)
    for name, value in SOUND.items():
        rows[name] = changes.pop(name, value)
    zeros = torch.zeros(1, 18, dtype=torch.float64)
    matrices = {"starts": zeros, "buffers": zeros[:, :0].contiguous(), **changes}
    with ThreadPoolExecutor(1) as thread:
        return native.start(thread, 1, width, False, rows, **matrices)


class Shared(nn.Module):
    """A convolution whose bias is one number for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(6, 1, 3, 3)), nn.Parameter(torch.ones(1))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        images = F.conv2d(x.view(-1, 1, 5, 5), self.kernel, self.bias.expand(6))
        return self.out(images.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_bias_that_is_scattered_in_memory() -> None:
    task = Task(lambda: Shared().double(), numbers(25), batch=4)
    torch.testing.assert_close(train(task).update, train(task, "sequential").update)


def test_large_integers_are_not_compared_as_real_numbers() -> None:
    writer = Writer(torch.float32, lambda _: 0, lambda m, n: 8)
    tokens = Place(X, 0, torch.empty(4, 5, dtype=torch.int64, device="meta"))
    small, large = (writer.constant(torch.tensor([[n, 3]])[:, :1]) for n in (79, 1 << 24))
    compare = RULES[torch.ops.aten.eq.Tensor]
    compare(writer, None, tokens, small)
    for other in (tokens, large):
        with pytest.raises(Unsupported, match="exactly"):
            compare(writer, None, tokens, other)


def test_a_sound_row_trains() -> None:
    assert started(made())().reason == [""]


@pytest.mark.parametrize(
    "change",
    [
        {"first": -1},
        {"first": 21},
        {"first": 2**62},
        {"examples": 0},
        {"examples": -5},
        {"examples": 2**62},
        {"first": 2**62, "examples": 2**62},
        {"batch": 0},
        {"batch": 5},
        {"per_epoch": 0},
        {"per_epoch": 4},
        {"per_epoch": 2**62},
        {"steps": 0},
        {"steps": -1},
        {"width": 3},
    ],
    ids=str,
)
def test_rows_cannot_ask_for_what_is_not_there(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not there"):
        started(made(), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"starts": torch.zeros(1, 18)},
        {"starts": torch.zeros(1, 17, dtype=torch.float64)},
        {"starts": torch.zeros(0, 18, dtype=torch.float64)},
        {"starts": torch.zeros(18, 2, dtype=torch.float64).t()[:1]},
        {"buffers": torch.zeros(1, 1, dtype=torch.float64)},
        {"shift": torch.zeros(1, 18)},
        {"anchor": torch.zeros(2, 17, dtype=torch.float64)},
    ],
    ids=lambda change: f"{next(iter(change))} {tuple(next(iter(change.values())).shape)}",
)
def test_matrices_must_fit_the_model(change: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="a matrix"):
        started(made(), **change)


def test_without_memory_nothing_is_trained() -> None:
    native = made()
    native.program(4, False).arena = 1 << 46
    with pytest.raises(MemoryError, match="fewer cores"):
        started(native)()


def test_sizes_that_overflow_are_left_to_torch() -> None:
    native = made()
    side, channels = 1 << 20, 1 << 20
    huge = [1, channels, side, side, 8, side, side, 7, 7, 1, 1, 3, 3]
    bordered = [4, 1, 5, 5, 2, 2, 2, 1, 1, 1 << 33, 1 << 33, 1 << 32, 1 << 32]
    assert native._space(huge) == native._space(bordered) == -1
    writer = Writer(torch.float64, native._space, native.lib.rota_product_space)
    with pytest.raises(Unsupported, match="this size"):
        writer.scratch(-1)
    writer.each("copy", writer.new([1 << 46]), writer.constant(1.0))
    with pytest.raises(Unsupported, match="this size"):
        writer.finish()


def layer(between: Callable[[Writer, Place, Place, Place], None]) -> list[int]:
    """The codes of dx = dy W, of something in between, and of W -= dy^T x."""
    writer = Writer(torch.float64, lambda _: 0, lambda m, n: 8)
    weight = Place(PARAMS, 0, torch.empty(6, 5, dtype=torch.float64, device="meta"))
    dy = Place(X, 0, torch.empty(4, 6, dtype=torch.float64, device="meta"))
    x = writer.each("copy", writer.new((4, 5)), Place(X, 0, torch.empty(4, 5, device="meta")))
    RULES[torch.ops.aten.mm.default](writer, None, dy, weight)
    between(writer, weight, dy, x)
    turned = dy.seen(dy.like.t())
    RULES[torch.Tensor.addmm_](writer, None, weight, turned, x, alpha=-1)
    _join_updates(writer)
    return [instruction.code for instruction, _ in writer.code]


def read_part(writer: Writer, weight: Place, dy: Place, x: Place) -> None:
    part = weight.seen(weight.like[1:])
    writer.each("copy", writer.new(part.shape), part)


def write_x(writer: Writer, weight: Place, dy: Place, x: Place) -> None:
    writer.each("neg", x, x)


def test_a_layers_products_are_joined_only_where_nothing_is_in_the_way() -> None:
    copy, neg = EACH["copy"], EACH["neg"]
    assert layer(lambda *_: None) == [copy, LAYER_BACKWARD]
    assert layer(read_part) == [copy, PRODUCT, copy, PRODUCT]
    assert layer(write_x) == [copy, PRODUCT, neg, PRODUCT]


@pytest.mark.skipif(not build.sanitized(), reason="make test-native-sanitized runs it")
def test_an_operand_that_is_touched_beyond_its_end_ends_the_process() -> None:
    """Otherwise the sanitizers could be asleep."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "import test_native_safety as t; n = t.made(); p = n.program(4, False);"
        "p.list[0].shape[0] += 1; t.started(n)()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "AddressSanitizer: use-after-poison" in done.stderr
