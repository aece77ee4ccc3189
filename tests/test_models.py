"""One suite over all models: parameters, a training pass, weights, mapping over clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from rota import from_clients, models, weights
from rota.errors import BadInput
from rota.models import MODELS
from rota.models.text import LSTM, recurrent
from rota.plan import Task

MNIST, FEMNIST, CIFAR, TEXT = ((1, 28, 28), 10), ((1, 28, 28), 62), ((3, 32, 32), 10), ((80,), 80)
Data = tuple[tuple[int, ...], int]

# model, options, the paper's data and parameters, and the small data of the other tests
TABLE: list[tuple[str, dict[str, Any], Data, int, Data]] = [
    ("logistic", {}, ((60,), 10), 610, ((60,), 10)),
    ("linear", {}, ((60,), 10), 610, ((60,), 10)),
    ("mlp", {}, ((60,), 10), 4_554, ((5,), 3)),
    ("mlp", {"hidden": (8, 4)}, ((60,), 10), 574, ((5,), 3)),
    ("two_nn", {}, MNIST, 199_210, ((5,), 3)),
    ("cnn", {}, MNIST, 1_663_370, ((1, 8, 8), 10)),
    ("cnn", {}, FEMNIST, 1_690_046, ((3, 5, 4), 2)),
    ("s2_small", {}, MNIST, 23_860, ((1, 8, 8), 10)),
    ("s2_classic", {}, MNIST, 21_840, ((1, 16, 17), 4)),
    ("s2_wide", {}, MNIST, 495_370, ((1, 8, 8), 10)),
    ("s2_wide", {"extra": True}, MNIST, 39_852_170, ((2, 4, 4), 3)),
    ("kvib_cnn", {}, MNIST, 582_026, ((1, 17, 16), 10)),
    ("fluid_femnist", {}, FEMNIST, 410_022, ((1, 8, 8), 10)),
    ("vgg9", {}, CIFAR, 1_469_994, ((1, 8, 9), 10)),
    ("lstm_shakespeare", {}, TEXT, 249_936, ((6,), 9)),
    ("leaf_femnist", {}, FEMNIST, 6_603_710, ((1, 4, 4), 5)),
    ("leaf_lstm", {}, TEXT, 819_920, ((5,), 7)),
    ("mmfl_cnn", {}, MNIST, 1_630_090, ((1, 8, 8), 10)),
    ("mmfl_cnn", {"width": 64}, MNIST, 3_291_402, ((1, 4, 4), 10)),
    ("mmfl_emnist", {}, ((1, 28, 28), 47), 456_519, ((1, 8, 8), 10)),
    ("mmfl_lstm", {}, TEXT, 952_400, ((5,), 7)),
    ("pfl_cnn", {}, CIFAR, 1_626_442, ((1, 6, 7), 10)),
    ("resnet18", {}, CIFAR, 11_173_962, ((1, 9, 9), 3)),
    ("resnet18", {"norm": "batch-no-stats"}, CIFAR, 11_173_962, ((1, 9, 9), 3)),
    ("resnet18", {"norm": "group"}, CIFAR, 11_173_962, ((1, 9, 9), 3)),
    ("resnet8", {}, CIFAR, 78_042, ((1, 9, 9), 3)),
    ("lenet", {}, MNIST, 61_706, ((1, 16, 17), 4)),
    ("transformer", {}, TEXT, 427_600, ((5,), 7)),
    ("preact_resnet18", {}, CIFAR, 11_172_170, ((1, 9, 9), 3)),
    ("preact_resnet18", {"norm": "group"}, CIFAR, 11_172_170, ((1, 9, 9), 3)),
]
IDS = [
    "-".join([name, *map(str, options.values()), *([str(data[1])] if data is FEMNIST else [])])
    for name, options, data, _, _ in TABLE
]
COUNTED = {"resnet18-batch-no-stats", "preact_resnet18-group"}
# The resnets are slow and their norms alike, so the tests that run them take the two defaults and
# one GroupNorm.
EVERY = pytest.mark.parametrize(
    ("name", "options", "data"),
    [
        (name, options, small)
        for (name, options, _, _, small), id in zip(TABLE, IDS, strict=True)
        if id not in COUNTED
    ],
    ids=[id for id in IDS if id not in COUNTED],
)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def build(name: str, options: dict[str, Any], data: Data, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](shape=data[0], classes=data[1], **options)


def batch(data: Data, examples: int = 2) -> tuple[Tensor, Tensor]:
    """Examples of the data's shape: characters for the text models, else real numbers."""
    draw = torch.Generator().manual_seed(1)
    shape, classes = data
    text = len(shape) == 1 and classes in (7, 9, 80)
    if text:
        x = torch.randint(classes, (examples, *shape), generator=draw)
    else:
        x = torch.randn(examples, *shape, generator=draw)
    return x, torch.randint(classes, (examples,), generator=draw)


