"""Block sizes for the Triton kernels, measured on the GPU that is there.

    python benchmarks/tune_kernels.py                         # every case
    python benchmarks/tune_kernels.py "cnn" --precision bf16  # some cases, in another precision

A case is a layer of one of the benchmarks' networks, with the number of clients that train it at
once. For each case the script prints the floor (the time of moving weights and images through
memory), the time at the sizes that rota uses, and the times at the best sizes. Kernels are compiled
beforehand, on all cores. Enter what you find by hand in the functions `_..._blocks` in
src/rota/engine/kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rota.engine.kernels import common, convolutions, filters, linears

BANDWIDTH = 4.3e12
"""Bytes per second of one H200's memory."""
Config = tuple[int, ...]
Launch = Callable[[Config | None], torch.Tensor]
Make = Callable[[int, torch.dtype], tuple[Launch, float]]


@dataclass(frozen=True)
class Case:
    """A layer, the number of rows, and the block sizes to try.

    `make` returns a function that launches the kernel, and the bytes that it must move.
    """

    name: str
    rows: int
    make: Make
    configs: list[Config]


def _parameters(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear layer's weight and bias for each row, as views of padded rows of parameters."""
    size = -(-(inputs + 1) * outputs // 64) * 64
    theta = torch.randn(rows, size, device="cuda") / inputs**0.5
    weights = inputs * outputs
    weight = theta[:, :weights].view(rows, outputs, inputs)
    return weight, theta[:, weights : weights + outputs]


def forward(batch: int, inputs: int, outputs: int) -> Make:
    def make(rows: int, dtype: torch.dtype) -> tuple[Launch, float]:
        weight, bias = _parameters(rows, inputs, outputs)
        x = torch.randn(rows, batch, inputs, device="cuda", dtype=dtype)

        def launch(config: Config | None) -> torch.Tensor:
            return linears._forward(x, weight, bias, True, config)

        return launch, weight.numel() * 4

    return make


def backward(batch: int, inputs: int, outputs: int, wanted: bool = True) -> Make:
    def make(rows: int, dtype: torch.dtype) -> tuple[Launch, float]:
        weight, bias = _parameters(rows, inputs, outputs)
        x, dy = (torch.randn(rows, batch, n, device="cuda", dtype=dtype) for n in (inputs, outputs))
        dy *= 1e-6

        def launch(config: Config | None) -> torch.Tensor:
            return linears._backward(dy, x, weight, 1.0, wanted, weight, bias, True, config)

        return launch, weight.numel() * 8

    return make


@dataclass(frozen=True)
class Image:
    """A convolution. `pool`: it is pooled. `last`: its input has the channels last in memory."""

    batch: int
    channels: int
    side: int
    outputs: int
    kernel: int
    padding: int
    pool: bool
    last: bool

    @property
    def out(self) -> int:
        return self.side + 2 * self.padding - self.kernel + 1

    def x(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        channels, side = self.channels, self.side
        if not self.last:
            return torch.randn(rows, self.batch, channels, side, side, device="cuda").to(dtype)
        x = torch.randn(rows, self.batch, side, side, channels, device="cuda").to(dtype)
        return x.permute(0, 1, 4, 2, 3)

    def dy(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (rows, self.batch, self.out, self.out, self.outputs)
        return torch.randn(shape, device="cuda").to(dtype).permute(0, 1, 4, 2, 3)

    def convolve(self, rows: int, dtype: torch.dtype) -> tuple[Launch, float]:
        x, depth = self.x(rows, dtype), self.channels * self.kernel**2
        kind = dtype if self.last else torch.float32
        w = torch.randn(rows, self.outputs, depth, device="cuda").to(kind)
        bias = torch.randn(rows, self.outputs, device="cuda")
        out = [self.out // 2 if self.pool else self.out] * 2
        y = convolutions._images(x, self.outputs, out, self.pool and self.last)
        more = {"size": [self.kernel] * 2, "by_tap": self.last, "relu": True, "pool": self.pool}
        padding = [self.padding] * 2

        def launch(config: Config | None) -> torch.Tensor:
            return convolutions._convolve(x, w, bias, [1, 1], padding, y, **more, config=config)

        return launch, (x.numel() + y.numel()) * x.element_size()

    def back(self, rows: int, dtype: torch.dtype) -> tuple[Launch, float]:
        x, dy = self.x(rows, dtype), self.dy(rows, dtype)
        w = torch.randn(rows, self.channels, self.outputs * self.kernel**2, device="cuda").to(dtype)
        dx, around = torch.empty_like(x), [self.kernel - 1 - self.padding] * 2
        more = {"size": [self.kernel] * 2, "by_tap": True, "gate": x}

        def launch(config: Config | None) -> torch.Tensor:
            return convolutions._convolve(dy, w, None, [1, 1], around, dx, **more, config=config)

        return launch, (2 * x.numel() + dy.numel()) * x.element_size()

    def weights(self, rows: int, dtype: torch.dtype) -> tuple[Launch, float]:
        x, dy, which = self.x(rows, dtype), self.dy(rows, dtype), None
        if self.pool and not self.last:
            dy = dy[:, :, :, ::2, ::2]
            places = torch.randint(0, 4, dy.permute(0, 1, 3, 4, 2).shape, device="cuda")
            which = places.to(torch.uint8).permute(0, 1, 4, 2, 3)
            dy = common.laid_as(which, dy)
        sizes = ([self.kernel] * 2, [1, 1], [self.padding] * 2)

        def launch(config: Config | None) -> torch.Tensor:
            return filters.weight_gradient(x, dy, *sizes, which, config)

        return launch, (x.numel() + dy.numel()) * x.element_size()


def product(*choices: tuple[int, ...]) -> list[Config]:
    return list(itertools.product(*choices))


FORWARD = product((32, 64, 128), (64, 128), (4,), (2, 3, 4))
BACKWARD = [
    *product((32, 64, 128), (32, 64, 128), (4,), (1, 2)),
    *product((16, 32), (128, 256), (4, 8), (2, 3)),
]
POOLED = [
    *product((64, 128), (64,), (32,), (4, 8), (1, 2)),
    *product((64,), (32, 64), (32,), (4,), (2, 3)),
]
CONVOLVE = [
    *product((64, 128, 256), (32,), (32, 64), (4, 8), (1,)),
    *product((64, 128), (32,), (32,), (4, 8), (3,)),
]
THIN = product((32, 64, 128, 256), (32,), (32,), (2, 4, 8), (1,))
WEIGHTS = [
    *product((64,), (32,), (32,), (1, 2), (1, 2, 3), (4, 8)),
    *product((32,), (32,), (32,), (1, 2, 4), (1, 3), (4,)),
]
THIN_WEIGHTS = product((32,), (32,), (32, 64, 128), (2, 4), (1,), (8, 32))

PFL1, PFL2 = Image(10, 3, 32, 32, 3, 0, False, False), Image(10, 32, 30, 64, 3, 0, True, True)
CNN1, CNN2 = Image(10, 1, 28, 32, 5, 2, True, False), Image(10, 32, 14, 64, 5, 2, True, True)
WIDE1, WIDE2 = Image(600, 1, 28, 32, 5, 2, True, False), Image(600, 32, 14, 64, 5, 2, True, True)


def images(name: str, rows: int, first: Image, second: Image) -> Iterator[Case]:
    yield Case(f"{name} conv1", rows, first.convolve, THIN)
    yield Case(f"{name} conv2", rows, second.convolve, POOLED)
    yield Case(f"{name} conv2 input", rows, second.back, CONVOLVE)
    yield Case(f"{name} conv2 weights", rows, second.weights, WEIGHTS)
    yield Case(f"{name} conv1 weights", rows, first.weights, THIN_WEIGHTS)


CASES = [
    Case("2nn fc1", 100, forward(10, 784, 200), FORWARD),
    Case("2nn fc2", 100, forward(10, 200, 200), FORWARD),
    Case("2nn fc1 backward", 100, backward(10, 784, 200, False), BACKWARD),
    Case("2nn fc2 backward", 100, backward(10, 200, 200), BACKWARD),
    Case("cnn fc1", 100, forward(10, 3136, 512), FORWARD),
    Case("cnn fc1 backward", 100, backward(10, 3136, 512), BACKWARD),
    *images("cnn", 100, CNN1, CNN2),
    Case("pfl fc1", 50, forward(10, 12544, 128), FORWARD),
    Case("pfl fc1 backward", 50, backward(10, 12544, 128), BACKWARD),
    *images("pfl", 50, PFL1, PFL2),
    *images("wide", 10, WIDE1, WIDE2),
]


def prepare(precision: str) -> torch.dtype:
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def compile_some(share: tuple[list[tuple[int, Config]], str]) -> None:
    """Run each configuration once on two rows, which leaves its code in Triton's cache.

    This runs in a process of its own.
    """
    jobs, precision = share
    dtype = prepare(precision)
    held: dict[int, Launch] = {}
    for case, config in jobs:
        if case not in held:
            held = {case: CASES[case].make(2, dtype)[0]}
        try:
            held[case](config)
        except Exception:  # it needs too much shared memory, or the size does not fit
            continue


def seconds(launch: Launch, config: Config | None, repeats: int = 10) -> float:
    """The seconds of one launch, among several in a CUDA graph, where launching costs little."""
    launch(config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch(config)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def tune(case: Case, dtype: torch.dtype) -> tuple[float, float, list[tuple[float, Config]]]:
    """The floor, the time at rota's own sizes, and all times, the best first."""
    launch, moved = case.make(case.rows, dtype)
    found = []
    for config in case.configs:
        try:
            found.append((seconds(launch, config), config))
        except Exception:
            torch.cuda.synchronize()
    return moved / BANDWIDTH, seconds(launch, None), sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "only cases whose names contain this word, or one of several, separated by commas"
    parser.add_argument("word", nargs="?", default="", help=words)
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="tf32")
    parser.add_argument("--out", type=Path, help="a file for all times, as JSON")
    given = parser.parse_args()
    words = given.word.split(",")
    chosen = [at for at, case in enumerate(CASES) if any(word in case.name for word in words)]
    processes = max(1, len(os.sched_getaffinity(0)) - 1)
    jobs = [(at, config) for at in chosen for config in CASES[at].configs]
    shares = [(jobs[start::processes], given.precision) for start in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_some, shares)
    dtype = prepare(given.precision)
    everything = {}
    print(f"{given.precision:24}{'floor':>8}{'now':>8}{'best':>8}  microseconds", flush=True)
    for at in chosen:
        floor, now, found = tune(CASES[at], dtype)
        everything[CASES[at].name] = {"now": now, "all": found}
        best = "  ".join(f"{time * 1e6:.1f} {config}" for time, config in found[:4])
        times = f"{floor * 1e6:8.1f}{now * 1e6:8.1f}{found[0][0] * 1e6:8.1f}"
        print(f"{CASES[at].name:24}{times}  {best}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(everything) + "\n")


if __name__ == "__main__":
    sys.exit(main())
