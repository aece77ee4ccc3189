"""The default engine must train whatever the plain one trains, and to the same numbers.

Where it cannot stack a model it says so in one sentence and trains one client at a time. Where one
client's data are at fault, that client's row fails and no other row changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import rota
from rota.cli.progress import messages
from rota.data.federation import Federation, Part
from rota.engine import Batched, make
from rota.engine.bounds import Guarded
from rota.experiment import Experiment
from rota.plan import Chunk, Job, Plan, Task, whole

SIZES = [9, 23, 16, 4, 12, 8]


@pytest.fixture(autouse=True, scope="module", params=["native", "stacks"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test with the C library and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTA_NATIVE", "1" if request.param == "native" else "0")
        yield request.param


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What rota has warned of since this was last asked."""
    records = [each for each in caplog.records if each.name.startswith("rota")]
    caplog.clear()
    return [each.getMessage() for each in records if each.levelno >= logging.WARNING]


def tokens(words: int = 11, length: int = 6, classes: int = 3) -> Federation:
    generator = torch.Generator().manual_seed(0)
    parts = [
        (
            torch.randint(0, words, (n, length), generator=generator),
            torch.randint(0, classes, (n,), generator=generator),
        )
        for n in SIZES
    ]
    return rota.from_clients(parts, parts[0], classes=classes)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), *shape, generator=generator).to(dtype)
    y = torch.randint(0, 3, (sum(SIZES),), generator=generator)
    part = Part(x, y, np.cumsum([0, *SIZES]))
    return Federation("numbers", part, part, 3)


def everybody(engine: Any) -> Job:
    """All clients train the only model."""
    n = len(SIZES)
    plan = Plan(np.arange(n), np.zeros(n, np.int64), np.ones(n), np.ones(n))
    return whole(engine.initial(), plan, 1)


def rows(engine: Any) -> dict[int, tuple[Tensor, str, Chunk]]:
    return {
        row: (update, reason, chunk)
        for chunk in engine.train(everybody(engine))
        for row, update, reason in zip(chunk.rows.tolist(), chunk.update, chunk.reason, strict=True)
    }


def both(task: Task) -> tuple[Batched, dict[int, Any], dict[int, Any]]:
    """The default engine, the rows that it trained, and those that the plain engine trained."""
    plain, fast = (make(name, Experiment([task]), "cpu") for name in ("sequential", "auto"))
    assert isinstance(fast, Batched)
    return fast, rows(fast), rows(plain)


def apart(found: dict[int, Any], expected: dict[int, Any]) -> float:
    """The largest distance of two updates, in parts of the update."""
    assert found.keys() == expected.keys()
    assert [found[row][1] for row in sorted(found)] == [expected[row][1] for row in sorted(found)]
    return max(
        float(
            (found[row][0].double() - update.double()).norm()
            / update.double().norm().clamp(min=1e-9)
        )
        for row, (update, *_) in expected.items()
    )


class Sentence(nn.Module):
    """Tokens, a layer over the sequence, and a linear layer over its mean."""

    def __init__(self, layer: nn.Module, words: int = 11, wide: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(words, wide)
        self.layer = layer
        self.out = nn.LazyLinear(classes)
        self.out(self._mean(torch.zeros(2, 6, dtype=torch.int64)))

    def _mean(self, x: Tensor) -> Tensor:
        seen = self.layer(self.words(x))
        mean: Tensor = (seen[0] if isinstance(seen, tuple) else seen).mean(1)
        return mean

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self._mean(x))
        return out


class Attention(nn.MultiheadAttention):
    """Self-attention; with `causal`, through a constant mask of minus infinity."""

    def __init__(self, wide: int = 8, weights: bool = False, causal: int = 0) -> None:
        super().__init__(wide, 2, batch_first=True)
        self.weights = weights
        mask = torch.triu(torch.full((causal, causal), float("-inf")), 1) if causal else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=self.weights, attn_mask=self.mask)[0]


class Turned(nn.Module):
    """A layer over the sequence that takes channels first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return out


class Shared(nn.Module):
    """Two layers with one weight, or one layer under two names."""

    def __init__(self, wide: int, same: bool) -> None:
        super().__init__()
        self.first = nn.Linear(wide, wide)
        self.second = self.first if same else nn.Linear(wide, wide)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Factored(nn.Module):
    """A layer whose weights are a matrix plus a product of two thin ones, as in LoRA."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.whole = nn.Linear(wide, wide)
        self.first = nn.Parameter(torch.randn(2, wide))
        self.second = nn.Parameter(torch.randn(wide, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole.weight + self.second @ self.first, self.whole.bias)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class Scaled(nn.Module):
    """A constant of the module's own, and one that it makes as it runs."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, wide))
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.scale * self.gain + torch.tensor(0.1, dtype=x.dtype)
        return out


class Halved(nn.Linear):
    """A layer that computes in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.randn(x.shape[0], self.out_features, dtype=x.dtype)


def flat(*layers: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3, dtype=dtype))