def test_every_model_is_in_the_table() -> None:
    assert {name for name, *_ in TABLE} == set(MODELS)
    assert {name: getattr(models, name) for name in MODELS} == MODELS


@pytest.mark.parametrize(
    ("name", "options", "data", "parameters"), [row[:4] for row in TABLE], ids=IDS
)
def test_parameters(name: str, options: dict[str, Any], data: Data, parameters: int) -> None:
    with torch.device("meta"):
        assert count(MODELS[name](shape=data[0], classes=data[1], **options)) == parameters


@pytest.mark.parametrize(
    ("name", "layers"),
    {
        "logistic": "",
        "two_nn": "ReLU ReLU",
        "cnn": "ReLU pool ReLU pool ReLU",
        "s2_small": "ReLU",
        "s2_classic": "pool ReLU drop2d.5 pool ReLU ReLU drop.5",
        "s2_wide": "ReLU ReLU pool ReLU pool ReLU drop.5",
        "kvib_cnn": "pool pool ReLU",
        "fluid_femnist": "ReLU pool ReLU pool ReLU",
        "vgg9": "ReLU ReLU pool ReLU ReLU pool ReLU ReLU pool ReLU ReLU",
        "leaf_femnist": "ReLU pool ReLU pool ReLU",
        "mmfl_cnn": "pool pool",
        "mmfl_emnist": "Tanh pool Tanh pool Tanh Tanh Tanh",
        "mmfl_lstm": "drop.5",
        "lenet": "ReLU pool ReLU pool ReLU ReLU",
        "pfl_cnn": "ReLU ReLU pool drop.25 ReLU drop.5",
    }.items(),
)
def test_layers_without_parameters(name: str, layers: str) -> None:
    """The layers that a count of parameters cannot see."""
    words = {
        nn.ReLU: "ReLU",
        nn.Tanh: "Tanh",
        nn.MaxPool2d: "pool",
        nn.Dropout: "drop",
        nn.Dropout2d: "drop2d",
    }
    found = [layer for layer in MODELS[name]().children() if type(layer) in words]
    named = [words[type(layer)] + str(getattr(layer, "p", "")).lstrip("0") for layer in found]
    assert " ".join(named) == layers
    assert not any(getattr(layer, "inplace", False) for layer in found)


@pytest.mark.parametrize("name", MODELS)
def test_defaults_are_the_paper_s_data(name: str) -> None:
    """Without arguments a model is the paper's, with as many parameters as its docstring says."""
    with torch.device("meta"):
        parameters = count(MODELS[name]())
    assert parameters == next(row[3] for row in TABLE if row[0] == name)
    if name not in ("linear", "logistic", "mlp"):
        assert f"{parameters:,} parameters" in (MODELS[name].__doc__ or "").splitlines()[0]


@EVERY
def test_training_pass(name: str, options: dict[str, Any], data: Data) -> None:
    """Outputs are logits, every parameter has a gradient, and a small step lowers the loss."""
    module = build(name, options, data).train()
    x, y = batch(data, 4)
    out = module(x)
    assert out.shape == (4, data[1])
    assert out.dtype == torch.float32
    assert not torch.allclose(out.exp().sum(1), torch.ones(4)), "logits, not log-probabilities"
    assert not torch.allclose(out.sum(1), torch.ones(4)), "logits, not probabilities"
    quiet(module)
    before = F.cross_entropy(module(x), y)
    before.backward()
    for parameter, p in module.named_parameters():
        assert p.grad is not None, parameter
        assert torch.isfinite(p.grad).all(), parameter
        assert p.grad.any(), parameter
    torch.optim.SGD(module.parameters(), lr=0.001).step()
    assert F.cross_entropy(module(x), y).item() < before.item()


