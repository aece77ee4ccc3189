"""What the peers' scripts share: the prepared work, its networks in torch, and the printed line.

A script is called as `python SCRIPT FOLDER WAY`. FOLDER holds the same arrays for every system:
the clients' examples, the cohort of each round, and the weights of round 0. WAY says how the system
uses the cores; systems.py has its words. This file must work where only numpy and the peer are
installed, so it imports torch in the functions that need it.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Prepared:
    """A work on disk.

    Client i's examples are rows offsets[i]:offsets[i+1] of x and y. cohorts[t] are the clients of
    round t.
    """

    x: Array
    y: Array
    offsets: Array
    test_x: Array
    test_y: Array
    cohorts: Array
    start: list[Array]
    model: str
    classes: int
    batch: int
    epochs: int
    lr: float
    warmup: int
    device: str
    seed: int

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    def rows(self, client: int) -> slice:
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))


@functools.cache
def load(folder: str) -> Prepared:
    """Read a work, once per process, however often a worker of Ray asks.

    The arrays are mapped, so processes share their memory.
    """
    arrays = {}
    for name in ("x", "y", "offsets", "test_x", "test_y", "cohorts"):
        arrays[name] = np.load(Path(folder) / f"{name}.npy", mmap_mode="c")
    with np.load(Path(folder) / "start.npz") as held:
        start = [held[name] for name in sorted(held.files)]
    numbers = json.loads((Path(folder) / "work.json").read_text())
    return Prepared(**arrays, start=start, **numbers)


def report(work: Prepared, ends: list[float], score: tuple[float, float], version: str) -> None:
    """Print the result.

    `ends` are the times at which the rounds ended, including warm-up rounds. `score` is the
    accuracy and the loss.
    """
    seconds = np.diff(ends)[work.warmup - 1 :]
    assert len(ends) == len(work.cohorts)
    line = {
        "seconds_per_round": float(np.median(seconds)),
        "seconds": seconds.tolist(),
        "accuracy": score[0],
        "loss": score[1],
    }
    print(json.dumps({**line, "version": version}), flush=True)


def now(device: str) -> float:
    """The time when the device has finished all its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def network(work: Prepared) -> nn.Module:
    """The work's network with the weights of round 0, as a user of torch writes it."""
    import torch
    from torch import nn

    shape = work.x.shape[1:]
    if work.model == "logistic":
        inputs = int(np.prod(shape))
        module: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(inputs, work.classes))
    elif work.model == "two_nn":
        inputs = int(np.prod(shape))
        module = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, 200),
            nn.ReLU(),
            nn.Linear(200, 200),
            nn.ReLU(),
            nn.Linear(200, work.classes),
        )
    elif work.model == "cnn":
        flat = 64 * (shape[1] // 4) * (shape[2] // 4)
        module = nn.Sequential(
            nn.Conv2d(shape[0], 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, 512),
            nn.ReLU(),
            nn.Linear(512, work.classes),
        )
    elif work.model == "pfl_cnn":
        flat = 64 * ((shape[1] - 4) // 2) * ((shape[2] - 4) // 2)
        module = nn.Sequential(
            nn.Conv2d(shape[0], 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(flat, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, work.classes),
        )
    elif work.model == "lenet":
        flat = 16 * ((shape[1] // 2 - 4) // 2) * ((shape[2] // 2 - 4) // 2)
        module = nn.Sequential(
            nn.Conv2d(shape[0], 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, work.classes),
        )
    elif work.model == "resnet8":
        module = _residual(shape[0], work.classes)
    elif work.model == "lstm_shakespeare":
        module = _letters(work.classes)
    elif work.model == "transformer":
        module = _attentive(shape[0], work.classes)
    else:
        raise ValueError(f"no network '{work.model}'")
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), work.start, strict=True):
            parameter.copy_(torch.from_numpy(value))
    return module


def _letters(classes: int) -> nn.Module:
    import torch.nn.functional as F
    from torch import nn

    class Letters(nn.Module):
        """One-hot letters, two of torch's fused LSTM layers of 128 units, the next letter."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(classes, 128, num_layers=2, batch_first=True)
            self.out = nn.Linear(128, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.lstm(F.one_hot(x, classes).float())
            return self.out(hidden[:, -1])  # type: ignore[no-any-return]

    return Letters()


def _residual(colours: int, classes: int) -> nn.Module:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            self.norm1 = nn.GroupNorm(2, outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            self.norm2 = nn.GroupNorm(2, outputs)
            self.skip = nn.Sequential()
            if stride > 1:
                narrow = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                self.skip = nn.Sequential(narrow, nn.GroupNorm(2, outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.relu(self.norm1(self.conv1(x)))
            return torch.relu(self.norm2(self.conv2(out)) + self.skip(x))

    return nn.Sequential(
        nn.Conv2d(colours, 16, 3, padding=1, bias=False),
        nn.GroupNorm(2, 16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def _attentive(length: int, classes: int, width: int = 128, heads: int = 4) -> nn.Module:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(width)
            self.inputs = nn.Linear(width, 3 * width)
            self.outputs = nn.Linear(width, width)
            self.norm2 = nn.LayerNorm(width)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, time, _ = x.shape
            parts = self.inputs(self.norm1(x)).view(n, time, 3, heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = parts
            heard = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.outputs(heard.transpose(1, 2).reshape(n, time, -1))
            return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    class Letters(nn.Module):
        """GPT-2 in small: the logits of the next letter."""

        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.empty(length, width))
            self.character = nn.Embedding(classes, width)
            self.blocks = nn.Sequential(Block(), Block())
            self.norm = nn.LayerNorm(width)
            self.out = nn.Linear(width, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks(self.character(x) + self.position)
            return self.out(self.norm(hidden)[:, -1])  # type: ignore[no-any-return]

    return Letters()


def train(module: nn.Module, x: torch.Tensor, y: torch.Tensor, work: Prepared) -> None:
    """A client's local work: `epochs` passes of plain SGD in shuffled mini-batches."""
    import torch
    import torch.nn.functional as F

    optimiser = torch.optim.SGD(module.parameters(), lr=work.lr)
    module.train()
    for _ in range(work.epochs):
        for batch in torch.randperm(len(y), device=y.device).split(work.batch):
            optimiser.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimiser.step()


def score(module: nn.Module, work: Prepared) -> tuple[float, float]:
    """The accuracy on the test examples, and their mean loss."""
    import torch
    import torch.nn.functional as F

    module.eval()
    hits, loss = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(work.test_y), 1000):
            rows = slice(start, start + 1000)
            x = torch.from_numpy(work.test_x[rows]).to(work.device)
            y = torch.from_numpy(work.test_y[rows]).to(work.device)
            outputs = module(x)
            hits += int((outputs.argmax(-1) == y).sum())
            loss += float(F.cross_entropy(outputs, y, reduction="sum"))
    return hits / len(work.test_y), loss / len(work.test_y)