def in_double(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.double(), targets, reduction="none")


STACKED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federation]]] = {
    "attention": (lambda: Sentence(Attention()), tokens),
    "attention that says its weights": (lambda: Sentence(Attention(weights=True)), tokens),
    "causal attention": (lambda: Sentence(Attention(causal=6)), tokens),
    "transformer": (
        lambda: Sentence(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
        tokens,
    ),
    "nn.LSTM": (lambda: Sentence(nn.LSTM(8, 5, batch_first=True)), tokens),
    "nn.GRU": (lambda: Sentence(nn.GRU(8, 5, batch_first=True)), tokens),
    "conv1d": (lambda: Sentence(Turned(nn.Conv1d(8, 6, 3, padding=1))), tokens),
    "tied weights": (lambda: flat(Shared(4, False)), lambda: numbers(4)),
    "one layer under two names": (lambda: flat(Shared(4, True)), lambda: numbers(4)),
    "weights that are products": (lambda: flat(Factored(4)), lambda: numbers(4)),
    "weight norm": (
        lambda: flat(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh()),
        lambda: numbers(4),
    ),
    "depthwise": (lambda: flat(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU()), lambda: numbers(2, 6, 6)),
    "transposed": (lambda: flat(nn.ConvTranspose2d(2, 3, 2)), lambda: numbers(2, 4, 4)),
    "instance norm": (lambda: flat(nn.InstanceNorm2d(2, affine=True)), lambda: numbers(2, 4, 4)),
    "constants": (lambda: flat(nn.Linear(4, 5), Scaled(5)), lambda: numbers(4)),
}
LONE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federation], str]] = {
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16(),
        lambda: numbers(4, dtype=torch.bfloat16),
        "has bfloat16 parameters",
    ),
    "a layer in bfloat16": (
        lambda: flat(Halved(4, 5).bfloat16()),
        lambda: numbers(4),
        "has parameters and buffers of several number types",
    ),
    "attention with dropout": (
        lambda: Sentence(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)),
        tokens,
        "draws random numbers in other ways than dropout",
    ),
    "noise": (
        lambda: flat(Noisy(4, 5)),
        lambda: numbers(4),
        "draws random numbers in other ways than dropout",
    ),
}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