def quiet(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.eval()


@EVERY
def test_weights_round_trip(name: str, options: dict[str, Any], data: Data) -> None:
    """read, load and named move the whole state, buffers included."""
    source, target = build(name, options, data), build(name, options, data, seed=1)
    x, _ = batch(data)
    source.train()(x)  # moves BatchNorm's statistics
    state = weights.read(source)
    assert len(state.params) == count(source)
    assert not torch.equal(source.eval()(x), target.eval()(x))
    weights.load(target, state)
    assert torch.equal(source(x), target(x))
    for key, value in weights.named(source, state).items():
        assert torch.equal(value, source.state_dict()[key]), key
    floats = {key for key, value in source.state_dict().items() if value.is_floating_point()}
    assert set(weights.named(source, state)) == floats


@EVERY
def test_same_seed_same_weights(name: str, options: dict[str, Any], data: Data) -> None:
    """A task fills in shape and classes by name; the weights depend on the seed alone."""
    x, _ = batch(data, data[1])
    fed = from_clients([(x, torch.arange(data[1]))], (x, torch.arange(data[1])))
    task = Task(model=partial(MODELS[name], **options), data=fed)
    before = torch.get_rng_state()
    first = weights.read(task.build(seed=3))
    torch.rand(1)
    assert torch.equal(first.params, weights.read(task.build(seed=3)).params)
    assert not torch.equal(first.params, weights.read(task.build(seed=4)).params)
    torch.set_rng_state(before)


@EVERY
def test_maps_over_clients(name: str, options: dict[str, Any], data: Data) -> None:
    """torch.func maps training over clients: the gradients are those of each client alone."""
    clients = [build(name, options, data, seed).double() for seed in range(2)]
    for module in clients:
        quiet(module.train())
    x, y = batch(data, 4)
    x = x.double() if x.is_floating_point() else x
    xs, ys = x.view(2, 2, *data[0]), y.view(2, 2)
    params = {
        k: torch.stack([dict(m.named_parameters())[k].detach() for m in clients])
        for k, _ in clients[0].named_parameters()
    }
    buffers = {
        k: torch.stack([dict(m.named_buffers())[k] for m in clients])
        for k, _ in clients[0].named_buffers()
    }

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(clients[0], (params, buffers), (x,)), y)

    with sdpa_kernel(SDPBackend.MATH):  # the fused ones cannot be mapped
        together = vmap(grad(loss))(params, buffers, xs, ys)
    for i, module in enumerate(clients):
        F.cross_entropy(module(xs[i]), ys[i]).backward()
        for key, p in module.named_parameters():
            torch.testing.assert_close(together[key][i], p.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: models.cnn(shape=(784,)), r"cnn takes images .* not examples of shape \(784,\)"),
        (lambda: models.cnn(shape=(1, 3, 8)), "from 4 x 4 on, not 3 x 8"),
        (lambda: models.kvib_cnn(shape=(1, 15, 28)), "from 16 x 16"),
        (lambda: models.s2_classic(shape=(1, 15, 28)), "from 16 x 16"),
        (lambda: models.vgg9(shape=(1, 8, 7)), "from 8 x 8"),
        (lambda: models.pfl_cnn(shape=(1, 5, 5)), "from 6 x 6"),
        (lambda: models.resnet18(shape=(32, 32)), "resnet18 takes images"),
        (lambda: models.resnet18(norm="bach"), "did you mean 'batch'"),
        (lambda: models.leaf_lstm(shape=(1, 28, 28)), "leaf_lstm takes sequences"),
        (lambda: models.two_nn(classes=0), "need class labels"),
    ],
)
def test_data_that_do_not_fit(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        model()


def test_lstm_is_torch_s() -> None:
    """The written-out layer has nn.LSTM's parameters, in its order, and gives its numbers."""
    own, fused = LSTM(5, 7), nn.LSTM(5, 7, batch_first=True)
    names = [key.removesuffix("_l0") for key, _ in fused.named_parameters()]
    assert names == [key for key, _ in own.named_parameters()]
    weights.load(own, weights.read(fused))
    x = torch.randn(3, 11, 5)
    torch.testing.assert_close(own(x), fused(x)[0])
    own(x).square().sum().backward()
    fused(x)[0].square().sum().backward()
    for a, b in zip(own.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_an_engine_can_replace_the_time_steps() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return torch.ones(3, 11, 7) if func is recurrent else func(*args, **(kwargs or {}))

    layer, x = LSTM(5, 7), torch.randn(3, 11, 5)
    with Watch():
        assert torch.equal(layer(x), torch.ones(3, 11, 7))
    assert seen.count(recurrent) == 1
    assert torch.sigmoid not in seen


def test_no_statistics_leaves_no_buffers() -> None:
    assert not list(models.resnet18(norm="batch-no-stats").buffers())
    assert not list(models.preact_resnet18().buffers())
    assert list(models.resnet18().buffers())


def test_one_hot_sees_every_character() -> None:
    x = torch.arange(9)[None]
    one_hot = models.lstm_shakespeare(shape=(9,), classes=9).get_submodule("one_hot")
    assert torch.equal(one_hot(x), torch.eye(9, dtype=torch.bool)[None])
