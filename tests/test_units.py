"""Units and cuts: a sub-model is the whole model with the dropped units silenced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import EVERY, TABLE, Data, batch, quiet
from test_models import build as zoo
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import rota
from rota import models, weights
from rota.errors import BadInput
from rota.models.text import LSTM, Last, OneHot
from rota.submodel import Cut, Ordered, Units, build, extract, find_units, keep, scatter
from rota.submodel.tasks import units_of_all
from rota.weights import Weights

# --- the reference: the whole model, in which nobody hears the dropped units ---


def random_cut(units: Units, fraction: float, seed: int = 0) -> Cut:
    draw = np.random.default_rng(seed)
    sizes = [layer.size for layer in units.layers]
    kept = [
        np.sort(draw.choice(size, count, replace=False))
        for size, count in zip(sizes, units.counts(fraction), strict=True)
    ]
    return keep(units, kept)


def owned(cut: Cut) -> dict[str, Tensor]:
    """Which numbers of each tensor the sub-model has."""
    size = [
        sum(shape.numel() for shape in shapes.values())
        for shapes in (cut.units.params, cut.units.buffers)
    ]
    flat = Weights(torch.zeros(size[0], dtype=torch.bool), torch.zeros(size[1], dtype=torch.bool))
    flat.params[cut.places] = True
    flat.buffers[cut.buffer_places] = True
    out: dict[str, Tensor] = {}
    for vector, shapes in zip(flat, (cut.units.params, cut.units.buffers), strict=True):
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        out |= {n: p.view(s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}
    return out


def silenced(module: nn.Module, cut: Cut, noise: float = 1.0) -> nn.Module:
    """The whole model with noise in all that the dropped units own, but 0 where others hear them.

    Without noise there is 0 in all that they own, for modules in which units are heard by units.
    """
    module = copy.deepcopy(module)
    has = owned(cut)
    for name, part in module.named_modules():
        for own, tensor in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
        ]:
            if not tensor.is_floating_point():
                continue
            gone = ~has.get(f"{name}.{own}".lstrip("."), torch.ones_like(tensor).bool())
            new = noise * (torch.rand_like(tensor) + 0.5)
            if noise and tensor.dim() > 1 and not isinstance(part, nn.Embedding | Scale):
                hears = 0 if isinstance(part, nn.ConvTranspose2d) else 1
                new *= ~gone.all([i for i in range(tensor.dim()) if i != hears], keepdim=True)
            with torch.no_grad():
                tensor.copy_(torch.where(gone, new, tensor))
    return module


class KeptStatistics(TorchFunctionMode):
    """LayerNorm and GroupNorm take their means and variances over the kept channels alone."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        super().__init__()
        has = owned(cut)
        self.kept = {id(each): has[name] for name, each in module.named_parameters() if name in has}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (F.layer_norm, F.group_norm):
            return func(*args, **(kwargs or {}))
        return self.norm(*args, grouped=func is F.group_norm, **(kwargs or {}))

    def norm(
        self, x: Tensor, sizes: Any, weight: Tensor, bias: Tensor, eps: float, grouped: bool
    ) -> Tensor:
        kept, ones = self.kept[id(weight)], [1] * (x.dim() - 2)
        shape = [1, -1, *ones] if grouped else [-1]
        parts = x.reshape(len(x), sizes, -1) if grouped else x
        mask = kept.view(shape).expand_as(x).reshape(parts.shape)
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        mean = (parts * mask).sum(-1, keepdim=True) / count
        variance = ((parts - mean) ** 2 * mask).sum(-1, keepdim=True) / count
        out = ((parts - mean) / torch.sqrt(variance + eps)).reshape(x.shape)
        return out * weight.view(shape) + bias.view(shape)


def shaken(module: nn.Module) -> nn.Module:
    """No two units alike: normalisations begin with weights of 1 and biases of 0."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor += torch.rand_like(tensor) / 4
    return module


def agree(module: nn.Module, units: Units, x: Tensor, cut: Cut, noise: float = 1.0) -> None:
    """Outputs, gradients and running statistics of a sub-model are the silenced whole model's."""
    module = shaken(module.double())
    x = x.double() if x.is_floating_point() else x
    torch.manual_seed(0)
    small, whole = build(module, cut), silenced(module, cut, noise)
    state = weights.read(module)
    for mine, part in zip(weights.read(small), extract(state, cut), strict=True):
        assert torch.equal(mine, part)
    for train in (True, False):
        for each in (small, whole):
            quiet(each.train(train))
        mine = small(x)
        with KeptStatistics(whole, cut):
            theirs = whole(x)
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
        goal = torch.linspace(-1, 1, mine.numel(), dtype=torch.double).view(mine.shape)
        for each, out in ((small, mine), (whole, theirs)):
            each.zero_grad()
            (out * goal).sum().backward()
        torch.testing.assert_close(
            gradient(small), gradient(whole)[cut.places], rtol=1e-6, atol=1e-8
        )
        torch.testing.assert_close(
            weights.read(small).buffers,
            extract(weights.read(whole), cut).buffers,
            rtol=1e-7,
            atol=1e-9,
        )


def gradient(module: nn.Module) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in module.parameters()
        ]
    )