@pytest.mark.parametrize("name", STACKED)
def test_modules_that_are_stacked(
    name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    build, data = STACKED[name]
    module = ready(built(build), data())
    fast, found, expected = both(Task(module, data(), lr=0.05, batch=7))
    assert fast.families
    assert apart(found, expected) < 1e-4
    assert said(caplog) == []
    assert capfd.readouterr().err == ""
    for row, (*_, chunk) in found.items():
        at = chunk.rows.tolist().index(row)
        if "norm" not in name:
            assert torch.equal(chunk.buffers[at], fast.initial()[0].buffers), "constants stay"


@pytest.mark.parametrize("name", LONE)
def test_modules_that_are_trained_one_client_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    build, data, why = LONE[name]
    module = ready(built(build), data())
    fast, found, expected = both(Task(module, data(), lr=0.05, batch=7, name="odd"))
    assert not fast.families
    assert apart(found, expected) == 0
    place = "task 'odd' runs on the sequential engine, one client at a time"
    assert said(caplog) == [f"{place}: its model {why}"]
    assert capfd.readouterr().err == ""


def test_tables_looked_up_by_parameters_are_not_stacked(caplog: pytest.LogCaptureFixture) -> None:
    """In a stack nobody would notice that an index leads into the next row's table."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.codes, self.out = nn.Linear(4, 6), nn.Embedding(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.codes(self.first(x).argmax(1)) + self.first(x)[:, :5])
            return out

    fast, found, expected = both(Task(built(Codes), numbers(4), batch=7))
    assert not fast.families
    assert apart(found, expected) == 0
    assert len(said(caplog)) == 1


def ready(module: nn.Module, data: Federation) -> nn.Module:
    """The module with the sizes of its lazy layers."""
    with torch.no_grad():
        module(data.train.x[:2])
    return module


def test_a_loss_in_double_precision() -> None:
    fast, found, expected = both(
        Task(lambda: nn.Linear(4, 3), numbers(4), batch=7, lr=0.1, loss=in_double)
    )
    assert fast.families
    assert apart(found, expected) < 1e-5


def spoilt(where: str) -> Federation:
    """Tokens of eleven words in three classes; client 2 has a twelfth word or a fourth class."""
    data = tokens()
    first = int(data.train.offsets[2])
    if where == "token":
        data.train.x[first + 5, 3] = 11
    elif where == "negative token":
        data.train.x[first + 5, 3] = -1
    else:
        data.train.y[first + 5] = 3
    return data


@pytest.mark.parametrize("where", ["token", "negative token", "label"])
@pytest.mark.parametrize("layer", [nn.Tanh, lambda: nn.GRU(8, 5, batch_first=True)])
def test_an_index_outside_of_a_table_costs_its_own_client_the_row(
    where: str, layer: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    module = built(lambda: Sentence(layer()))
    sound, spoilt_data = tokens(), spoilt(where)
    _, _, expected = both(Task(module, sound, lr=0.1, batch=7))
    caplog.clear()
    fast, found, plain = both(Task(module, spoilt_data, lr=0.1, batch=7))
    assert fast.families
    if not fast.families[0].backend.checks:
        assert fast.families[0].lone.tolist() == [False, False, True, False, False, False]
        (sentence,) = said(caplog)
        assert "1 of 6 clients hold a token or a label outside of the model's tables" in sentence
    assert found.pop(2)[1]
    assert plain.pop(2)[1]
    expected.pop(2)
    assert apart(found, expected) < 1e-4
    losses = fast.losses(everybody(fast))
    assert np.isnan(losses.loss).tolist() == [False, False, True, False, False, False]


def test_indices_that_the_model_computes_are_checked_too() -> None:
    """A column of numbers that are classes, and words that are counted from one."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(5, 3)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            kind = self.kinds(x[:, 0].long() - 1)
            out: Tensor = self.out(torch.cat([x[:, 1:], kind], 1))
            return out

    data = numbers(4)
    data.train.x[:, 0] = torch.arange(len(data.train.x)) % 5 + 1
    first = int(data.train.offsets[4])
    data.train.x[first, 0] = 6
    data.train.x[first + 1, 1] = 1e6
    fast, found, expected = both(Task(built(Mixed), data, lr=0.1, batch=7))
    assert fast.families[0].lone.tolist() == [False] * 4 + [
        not fast.families[0].backend.checks,
        False,
    ]
    assert apart(found, expected) < 1e-4
    assert [row for row, (_, reason, _) in found.items() if reason] == [4]


def test_the_first_client_may_be_the_one() -> None:
    data = tokens()
    data.train.x[0] = 20
    _, found, expected = both(Task(built(lambda: Sentence(nn.Tanh())), data, lr=0.1, batch=7))
    assert apart(found, expected) < 1e-4
    assert [row for row, (_, reason, _) in found.items() if reason] == [0]


class Places(nn.Module):
    """Reads the place in a row that its own constant and the data say: checked by torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        place = (x[:, :1] * self.scale).long()
        out: Tensor = self.out(x) + self.out(x.gather(1, place.expand_as(x)))
        return out


def test_a_client_that_makes_a_stack_raise_costs_its_own_row(kernels: str) -> None:
    data = numbers(4)
    data.train.x[:, 0] = torch.rand(len(data.train.x), generator=torch.manual_seed(0))
    data.train.x[int(data.train.offsets[1]) + 12, 0] = 9.0
    fast, found, expected = both(Task(built(Places), data, lr=0.1, batch=7))
    assert fast.families, "it must be stacked, or this tests nothing"
    assert [row for row, (_, reason, _) in sorted(found.items()) if reason] == [1]
    assert apart(found, expected) < 1e-4


@pytest.mark.parametrize("traced", [False, True])
def test_a_guarded_lookup_raises_before_it_is_made(traced: bool) -> None:
    table = nn.Embedding(5, 2)

    def run(look_up: Callable[[Tensor], Tensor], index: Tensor) -> object:
        return make_fx(look_up)(index) if traced else look_up(index)

    def wanted(x: Tensor) -> Tensor:
        return F.nll_loss(torch.zeros(3, 5), x, reduction="none")

    for look_up in (
        table,
        wanted,
        lambda x: torch.arange(5)[x],
        lambda x: torch.arange(5).gather(0, x),
    ):
        with Guarded():
            run(look_up, torch.tensor([0, 4, 2]))
            with pytest.raises(IndexError, match=r"index 5 is outside of -?\d to 4"):
                run(look_up, torch.tensor([0, 5, 2]))
    with Guarded():
        run(wanted, torch.tensor([0, -100, 2]))  # a label that the loss ignores


# ---------------------------------------------------------------- modules at random
def activations() -> st.SearchStrategy[nn.Module]:
    return st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid]).map(lambda one: one())


@st.composite
def vectors(draw: st.DrawFn) -> tuple[nn.Module, str]:
    wide = draw(st.sampled_from([4, 6]))
    kinds = {
        "linear": lambda: nn.Linear(wide, wide, bias=draw(st.booleans())),
        "layer norm": lambda: nn.LayerNorm(wide),
        "group norm": lambda: nn.GroupNorm(2, wide),
        "batch norm": lambda: nn.BatchNorm1d(wide),
        "activation": lambda: draw(activations()),
        "dropout": lambda: nn.Dropout(0.3),
        "tied": lambda: Shared(wide, False),
        "same": lambda: Shared(wide, True),
        "residual": lambda: Residual(nn.Linear(wide, wide), nn.Tanh()),
        "scaled": lambda: Scaled(wide),
        "factored": lambda: Factored(wide),
        "softmax": lambda: nn.Softmax(-1),
        "halved": lambda: Halved(wide, wide).bfloat16(),
        "noisy": lambda: Noisy(wide, wide),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4))
    return nn.Sequential(nn.Linear(5, wide), *(kinds[name]() for name in names)), "vectors"


@st.composite
def pictures(draw: st.DrawFn) -> tuple[nn.Module, str]:
    padding, stride, groups, dilation = (
        draw(st.integers(*of)) for of in ((0, 2), (1, 2), (1, 2), (1, 2))
    )
    kinds = {
        "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
        "odd conv": lambda: nn.Conv2d(4, 4, 3, stride, padding + 1, dilation, groups),
        "transposed": lambda: nn.ConvTranspose2d(4, 4, 2, stride),
        "max pool": lambda: nn.MaxPool2d(2, 1),
        "mean pool": lambda: nn.AvgPool2d(2, 1),
        "batch norm": lambda: nn.BatchNorm2d(4),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "instance norm": lambda: nn.InstanceNorm2d(4, affine=draw(st.booleans())),
        "activation": lambda: draw(activations()),
        "dropout": lambda: nn.Dropout2d(0.3),
        "residual": lambda: Residual(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=3))
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *(kinds[name]() for name in names)
    ), "pictures"


@st.composite
def sentences(draw: st.DrawFn) -> tuple[nn.Module, str]:
    kinds = {
        "attention": lambda: Attention(8, draw(st.booleans()), draw(st.sampled_from([0, 6]))),
        "transformer": lambda: nn.TransformerEncoderLayer(
            8,
            2,
            10,
            draw(st.sampled_from([0.0, 0.2])),
            batch_first=True,
            norm_first=draw(st.booleans()),
        ),
        "conv": lambda: Turned(nn.Conv1d(8, 8, draw(st.integers(1, 3)), padding=1)),
        "lstm": lambda: First(nn.LSTM(8, 8, batch_first=True)),
        "gru": lambda: First(nn.GRU(8, 8, batch_first=True)),
        "own lstm": lambda: rota.models.text.LSTM(8, 8),
        "activation": lambda: draw(activations()),
        "layer norm": lambda: nn.LayerNorm(8),
        "residual": lambda: Residual(nn.LayerNorm(8), Attention(8)),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2))
    layers = nn.Sequential(nn.Embedding(11, 8), *(kinds[name]() for name in names), Mean())
    return layers, "sentences"


class First(nn.Module):
    """The first of a layer's results."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


WORK = st.fixed_dictionaries(
    {"batch": st.sampled_from([1, 3, 5, 8, None])},
    optional={
        "epochs": st.just(2),
        "steps": st.integers(1, 4),
        "momentum": st.just(0.9),
        "weight_decay": st.just(0.1),
        "clip": st.just(0.5),
        "prox": st.just(0.3),
    },
)


@given(
    st.one_of(vectors(), pictures(), sentences()),
    WORK,
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_modules_at_random(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    drawn: tuple[nn.Module, str],
    work: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    body, kind = drawn
    shape = {"vectors": (5,), "pictures": (2, 7, 6)}
    data = tokens() if kind == "sentences" else numbers(*shape[kind], dtype=dtype)
    module = ready(flat(body.to(dtype), dtype=dtype), data)
    fast, found, expected = both(Task(module, data, lr=0.05, name="drawn", **work))
    sentences = said(caplog)
    if fast.families:
        assert not sentences
        assert apart(found, expected) < {torch.float64: 1e-7}.get(dtype, 1e-3)
    else:
        assert len(sentences) == 1
        assert sentences[0].startswith("task 'drawn' runs on the sequential engine")
        assert apart(found, expected) == 0
    assert capfd.readouterr().err == ""


def test_the_command_line_shows_what_engines_say(capsys: pytest.CaptureFixture[str]) -> None:
    with messages():
        logging.getLogger("rota.engine").warning("task '%s' is slow", "odd")
    logging.getLogger("rota.engine").info("not said")
    assert capsys.readouterr().err == "rota: task 'odd' is slow\n"
