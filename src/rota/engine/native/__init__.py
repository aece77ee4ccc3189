"""Local training on a CPU without Python in its loop: a traced step as instructions for a small C library, a client a core.

Operators on a mini-batch of ten take a few microseconds each, as long as their calls from Python; here a client's whole local work is one
call, which also leaves the interpreter's lock alone, so that all cores work. Products are made for few examples, and convolutions take
fewer multiplications than their definition (convolution.h). A client's numbers depend on nobody beside it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota import rng, weights
from rota.arrays import Array
from rota.engine.native.build import (
    LABEL_OUTSIDE,
    ROW,
    TOKEN_OUTSIDE,
    UNTRAINED,
    Unavailable,
    Work,
    library,
)
from rota.engine.native.program import (
    BUFFERS,
    GRADIENT,
    KEY,
    LOSS,
    NUMBER,
    PARAMS,
    WEIGHT,
    Place,
    Unsupported,
    Writer,
    X,
    Y,
)
from rota.engine.native.translate import translate
from rota.engine.rules import Unbatchable
from rota.engine.stack import Steps, half, repeated, same_gradient

__all__ = ["ROW", "Native", "Result", "Unavailable", "Unsupported", "verify"]


@dataclass(frozen=True)
class Result:
    """What some rows' training gave. A row with a reason failed: its update is 0 and its loss NaN."""

    update: Tensor
    buffers: Tensor
    loss: Array
    reason: list[str]


