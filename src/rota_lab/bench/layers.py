"""How much faster each network and each usual layer trains than on the plain engine: rota alone.

The plain engine with one thread, the plain engine with all threads, and the batched engine take
turns, a round each, in one process, so that a busy machine slows them all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota import data, loop
from rota.engine import Engine, make
from rota.engine.batched import Batched
from rota.engine.machine import cores
from rota.estimate import FedAvg
from rota.experiment import Experiment, State
from rota.models import MODELS
from rota.plan import Task
from rota.sampling import Full
from rota_lab.bench.works import images, text

CLIENTS, EXAMPLES = 4, 30
WARMUP = 1
LEAST = 1.0
"""Seconds that a network's rounds take at least: short rounds are repeated, up to MOST times."""
MOST = 200
PHOTOGRAPHS = ("vgg9", "pfl_cnn", "resnet18", "preact_resnet18", "resnet8")
TEXTS = ("lstm_shakespeare", "leaf_lstm", "mmfl_lstm", "transformer")


class Words(nn.Module):
    """Letters, embedded with their positions, then a layer over them, then the next letter."""

    def __init__(self, layer: Callable[[], nn.Module], classes: int = 80, tied: bool = False):
        super().__init__()
        self.letters = nn.Embedding(classes, 64)
        self.position = nn.Parameter(torch.zeros(80, 64))
        self.layer = layer()
        self.out = nn.Linear(64, classes)
        if tied:
            self.out.weight = self.letters.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.letters(x) + self.position)
        out: Tensor = self.out(hidden[:, -1])
        return out


class Attention(nn.Module):
    """Causal self-attention with four heads, with dropout inside it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(64, 192), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        chance = self.dropout if self.training else 0.0
        heard = F.scaled_dot_product_attention(query, key, value, None, chance, True)
        out: Tensor = x + self.outputs(heard.transpose(1, 2).flatten(2))
        return out


class Recurrent(nn.Module):
    """What a GRU has heard after each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        heard: Tensor = self.gru(x)[0]
        return heard


def _dense(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), layer(), nn.Linear(256, 64))


def _convolved(layer: Callable[[], nn.Module]) -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, padding=1)
    return nn.Sequential(
        first, layer(), nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10)
    )


Kind = tuple[str, Callable[..., nn.Module], dict[str, Any]]
LAYERS: dict[str, Kind] = {
    "attention": ("text", partial(Words, partial(Attention, 0.0)), {}),
    "attention, dropout": ("text", partial(Words, partial(Attention, 0.1)), {}),
    "LayerNorm": ("text", partial(Words, partial(nn.LayerNorm, 64)), {}),
    "GELU": ("text", partial(Words, partial(_dense, nn.GELU)), {}),
    "SiLU": ("text", partial(Words, partial(_dense, nn.SiLU)), {}),
    "positions": ("text", partial(Words, nn.Identity), {}),
    "tied weights": ("text", partial(Words, nn.Identity, tied=True), {}),
    "GRU": ("text", partial(Words, Recurrent), {}),
    "GroupNorm": ("digits", partial(_convolved, partial(nn.GroupNorm, 4, 16)), {}),
    "BatchNorm": ("digits", partial(_convolved, partial(nn.BatchNorm2d, 16)), {}),
    "AdamW": ("digits", partial(_convolved, nn.Identity), {"optimizer": "adamw"}),
}
"""A layer's name -> the data that its network takes, the network, and options of the task."""


def measure(device: str, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per network and per layer."""
    made = {"text": _text(), "digits": _made((1, 28, 28)), "photographs": _made((3, 32, 32))}
    rows = []
    works: dict[str, Kind] = {name: (_takes(name), model, {}) for name, model in MODELS.items()}
    for name, (takes, model, options) in (works | LAYERS).items():
        say(f"layers: {name}")
        task = Task(model, made[takes], lr=0.01, batch=10, **options)
        rows.append({"work": "layers", "device": device, **_measure(name, task, device, rounds)})
    return rows


def _takes(name: str) -> str:
    return "text" if name in TEXTS else "photographs" if name in PHOTOGRAPHS else "digits"


def _made(shape: tuple[int, ...]) -> data.Federation:
    found = images(CLIENTS * EXAMPLES, shape, 3.5)
    pairs = zip(found.x.split(EXAMPLES), found.y.split(EXAMPLES), strict=True)
    return data.from_clients(list(pairs), test=(found.x, found.y), classes=10)


def _text() -> data.Federation:
    letters = torch.from_numpy(text(CLIENTS * EXAMPLES))
    x, y = letters[:, :-1].contiguous(), letters[:, -1].contiguous()
    pairs = zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)
    return data.from_clients(list(pairs), test=(x, y), classes=80)


def _measure(name: str, task: Task, device: str, rounds: int) -> dict[str, Any]:
    """A network's seconds per round on each engine."""
    end = WARMUP + rounds + MOST
    experiment = Experiment([task], Full(), FedAvg(), rounds=end, evaluate=end)
    most = torch.get_num_threads()
    ways = {"1 thread": 1, f"{cores()} threads": cores(), "batched": most}
    engines: dict[str, Engine] = {}
    states: dict[str, State] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        engines[way] = make("batched" if way == "batched" else "sequential", experiment, device)
        states[way] = loop.begin(experiment, engines[way])
    start = time.perf_counter()
    for turn in range(end - 1):
        if turn >= WARMUP + rounds and time.perf_counter() - start > LEAST:
            break
        for way, threads in ways.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            states[way], _ = loop.play(experiment, engines[way], states[way])
            seconds[way].append(time.perf_counter() - began)
    torch.set_num_threads(most)
    taken = {way: float(np.median(some[WARMUP:])) for way, some in seconds.items()}
    plain = min(list(ways)[:-1], key=taken.__getitem__)
    batched = engines["batched"]
    assert isinstance(batched, Batched)
    families = [type(family.backend).__name__.lower() for family in batched.families]
    return {
        "system": "rota-batched",
        "model": name,
        "seconds_per_round": taken["batched"],
        "accuracy": batched.evaluate(states["batched"].models)[0].accuracy,
        "plain_seconds": taken[plain],
        "plain": plain,
        "ratio": taken[plain] / taken["batched"],
        "how": families[0] if families else "one by one",
    }