def state_of(units: Units) -> Weights:
    sizes = [sum(s.numel() for s in shapes.values()) for shapes in (units.params, units.buffers)]
    return Weights(torch.arange(sizes[0]).double(), torch.arange(sizes[1]).double())


# --- the built-in models ---


@EVERY
@pytest.mark.parametrize("fraction", [0.75, 0.4])
def test_built_in_models(name: str, options: dict[str, Any], data: Data, fraction: float) -> None:
    module, (x, _) = zoo(name, options, data), batch(data, 3)
    units = find_units(module, x)
    assert bool(units.layers) == (name not in ("logistic", "linear"))
    agree(module, units, x, random_cut(units, fraction, seed=1))


@EVERY
def test_equal_counts_have_equal_shapes_and_the_rest_stays(
    name: str, options: dict[str, Any], data: Data
) -> None:
    module, (x, _) = zoo(name, options, data), batch(data, 2)
    units = find_units(module, x)
    one, other = (random_cut(units, 0.6, seed) for seed in (1, 2))
    shapes = [[t.shape for t in build(module, cut).state_dict().values()] for cut in (one, other)]
    assert shapes[0] == shapes[1]
    state = state_of(units)
    part = extract(state, one)
    for mine, again in zip(state, scatter(state, part, one), strict=True):
        assert torch.equal(mine, again)
    marked = scatter(state, Weights(*(torch.full_like(each, -1) for each in part)), one)
    for before, after, places in zip(state, marked, (one.places, one.buffer_places), strict=True):
        changed = torch.nonzero(after != before).flatten()
        assert torch.equal(changed, places)
        assert (after[changed] == -1).all()
    rows = Weights(state.params.repeat(3, 1), state.buffers.repeat(3, 1))
    for many, alone in zip(extract(rows, one), part, strict=True):
        assert torch.equal(many, alone.repeat(3, 1))


FLUID = {
    "fluid_femnist": {"conv1": 16, "conv2": 64, "fc1": 120},
    "vgg9": {
        "conv1": 32,
        "conv2": 32,
        "conv3": 64,
        "conv4": 64,
        "conv5": 128,
        "conv6": 128,
        "fc1": 512,
        "fc2": 256,
    },
    "lstm_shakespeare": {"lstm1": 128, "lstm2": 128},
}


def whole(name: str) -> tuple[nn.Module, Tensor]:
    """A model with the paper's data."""
    _, options, data, _, _ = next(row for row in TABLE if row[0] == name)
    return zoo(name, options, data), batch(data, 1)[0]


@pytest.mark.parametrize("name", FLUID)
def test_fluids_droppable_layers(name: str) -> None:
    found = find_units(*whole(name)).layers
    assert {layer.name: layer.size for layer in found} == FLUID[name]


def femnist(a: int, b: int, c: int) -> int:
    return 26 * a + b * (25 * a + 1) + c * (49 * b + 1) + 62 * (c + 1)


def vgg(*n: int) -> int:
    convolutions = sum(o * (9 * i + 1) for i, o in zip((3, *n[:5]), n[:6], strict=True))
    return convolutions + n[6] * (16 * n[5] + 1) + n[7] * (n[6] + 1) + 10 * (n[7] + 1)


def shakespeare(a: int, b: int) -> int:
    return 4 * a * (80 + a + 2) + 4 * b * (a + b + 2) + 80 * (b + 1)


SIZES = {
    0.95: ([15, 60, 114], [30, 30, 60, 60, 121, 121, 486, 243], 121),
    0.85: ([13, 54, 102], [27, 27, 54, 54, 108, 108, 435, 217], 108),
    0.75: ([12, 48, 90], [24, 24, 48, 48, 96, 96, 384, 192], 96),
    0.65: ([10, 41, 78], [20, 20, 41, 41, 83, 83, 332, 166], 83),
    0.5: ([8, 32, 60], [16, 16, 32, 32, 64, 64, 256, 128], 64),
}
PARAMETERS = {0.95: 365_354, 0.85: 294_322, 0.75: 232_172, 0.65: 172_229, 0.5: 104_562}


@pytest.mark.parametrize("name", FLUID)
def test_fluids_kept_counts(name: str) -> None:
    """ALGORITHMS 5.2, and the parameters of the sub-models by the networks' formulas."""
    module, x = whole(name)
    units = find_units(module, x)
    formula = {"fluid_femnist": femnist, "vgg9": vgg, "lstm_shakespeare": shakespeare}[name]
    assert sum(p.numel() for p in module.parameters()) == formula(*FLUID[name].values())
    for fraction, (few, many, units_of_lstm) in SIZES.items():
        counts = {"fluid_femnist": few, "vgg9": many}.get(name, [units_of_lstm] * 2)
        assert units.counts(fraction) == counts
        cut = random_cut(units, fraction)
        small = build(module, cut)
        assert sum(p.numel() for p in small.parameters()) == len(cut.places) == formula(*counts)
        if name == "fluid_femnist":
            assert len(cut.places) == PARAMETERS[fraction]


