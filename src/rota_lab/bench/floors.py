"""What the machine can do at best: its measured rates, and the least time for a round at them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rota.arrays import Array
from rota.engine.machine import cores
from rota.engine.native.build import Unavailable, library
from rota_lab.bench.works import Size

TRIES = 25
"""How often a rate is measured on a CPU. A core may be busy with something else for a while."""


@dataclass(frozen=True)
class Rates:
    """The device's FLOP/s in large matrix products, and bytes/s (read and written) in copies."""

    flops: float
    bytes: float
    precision: str


@dataclass(frozen=True)
class Floors:
    """The least seconds per round, if only products, or only the weights' traffic, took time."""

    arithmetic: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory)


def measure_rates(device: str) -> Rates:
    """Measure the device: the best of several tries, since a floor is the best that is possible."""
    if device == "cuda":
        return _rates_of_gpu()
    side, copied = 1024, 1 << 26
    with ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        a, b = torch.rand(2, side, side)
        flops = 2.0 * side**3 / _best(threads, lambda: torch.mm(a, b))
        flops = max(flops, _own_products(threads))
        sources = [torch.ones(copied // 4) for _ in range(2 * cores())]
        pairs = list(zip(sources[::2], sources[1::2], strict=True))
        bandwidth = _best(threads, *[lambda to=to, of=of: to.copy_(of) for to, of in pairs])
    return Rates(flops * cores(), 2.0 * copied * cores() / bandwidth, "float32")


def _own_products(threads: ThreadPoolExecutor) -> float:
    """A core's FLOP/s in products of rota's C library; 0 if there is none.

    torch's own library may leave half of what a processor can do unused.
    """
    try:
        lib = library(torch.float32)
    except Unavailable:
        return 0.0
    m, n, k = 960, 512, 128
    a, b = torch.rand(m, k), torch.rand(k, n)
    free = [torch.empty(m * n + lib.rota_product_space(m, n)) for _ in range(cores())]
    places = [(each.data_ptr(), each[m * n :].data_ptr()) for each in free]
    jobs = [
        lambda c=c, space=space: lib.rota_product(m, n, k, a.data_ptr(), b.data_ptr(), c, space)
        for c, space in places
    ]
    return 2.0 * m * n * k / _best(threads, *jobs)


def _best(threads: ThreadPoolExecutor, *jobs: Callable[[], object]) -> float:
    """The least seconds in which every core does its job. A single job is done by all cores."""
    jobs = jobs * (cores() if len(jobs) == 1 else 1)
    tries = []
    for _ in range(TRIES):
        began = time.perf_counter()
        for future in [threads.submit(job) for job in jobs]:
            future.result()
        tries.append(time.perf_counter() - began)
    return min(tries)


def _rates_of_gpu() -> Rates:
    """In TF32, in which the fastest systems compute single precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        a, b = torch.rand(2, 8192, 8192, device="cuda")
        flops = _best_gpu(lambda: torch.mm(a, b))
        source, target = torch.ones(2, 1 << 28, device="cuda")
        bandwidth = _best_gpu(lambda: target.copy_(source))
    finally:
        torch.set_float32_matmul_precision(before)
    return Rates(2.0 * 8192**3 / flops, 2.0 * source.nbytes / bandwidth, "TF32")


def _best_gpu(job: Callable[[], object]) -> float:
    tries: list[float] = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        job()
        end.record()
        torch.cuda.synchronize()
        tries.append(begin.elapsed_time(end) / 1e3)
    return min(tries)


def traffic(size: Size) -> Array:
    """The least bytes per round.

    Every local step reads and writes the weights once, and reads its examples once.
    """
    return np.asarray(size.steps * size.params * 4 * 2 + size.examples * size.example_bytes)


def lowest(size: Size, rates: Rates) -> Floors:
    """The floors of a work on a machine with these rates."""
    arithmetic = float(np.median(size.flops)) / rates.flops
    return Floors(arithmetic, float(np.median(traffic(size))) / rates.bytes)