class Native:
    """One task's step for rota.c. Raises Unsupported or Unavailable where it cannot be made."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.lib = library(steps.dtype)
        self.works: dict[tuple[int, bool], Work] = {}
        self.spare: list[Array] = []
        self.x, self.y = (part.contiguous() for part in (steps.x, steps.y))
        for part in (self.x, self.y):
            if part.dtype not in (steps.dtype, torch.int64):
                raise Unsupported(f"data of {part.dtype}")

    def work(self, width: int, fused: bool) -> Work:
        """The program of a step on mini-batches of this width."""
        if (width, fused) not in self.works:
            self.works[width, fused] = self._make(width, fused)
        return self.works[width, fused]

    def _make(self, width: int, fused: bool) -> Work:
        steps, task = self.steps, self.steps.task
        graph = steps.single(width, fused)
        real = torch.empty(0, dtype=steps.dtype, device="meta")
        word = torch.empty((), dtype=torch.int64, device="meta")
        params, buffers = (
            torch.empty(layout.numel, dtype=steps.dtype, device="meta")
            for layout in (steps.params, steps.buffers)
        )
        inputs = [Place(PARAMS, 0, view) for view in steps.params.views(params)]
        inputs += [Place(BUFFERS, 0, view) for view in steps.buffers.views(buffers)]
        inputs += [
            Place(where, 0, part.new_empty((width, *part.shape[1:]), device="meta"))
            for where, part in ((X, self.x), (Y, self.y))
        ]
        inputs += [
            Place(WEIGHT, 0, real.new_empty(width)),
            Place(KEY, 0, word),
            Place(NUMBER, 0, word),
            Place(LOSS, 0, real.new_empty(())),
        ]
        if not fused:
            inputs += [Place(GRADIENT, 0, view) for view in steps.params.views(params)]

        def space(shape: object) -> int:
            return int(self.lib.rota_convolution_space((ctypes.c_int64 * 16)(*shape)))  # type: ignore[misc]

        program = translate(graph, inputs, Writer(steps.dtype, space, self.lib.rota_product_space))
        constants = ctypes.create_string_buffer(program.constants, max(1, len(program.constants)))
        work = Work(
            list=program.list, count=len(program.list), arena=program.arena, width=width, params=steps.params.numel,
            buffers=steps.buffers.numel, x_bytes=self.x[0].nbytes, y_bytes=self.y[0].nbytes, fused=fused,
            constants=ctypes.cast(constants, ctypes.c_void_p), momentum=task.momentum, weight_decay=task.weight_decay, prox=task.prox,
            clip=-1.0 if task.clip is None else task.clip, nesterov=task.nesterov, adam=task.optimizer == "adam",
        )  # fmt: skip
        work.keep = program.list, constants  # what the pointers lead to
        return work

    def room(self, rows: int, columns: int) -> Tensor:
        """Memory for results: that of earlier ones which nobody holds any more, since fresh memory costs as much time as a local step."""
        size = rows * columns
        base = self.spare.pop() if self.spare else np.empty(0)
        if len(base) < size:
            base = torch.empty(size, dtype=self.steps.dtype).numpy()
        part = base[:size]
        weakref.finalize(part, self.spare.append, base).atexit = False  # the tensor holds `part`
        return torch.from_numpy(part).view(rows, columns)

    def start(
        self,
        threads: Executor,
        workers: int,
        width: int,
        plain: bool,
        rows: Array,
        starts: Tensor,
        buffers: Tensor,
        shift: Tensor | None,
    ) -> Callable[[], Result]:
        """Begin to train rows (a ROW array), those with the most work first; what is returned waits for the result.

        rows["start"] says which of the models in `starts` and `buffers` each begins with; `shift` is added to its gradients.
        `plain` takes steps of plain SGD, whatever the task says.
        """
        number, layout = len(rows), self.steps
        update = self.room(number, layout.params.numel)
        after = torch.empty(number, layout.buffers.numel, dtype=layout.dtype)
        rows["start_buffers"] = _addresses(buffers, rows["start"])
        rows["start"] = _addresses(starts, rows["start"])
        rows["update"], rows["buffers"] = (
            _addresses(out, np.arange(number)) for out in (update, after)
        )
        rows["status"] = UNTRAINED
        rows["shift"] = 0 if shift is None else _addresses(shift, np.arange(number))
        work, taken = self.work(width, plain), ctypes.c_int64(0)
        call = (
            ctypes.byref(work),
            rows.ctypes.data,
            number,
            ctypes.byref(taken),
            self.x.data_ptr(),
            self.y.data_ptr(),
        )
        held = work, taken, rows, starts, buffers, shift, update, after

        def run() -> None:
            """Some of the rows; what they read and write stays as long as this runs, even if nobody waits for it."""
            _ = self.lib.rota_train(*call), held

        done = [threads.submit(run) for _ in range(min(workers, number))]

        def finish() -> Result:
            for each in done:  # all of them, before anything is read
                each.result()
            if (rows["status"] == UNTRAINED).any():
                raise MemoryError(
                    "no memory for a client's local training: fewer cores need less (taskset, or --engine sequential)"
                )
            return Result(update, after, rows["loss"].copy(), reasons(rows))

        return finish


OUTSIDE = {
    TOKEN_OUTSIDE: "a token is outside the embedding",
    LABEL_OUTSIDE: "a label is outside the model's outputs",
}


def reasons(rows: Array) -> list[str]:
    """Why each row (of a ROW array) failed; empty where it did not."""
    columns = (rows[name].tolist() for name in ("status", "value", "size"))
    return [
        f"{OUTSIDE[status]}: {value} is not in 0..{size - 1}" if status in OUTSIDE else ""
        for status, value, size in zip(*columns, strict=True)
    ]


def _addresses(matrix: Tensor, rows: Array) -> Array:
    return matrix.data_ptr() + rows.astype(np.uintp) * matrix.shape[1] * matrix.itemsize


def verify(native: Native, width: int) -> None:
    """Compare one step, half of it padding, with plain autograd; raises Unbatchable where they differ."""
    steps, key, real = (
        native.steps,
        torch.zeros((), dtype=torch.int64),
        min(half(width), len(native.y)),
    )
    start = weights.read(steps.module)
    rows = np.zeros(1, ROW)
    for name, value in {
        "examples": real,
        "batch": width,
        "per_epoch": 1,
        "steps": 1,
        "rate": 1.0,
    }.items():
        rows[name] = value

    def trial(number: int) -> None:
        first = min(width + number * real, len(native.y) - real)  # not what it was traced on
        rows["first"] = first
        with ThreadPoolExecutor(1) as thread:
            result = native.start(
                thread, 1, width, True, rows.copy(), start.params[None], start.buffers[None], None
            )()
        if result.reason[0]:
            raise Unbatchable(result.reason[0])
        same_gradient(steps, result.update, first + rng.permutation(rng.fold(key, 0), real), key)

    repeated(trial)