def test_counts() -> None:
    units = find_units(
        nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 2)), torch.ones(1, 3)
    )
    assert units.counts(0.57) == [57]
    assert units.counts(0.999) == [99]
    assert units.counts(0.0) == [1]
    assert units.counts([1.0]) == [100]


def test_filters_own_contiguous_blocks_of_the_first_linear_layer() -> None:
    """Zero one channel behind its activation: the sub-model without it gives the same."""
    module, _ = whole("fluid_femnist")
    units = find_units(module, torch.zeros(1, 1, 28, 28))
    conv2 = units.layers[1]
    (columns,) = (each for each in conv2.slices if each.tensor == "fc1.weight")
    assert columns.axis == 1
    assert np.array_equal(columns.index, np.arange(64 * 49).reshape(64, 49))
    x = torch.randn(4, 1, 28, 28)
    cut = keep(units, [np.arange(16), np.delete(np.arange(64), 5), np.arange(120)])
    handle = module.get_submodule("act2").register_forward_hook(
        lambda _, __, out: out * (torch.arange(64) != 5).view(-1, 1, 1)
    )
    theirs = module(x)
    handle.remove()
    torch.testing.assert_close(build(module, cut)(x), theirs, rtol=1e-4, atol=1e-5)


def test_residual_channels_of_a_resnet() -> None:
    """Masks behind each activation of the stream and inside the blocks silence the same units."""
    module = zoo("resnet18", {}, ((3, 8, 8), 5)).double().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean = torch.randn(len(part.weight)).double() / 10
            part.running_var = torch.rand(len(part.weight)).double() + 0.5
    x = torch.randn(2, 3, 8, 8).double()
    units = find_units(module, x)
    kept = dict(
        zip((layer.name for layer in units.layers), random_cut(units, 0.5).kept, strict=True)
    )

    def mask(name: str, size: int) -> Tensor:
        mask = torch.zeros(size).double()
        mask[kept[name]] = 1
        return mask.view(-1, 1, 1)

    def silence_output(part: nn.Module, mask: Tensor) -> None:
        part.register_forward_hook(lambda _, __, out: out * mask)

    def silence_input(part: nn.Module, mask: Tensor) -> None:
        part.register_forward_pre_hook(lambda _, args: (args[0] * mask,))

    reference = copy.deepcopy(module)
    silence_output(reference.get_submodule("relu"), mask("conv", 64))
    for i in range(8):
        stream = ("conv", "block3.conv2", "block5.conv2", "block7.conv2")[i // 2]
        size = (64, 128, 256, 512)[i // 2]
        block = reference.get_submodule(f"block{i + 1}")
        silence_output(block, mask(stream, size))
        silence_input(block.get_submodule("conv2"), mask(f"block{i + 1}.conv1", size))
    small = build(module, keep(units, list(kept.values())))
    assert len(small.get_submodule("conv").weight) == 32
    torch.testing.assert_close(small(x), reference(x))


@pytest.mark.parametrize("layer", ["rota's", "torch's"])
def test_dropped_lstm_units_have_no_hidden_state(layer: str) -> None:
    """The written-out recurrence, with the dropped units' hidden state forced to 0 at each step."""
    if layer == "rota's":
        module: nn.Module = models.lstm_shakespeare(shape=(7,), classes=9).double()
        names = [("lstm1.", ""), ("lstm2.", "")]
    else:
        module = Sequence(nn.LSTM(9, 128, 2, batch_first=True), 128, 9).double()
        names = [("layer.", "_l0"), ("layer.", "_l1")]
    x = torch.randint(9, (3, 7))
    units = find_units(module, x)
    assert [each.size for each in units.layers] == [128, 128]
    cut = random_cut(units, 0.65)
    state = module.state_dict()
    inputs = F.one_hot(x, 9).double()
    for (prefix, suffix), kept in zip(names, cut.kept, strict=True):
        w_ih, w_hh, b_ih, b_hh = (
            state[f"{prefix}{kind}{suffix}"]
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        mask = torch.zeros(128).double()
        mask[kept] = 1
        hidden = cell = torch.zeros(3, 128).double()
        steps = []
        for now in inputs.unbind(1):
            i, f, g, o = (now @ w_ih.T + b_ih + hidden @ w_hh.T + b_hh).chunk(4, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell) * mask
            steps.append(hidden)
        inputs = torch.stack(steps, 1)
    theirs = inputs[:, -1] @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(build(module, cut)(x), theirs)
    for each, j in ((units.layers[0], 3), (units.layers[1], 77)):
        rows = {s.tensor: s.index[j].tolist() for s in each.slices if s.index.shape[1] == 4}
        assert len(rows) == 4
        assert all(own == [j, j + 128, j + 256, j + 384] for own in rows.values())


# --- networks of all kinds, made at random ---


class Sequence(nn.Module):
    """One-hot characters, a torch recurrence, the last step, a linear layer."""

    def __init__(self, layer: nn.RNNBase, width: int, classes: int) -> None:
        super().__init__()
        self.hot, self.layer, self.fc = OneHot(layer.input_size), layer, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(self.hot(x).to(self.fc.weight.dtype))[0][:, -1])


class First(nn.Module):
    """The sequence of a torch recurrence, without its state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Residual(nn.Module):
    def __init__(self, body: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.body, self.skip = body, skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


class Concat(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Gate(nn.Module):
    """One half of the channels gates the other."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 2 * outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, 1)
        return value * torch.sigmoid(gate)


class Halves(nn.Module):
    """The halves of the channels go different ways."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels // 2, outputs, 1)
        self.other = nn.Conv2d(channels // 2, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return torch.cat([self.one(one), torch.relu(self.other(other))], 1)


class Squeeze(nn.Module):
    """Squeeze and excitation: a gate per channel from all channels' means."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, hidden), nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1, channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


Draw = Callable[[st.SearchStrategy[Any]], Any]


def norm(draw: Draw, channels: int) -> nn.Module:
    groups = [g for g in range(1, channels + 1) if channels % g == 0]
    return draw(
        st.sampled_from(
            [
                nn.Identity(),
                nn.BatchNorm2d(channels),
                nn.BatchNorm2d(channels, track_running_stats=False),
                nn.BatchNorm2d(channels, affine=False),
                nn.GroupNorm(draw(st.sampled_from(groups)), channels),
            ]
        )
    )


def activation(draw: Draw) -> nn.Module:
    """Also ones with f(0) != 0."""
    kinds = [nn.Identity, nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.PReLU, nn.Softplus]
    return draw(st.sampled_from(kinds))()


def convolution(draw: Draw, channels: int, outputs: int | None = None) -> tuple[nn.Module, int]:
    outputs = outputs or draw(st.integers(2, 7))
    size, bias = draw(st.sampled_from([1, 3])), draw(st.booleans())
    conv = nn.Conv2d(channels, outputs, size, padding=size // 2, bias=bias)
    return nn.Sequential(conv, norm(draw, outputs), activation(draw)), outputs


def grouped(draw: Draw, channels: int) -> tuple[nn.Module, int]:
    groups = draw(st.sampled_from([g for g in range(2, channels + 1) if channels % g == 0]))
    outputs = groups * draw(st.integers(1, 3))
    return nn.Conv2d(channels, outputs, 3, padding=1, groups=groups), outputs


def step(draw: Draw, channels: int, depth: int = 0) -> tuple[nn.Module, int]:
    kinds = ["conv", "pool", "scale", "squeeze", "gate", "transposed", "grouped"]
    kinds += ["halves"] * (channels % 2 == 0) + ["residual", "projected", "concat"] * (depth < 2)
    kind = draw(st.sampled_from(kinds))
    if kind == "grouped":
        return grouped(draw, channels)
    if kind == "pool":
        return draw(st.sampled_from([nn.MaxPool2d(2, 1), nn.AvgPool2d(3, 1, 1)])), channels
    if kind == "scale":
        return Scale(channels), channels
    if kind == "squeeze":
        return Squeeze(channels, 3), channels
    if kind == "gate":
        return Gate(channels, 4), 4
    if kind == "halves":
        return Halves(channels, 3), 6
    if kind == "transposed":
        return nn.ConvTranspose2d(channels, 5, 3, padding=1), 5
    if kind == "concat":
        one, n = step(draw, channels, 2)
        other, m = step(draw, channels, 2)
        branches = Concat(
            nn.Sequential(one, nn.AdaptiveMaxPool2d(4)),
            nn.Sequential(other, nn.AdaptiveMaxPool2d(4)),
        )
        return branches, n + m
    if kind == "residual":
        first, middle = convolution(draw, channels)
        last, _ = convolution(draw, middle, channels)
        return Residual(nn.Sequential(first, last), nn.Identity()), channels
    if kind == "projected":
        body, outputs = convolution(draw, channels)
        skip, _ = convolution(draw, channels, outputs)
        return Residual(body, skip), outputs
    return convolution(draw, channels)


@st.composite
def image_networks(draw: Draw) -> tuple[nn.Module, int]:
    """Convolutions of all kinds, then linear layers on the flattened or averaged image."""
    torch.manual_seed(draw(st.integers(0, 99)))
    colours = draw(st.integers(1, 3))
    first, channels = convolution(draw, colours)
    layers = [first]
    for _ in range(draw(st.integers(1, 4))):
        layer, channels = step(draw, channels)
        layers += [layer, activation(draw)]
    side = draw(st.sampled_from([1, 2]))
    hidden = draw(st.integers(2, 9))
    layers += [
        nn.AdaptiveAvgPool2d(side),
        nn.Flatten(),
        nn.Linear(channels * side**2, hidden),
        draw(st.sampled_from([nn.Identity(), nn.BatchNorm1d(hidden), nn.LayerNorm(hidden)])),
        activation(draw),
        nn.Linear(hidden, 3),
    ]
    return nn.Sequential(*layers), colours


@st.composite
def text_networks(draw: Draw) -> tuple[nn.Module, Tensor]:
    """Embeddings or unit vectors, recurrences of all kinds, linear layers."""
    torch.manual_seed(draw(st.integers(0, 99)))
    inputs = 6 if draw(st.booleans()) else 4
    first: list[nn.Module] = [nn.Embedding(6, 4)] if inputs == 4 else [OneHot(6), Real()]
    if draw(st.booleans()):
        first += [nn.Linear(inputs, 5), draw(st.sampled_from([nn.Identity(), nn.LayerNorm(5)]))]
        inputs = 5
    layers = [*first]
    for _ in range(draw(st.integers(1, 2))):
        width = draw(st.integers(2, 6))
        kind = draw(st.sampled_from([LSTM, nn.LSTM, nn.GRU, nn.RNN]))
        if kind is LSTM:
            layers.append(LSTM(inputs, width))
            inputs = width
        else:
            many, both = draw(st.integers(1, 2)), draw(st.booleans())
            own = kind(inputs, width, many, batch_first=True, bidirectional=both)
            layers.append(First(own))
            inputs = width * (2 if both else 1)
        layers.append(draw(st.sampled_from([nn.Identity(), nn.LayerNorm(inputs)])))
    layers += [Last(), nn.Linear(inputs, 5), activation(draw), nn.Linear(5, 3)]
    return nn.Sequential(*layers), torch.randint(6, (3, 5))


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype())


FRACTIONS = st.sampled_from([0.85, 0.65, 0.5, 0.3])


@given(image_networks(), FRACTIONS, st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_random_image_networks(made: tuple[nn.Module, int], fraction: float, seed: int) -> None:
    module, colours = made
    x = torch.randn(3, colours, 7, 6)
    units = find_units(module, x)
    assert units.layers
    agree(module, units, x, random_cut(units, fraction, seed))


@given(text_networks(), FRACTIONS, st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_random_text_networks(made: tuple[nn.Module, Tensor], fraction: float, seed: int) -> None:
    module, x = made
    with doubles():
        units = find_units(module.double(), x)
        assert units.layers
        agree(module, units, x, random_cut(units, fraction, seed))


@contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- single modules ---


class Attention(nn.Module):
    """Attention with heads of a fixed size; their number follows from the weights."""

    def __init__(self, width: int, heads: int, size: int, fused: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, heads * size) for _ in range(3))
        self.out, self.size, self.fused = nn.Linear(heads * size, width), size, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(*x.shape[:2], -1, self.size).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        if self.fused:
            heard = F.scaled_dot_product_attention(q, k, v)
        else:
            heard = torch.softmax(q @ k.transpose(-1, -2) * self.size**-0.5, -1) @ v
        return self.out(heard.transpose(1, 2).flatten(2))


class FixedHeads(Attention):
    """Attention with a fixed number of heads; `scale` computes the scale from their size."""

    def __init__(self, width: int, heads: int, size: int, scale: bool) -> None:
        super().__init__(width, heads, size)
        self.heads, self.scale = heads, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        scale = (q.shape[-1] if self.scale else self.size) ** -0.5
        return self.out(
            (torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v).transpose(1, 2).flatten(2)
        )


class OneHead(Attention):
    """A single head: its size is in the formula."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unsqueeze(1) for each in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))


class Einsum(nn.Module):
    """Attention by tensors with an axis for heads and one for their dimensions.

    torch merges these axes in either order, so both are kept.
    """

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(heads, size, width) / 3) for _ in range(3)
        )
        self.out = nn.Parameter(torch.randn(heads, size, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bte,hde->bhtd", x, each) for each in (self.q, self.k, self.v))
        heard = torch.softmax(torch.einsum("bhtd,bhsd->bhts", q, k) / 2, -1)
        return torch.einsum("bhts,bhsd,hde->bte", heard, v, self.out)


class Centred(nn.Module):
    """A mean over units would be another one over fewer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Grey(nn.Module):
    """One channel as three."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, 3, -1, -1)


class Parts(nn.Module):
    """Parts of the channels that are not equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x[:, :3])) + torch.sigmoid(self.other(x[:, 3:])) * x[:, 4:5]


class Products(nn.Module):
    """All products of two layers' units: those of the inner one are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(5, 6), nn.Linear(5, 4), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        return self.fc((self.one(x)[:, :, None] * self.two(x)[:, None]).flatten(1))


class Output(nn.Module):
    """One half of the units is an output, so neither half can shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.one(x.mean(1)).chunk(2, 1)
        return out + self.two(torch.relu(hidden))


class Looked(nn.Module):
    """The embedding's weights are a hidden layer, too: its units are the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(7, 6), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(F.linear(self.embed(x).mean(1), self.embed.weight)))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def sequence(*layers: nn.Module, width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, width), *layers, nn.LayerNorm(width), Mean(), nn.Linear(width, 3)
    )


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.fc = kind(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for now in x.unbind(1):
            state = self.cell(now, state)
        return self.fc(state[0] if isinstance(state, tuple) else state)


class Written(nn.Module):
    """Results are written into a memory, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = hidden.new_zeros(hidden.shape)
        for i in range(x.shape[1]):
            out[:, i] = torch.relu(hidden[:, i])
        out += 1
        return self.fc(out.mean(1))


class Tied(nn.Module):
    """The output layer has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.fc = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)
        self.fc.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.hidden(self.embed(x))).mean(1))


class Helped(nn.Module):
    """A second output in training alone, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.help, self.unused = nn.Linear(6, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x.mean(1)))
        out = self.fc(torch.relu(self.two(hidden)))
        return out + self.help(hidden) if self.training else out


