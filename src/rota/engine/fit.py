"""How many rows to put in one stack: on a GPU as many as fit its memory, on a CPU as many as are fastest."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from pathlib import Path

import torch

from rota.engine.stack import Stack, Steps

CANDIDATES = (1, 4, 16, 64, 256)
BYTES = 1 << 30  # the most that one stack on a CPU may hold in parameters


def _one_step(steps: Steps, rows: int, width: int) -> Stack:
    """A stack after one step on the first examples."""
    stack = Stack(steps, rows, width, steps.plain)
    index = torch.zeros(rows, width, dtype=torch.int64, device=steps.x.device)
    weight = torch.zeros(rows, width, dtype=steps.dtype, device=steps.x.device)
    stack.advance(rows, steps.x[index], steps.y[index], weight)
    return stack


def rows_that_fit(steps: Steps, width: int) -> int:
    """The rows that fit into most of the GPU's free memory, from what two rows take."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _one_step(steps, 2, width)
    torch.cuda.synchronize()
    each = max(1, (torch.cuda.max_memory_allocated() - before) // 2)
    free, _ = torch.cuda.mem_get_info()
    return max(1, int(0.6 * free / each))


def best_rows(steps: Steps, width: int) -> int:
    """The fastest of some stack sizes, by a short calibration that is kept for this machine and network.

    Small networks are bound by the calls of operators, which a stack shares; large ones by the cache, which a stack overflows.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rota" / "calibration.json"
    task = steps.task
    network = hashlib.sha256(f"{steps.module} {steps.params.shapes} {tuple(steps.x.shape[1:])} {task.optimizer}".encode()).hexdigest()[:16]
    name = f"{platform.node()} {platform.machine()} torch {torch.__version__} network {network} batch {width}"
    known = _read(path)
    if name not in known:
        known = {**_read(path), name: _measure(steps, width)}
        _write(path, known)
    return known[name]


def _measure(steps: Steps, width: int) -> int:
    best, fastest = 1, float("inf")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows in CANDIDATES:
            if rows > 1 and rows * steps.params.numel * steps.dtype.itemsize > BYTES:
                break
            stack = _one_step(steps, rows, width)
            index = torch.zeros(rows, width, dtype=torch.int64)
            x, y, weight = steps.x[index], steps.y[index], torch.zeros(rows, width, dtype=steps.dtype)
            seconds = []
            for _ in range(5):
                began = time.perf_counter()
                stack.advance(rows, x, y, weight)
                seconds.append(time.perf_counter() - began)
            each = min(seconds) / rows
            if each > 0.9 * fastest:
                break
            best, fastest = rows, each
    finally:
        torch.set_num_threads(threads)
    return best


def _read(path: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: dict[str, int]) -> None:
    """Keep the calibration where that is possible; without, it is only done again."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(known, indent=1) + "\n")
        os.replace(aside, path)
    except OSError:
        return