class Shuffle(nn.Module):
    """The channels of the groups in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
SINGLE: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, int], float]] = {
    "heads": (lambda: sequence(Attention(6, 3, 4)), X, {"0": 6, "1.q": 3, "1.out": 6}, 1),
    "fused": (lambda: sequence(Attention(6, 3, 4, True)), X, {"0": 6, "1.q": 3, "1.out": 6}, 1),
    "dimensions of all heads": (
        lambda: sequence(FixedHeads(6, 3, 4, scale=False)),
        X,
        {"0": 6, "1.q": 4, "1.v": 4, "1.out": 6},
        0,
    ),
    "one head": (lambda: sequence(OneHead(6, 1, 4)), X, {"0": 6, "1.out": 6}, 1),
    "einsum": (lambda: sequence(Einsum(6, 3, 4)), X, {"0": 6, "1": 6}, 0),
    "products": (Products, X, {"one": 6}, 1),
    "centred": (
        lambda: sequence(nn.Linear(6, 8), Centred(), nn.Linear(8, 6)),
        X,
        {"0": 6, "3": 6},
        1,
    ),
    "grey": (
        lambda: nn.Sequential(
            Grey(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
        IMAGE,
        {"1": 4},
        1,
    ),
    "parts": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), Parts(), nn.Flatten(), nn.Linear(64, 3)),
        IMAGE,
        {"1.one": 4},
        1,
    ),
    "output": (Output, X, {}, 1),
    "looked up": (Looked, torch.arange(12).view(3, 4) % 7, {"embed": 6}, 0),
    "groups, transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1),
            nn.ConvTranspose2d(6, 9, 2, groups=3),
            nn.Flatten(),
            nn.Linear(225, 3),
        ),
        IMAGE,
        {"0": 3},
        1,
    ),
    "transformer": (
        lambda: sequence(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)),
        X,
        {"1.linear1": 8},
        1,
    ),
    "lstm cell": (lambda: Cell(nn.LSTMCell), X, {"cell": 6}, 1),
    "gru cell": (lambda: Cell(nn.GRUCell), X, {"cell": 6}, 1),
    "projected lstm": (
        lambda: Sequence(nn.LSTM(9, 8, 2, batch_first=True, proj_size=5), 5, 9),
        torch.arange(21).view(3, 7) % 9,
        {f"layer.weight_{kind}_l{i}": n for i in (0, 1) for kind, n in (("ih", 8), ("hr", 5))},
        1,
    ),
    "written": (Written, X, {"first": 6}, 1),
    "tied": (Tied, torch.arange(12).view(3, 4) % 7, {"embed": 6}, 0),
    "helped": (Helped, X, {"one": 6, "two": 6}, 1),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 2),
            nn.BatchNorm1d(6),
            nn.InstanceNorm1d(6, affine=True),
            nn.ReLU(),
            nn.Conv1d(6, 12, 1, groups=6),
            nn.Flatten(),
            nn.Linear(48, 3),
        ),
        X,
        {"0": 6},
        1,
    ),
    "odd layers": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1),
            nn.Upsample(scale_factor=2),
            nn.ReflectionPad2d(1),
            nn.ZeroPad2d(1),
            nn.Hardswish(),
            nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular"),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(5, 4),
            nn.LogSigmoid(),
            nn.GLU(),
            nn.Linear(2, 3),
        ),
        IMAGE,
        {"0": 6, "5": 5, "9": 2},
        1,
    ),
    "pixels": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 1),
            nn.PixelShuffle(2),
            nn.Conv2d(3, 4, 1),
            nn.PixelUnshuffle(2),
            nn.Conv2d(16, 4, 1),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        IMAGE,
        {"0": 3, "2": 4, "4": 4},
        1,
    ),
    "shuffled": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), Shuffle(), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(96, 3)
        ),
        IMAGE,
        {"0": 4, "2": 6},
        1,
    ),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("fraction", [0.7, 0.5])
def test_modules(name: str, fraction: float) -> None:
    make, x, layers, noise = SINGLE[name]
    module = make()
    units = find_units(module, x)
    assert {layer.name: layer.size for layer in units.layers} == layers
    for seed in range(3):
        agree(module, units, x, random_cut(units, fraction, seed), noise)


def test_layers_remember_their_new_sizes() -> None:
    """As if they had been made that way."""

    def network(a: int, b: int, c: int, d: int, e: int) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(9, a),
            First(nn.LSTM(a, b, batch_first=True)),
            nn.LayerNorm(b),
            nn.Linear(b, 8),
            nn.Unflatten(1, (1, 5)),
            nn.Conv2d(1, c, 3, padding=1, bias=False),
            nn.BatchNorm2d(c),
            nn.PReLU(c),
            nn.Conv2d(c, 2 * c, 1, groups=c),
            nn.ConvTranspose2d(2 * c, 6 * d, 1),
            nn.GroupNorm(d, 6 * d),
            nn.Conv2d(6 * d, 6 * e, 1, groups=2),
            nn.Flatten(),
            nn.Linear(6 * e * 40, 2),
        )

    module, x = network(6, 5, 4, 6, 2), torch.arange(15).view(3, 5) % 9
    module[0].weight.requires_grad_(False)
    units = find_units(module, x)
    sizes = {"0": 6, "1.layer": 5, "5": 4, "9": 3, "11[0:6]": 6, "11[6:12]": 6}
    assert {layer.name: layer.size for layer in units.layers} == sizes
    small = build(module, random_cut(units, 0.5))
    assert repr(small) == repr(network(3, 2, 2, 2, 1))
    trained = [name for name, p in small.named_parameters() if p.requires_grad]
    assert trained == [name for name, _ in module.named_parameters()][1:]
    agree(module, units, x, random_cut(units, 0.5))


def test_tied_weights_stay_tied() -> None:
    module, x = Tied(), torch.zeros(1, 4, dtype=torch.int64)
    small: Any = build(module, random_cut(find_units(module, x), 0.5))
    assert small.fc.weight is small.embed.weight
    assert small.embed.embedding_dim == small.fc.in_features == 3


def test_slices_of_a_small_network() -> None:
    """Concatenation shifts the second branch; a residual ties its ends; all tensors are there."""
    module = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        Concat(nn.Conv2d(4, 2, 1), nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3))),
        Residual(nn.Conv2d(5, 5, 1, bias=False), nn.Identity()),
        nn.Flatten(),
        nn.Linear(20, 2),
    )
    units = find_units(module, torch.randn(2, 3, 2, 2))
    found = {
        layer.name: {(s.tensor, s.axis): s.index.tolist() for s in layer.slices}
        for layer in units.layers
    }

    def alone(*indices: int) -> list[list[int]]:
        return [[i] for i in indices]

    def blocks(*channels: int) -> list[list[int]]:
        return [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in channels]

    def branch(name: str, first: int, size: int, more: tuple[str, ...] = ()) -> Any:
        own = alone(*range(size))
        there = alone(*range(first, first + size))
        return {
            (f"{name}.weight", 0): own,
            (f"{name}.bias", 0): own,
            **{(each, 0): own for each in more},
            ("2.body.weight", 0): there,
            ("2.body.weight", 1): there,
            ("4.weight", 1): blocks(*range(first, first + size)),
        }

    first = alone(0, 1, 2, 3)
    norm = tuple(f"1.branches.1.1.{x}" for x in ("weight", "bias", "running_mean", "running_var"))
    assert found == {
        "0": {
            ("0.weight", 0): first,
            ("0.bias", 0): first,
            ("1.branches.0.weight", 1): first,
            ("1.branches.1.0.weight", 1): first,
        },
        "1.branches.0": branch("1.branches.0", 0, 2),
        "1.branches.1.0": branch("1.branches.1.0", 2, 3, norm),
    }


def test_inputs_and_outputs_are_kept() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    units = find_units(module, torch.randn(1, 3, 4, 4))
    (layer,) = units.layers
    assert {(s.tensor, s.axis) for s in layer.slices} == {
        ("0.weight", 0),
        ("0.bias", 0),
        ("3.weight", 1),
    }
    tied = nn.Sequential(Residual(nn.Linear(5, 5), nn.Identity()), nn.ReLU(), nn.Linear(5, 2))
    assert find_units(tied, torch.ones(1, 5)).layers == ()
    assert find_units(nn.Linear(3, 2), torch.ones(1, 3)).layers == ()
    cut = keep(find_units(nn.Linear(3, 2), torch.ones(1, 3)), [])
    assert cut.places.tolist() == list(range(8))


def test_groups_of_a_norm_stay_equal() -> None:
    """Two groups are two layers of equal counts; many small groups are units themselves."""
    few = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 2))
    units = find_units(few, torch.randn(1, 3, 2, 2))
    assert [(layer.name, layer.size) for layer in units.layers] == [("0[0:4]", 4), ("0[4:8]", 4)]
    assert units.even == ((0, 1),)
    with pytest.raises(BadInput, match=r"'0\[0:4\]', '0\[4:8\]' must keep equally many units"):
        keep(units, [np.array([0]), np.array([1, 2])])
    small: Any = build(few, keep(units, [np.array([0, 3]), np.array([1, 2])]))
    assert (small[1].num_groups, small[1].num_channels) == (2, 4)
    many = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(32, 2))
    units = find_units(many, torch.randn(1, 3, 2, 2))
    assert [(layer.size, layer.slices[0].index.tolist()) for layer in units.layers] == [
        (4, [[0, 1], [2, 3], [4, 5], [6, 7]])
    ]
    small = build(many, keep(units, [np.array([0, 2, 3])]))
    assert (small[1].num_groups, small[1].num_channels) == (3, 6)


def test_analysis_leaves_everything_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2)).eval()
    module[1].train()
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    find_units(module, torch.randn(1, 4, generator=torch.Generator().manual_seed(0)))
    assert [part.training for part in module.modules()] == [False, False, True, False, False]
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.backends.mha.get_fastpath_enabled()


# --- an independent implementation ---


CONVOLUTIONAL = [
    (name, options, data)
    for name, options, _, _, data in TABLE
    # it does not keep the groups of GroupNorm even
    if len(data[0]) == 3 and options.get("norm") != "group" and name != "resnet8"
]


@pytest.mark.parametrize(("name", "options", "data"), CONVOLUTIONAL)
def test_torch_pruning_agrees(name: str, options: dict[str, Any], data: Data) -> None:
    """DepGraph (Fang et al. 2023) prunes convolutional networks to the same weights."""
    import torch_pruning as tp

    module, (x, _) = zoo(name, options, data), batch(data, 2)
    units = find_units(shaken(module), x)
    cut = random_cut(units, 0.6)
    pruned = copy.deepcopy(module)
    for layer, kept in zip(units.layers, cut.kept, strict=True):
        root = pruned.get_submodule(layer.name)
        function = (
            tp.prune_linear_out_channels
            if isinstance(root, nn.Linear)
            else tp.prune_conv_out_channels
        )
        gone = np.delete(np.arange(layer.size), kept).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = tp.DependencyGraph().build_dependency(pruned, x)
        graph.get_pruning_group(root, function, gone).prune()
    mine, theirs = build(module, cut).state_dict(), pruned.state_dict()
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert torch.equal(mine[key], theirs[key]), key


# --- what cannot be analysed or cut ---


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class FixedSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 128)


class FixedSlice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 4:], x[:, :4]], 1)


class Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


def with_part(part: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), part, nn.Flatten(), nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Fourier(), r"'1' \(Fourier\) uses the operator '_fft_r2c'.* whole=\['1'\]"),
        (FixedSize(), r"cannot run with fewer units \(.*\): let it take its sizes"),
        (
            FixedSlice(),
            r"'slice' in '1' \(FixedSlice\) has a result of shape \[2, 0, 4, 4\] instead",
        ),
        (Average(), r"'1' \(Average\) computes with its number of units \('div' with \[8\]\)"),
    ],
)
def test_one_sentence_names_the_part(part: nn.Module, words: str) -> None:
    """And with the part left out, the other units are found."""
    module = with_part(part)
    module(IMAGE)
    with pytest.raises(BadInput, match=words):
        find_units(module, IMAGE)
    units = find_units(module, IMAGE, whole=["1"])
    assert [layer.name for layer in units.layers] == ["3"]
    agree(module, units, IMAGE, random_cut(units, 0.5))


class Turns(nn.Module):
    """Half of the channels go through a convolution, then both halves take turns (ShuffleNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some = nn.Conv2d(3, 12, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.last = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, 1)
        x = torch.cat([left, torch.relu(self.some(right))], 1)
        x = x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return self.last(x.sum((2, 3)))


def test_units_of_channels_that_take_turns() -> None:
    """No whole half can go, so a unit is one of each half's channels."""
    units = find_units(Turns(), IMAGE)
    assert [(layer.name, layer.size) for layer in units.layers] == [
        ("first[0:6]", 6),
        ("first[6:12]", 6),
    ]
    assert units.even == ((0, 1),)
    agree(Turns(), units, IMAGE, random_cut(units, 0.5))


def test_a_network_that_cannot_be_copied() -> None:
    layer = nn.Linear(4, 4)
    layer.half = layer.weight / 2  # type: ignore[assignment]
    with pytest.raises(BadInput, match="the network cannot be copied: Only Tensors created"):
        find_units(nn.Sequential(layer, nn.Linear(4, 2)), X)


def test_the_networks_attribute_whole_and_networks_without_units(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def module(shape: tuple[int, ...], classes: int) -> nn.Module:
        made = with_part(FixedSize())
        made.whole = ["1"]  # type: ignore[assignment]
        made(IMAGE)
        return made

    def single(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 2))

    some = IMAGE.float(), torch.zeros(len(IMAGE), dtype=torch.long)
    data = rota.from_clients([some], some, classes=2)
    (units,) = units_of_all([rota.Task(module, data)], Ordered())
    assert [layer.name for layer in units.layers] == ["3"]
    assert not caplog.messages
    (units,) = units_of_all([rota.Task(single, data, name="one")], Ordered())
    assert not units.layers
    (words,) = caplog.messages
    assert words == "task 'one': its network has no unit to drop: parts are whole models"


def test_heads_that_do_not_separate() -> None:
    with pytest.raises(BadInput, match=r"'1' \(FixedHeads\) cannot run with fewer units"):
        find_units(sequence(FixedHeads(6, 3, 4, scale=True)), X)


def test_other_mistakes() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(BadInput, match=r"'0' \(Linear\) cannot run: mat1 and mat2"):
        find_units(module, torch.ones(2, 3))
    with pytest.raises(BadInput, match="module '7' is unknown"):
        find_units(module, torch.ones(2, 4), whole=["7"])
    units = find_units(module, torch.ones(2, 4))
    for kept in ([], [0, 0], [1, 0], [8], [-1], [0.5]):
        with pytest.raises(BadInput, match=r"kept units of layer '0' are wrong: .* 0 to 7"):
            keep(units, [np.array(kept)])
    with pytest.raises(BadInput, match="kept units for 1"):
        keep(units, [])
    for fraction in (1.5, -0.1, [0.5, 0.5]):
        with pytest.raises(BadInput, match="the kept fraction is"):
            units.counts(fraction)
