"""Local training on a CPU without Python in its loop.

A traced step becomes instructions for a small C library, which trains one client per core. An
operator on a mini-batch of ten takes a few microseconds, as long as its call from Python. Here the
whole local training of some clients is one call, which also releases the interpreter's lock. A
client's numbers do not depend on the other clients of the call.
"""

from __future__ import annotations

import copy
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
from rota.engine.native.build import Unavailable, library
from rota.engine.native.program import Place, Unsupported, Writer
from rota.engine.native.structures import (
    BUFFERS,
    GRADIENT,
    KEY,
    LABEL_OUTSIDE,
    LOSS,
    NUMBER,
    PARAMS,
    ROW,
    TOKEN_OUTSIDE,
    UNTRAINED,
    WEIGHT,
    Program,
    X,
    Y,
)
from rota.engine.native.translate import translate
from rota.engine.rules import Unbatchable
from rota.engine.steps import Steps
from rota.engine.trials import half, repeated, same_step

__all__ = ["ROW", "Native", "Result", "Unavailable", "Unsupported", "verify"]

OUTSIDE = {
    TOKEN_OUTSIDE: "a token is outside the embedding",
    LABEL_OUTSIDE: "a label is outside the model's outputs",
}


@dataclass(frozen=True)
class Result:
    """The results of rows. A row with a reason failed: its update is 0, and its loss is NaN."""

    update: Tensor
    buffers: Tensor
    loss: Array
    reason: list[str]


class Native:
    """One task's step for rota.c. Raises Unsupported or Unavailable if there is none."""

    def __init__(self, steps: Steps, spare: list[Array] | None = None) -> None:
        self.steps, self.spare = steps, [] if spare is None else spare
        self.lib = library(steps.dtype)
        self.programs: dict[tuple[int, bool], Program] = {}
        self.x, self.y = (part.contiguous() for part in (steps.x, steps.y))
        for part in (self.x, self.y):
            if part.dtype not in (steps.dtype, torch.int64):
                raise Unsupported(f"data of {part.dtype}")
        for held in (*steps.module.parameters(), *steps.module.buffers()):
            if held.is_floating_point() and held.dtype != steps.dtype:
                raise Unsupported(f"a model of {steps.dtype} and {held.dtype}")

    def program(self, width: int, fused: bool) -> Program:
        """The program of a step on mini-batches of this width."""
        if (width, fused) not in self.programs:
            self.programs[width, fused] = self._make(width, fused)
        return self.programs[width, fused]

    def _make(self, width: int, fused: bool) -> Program:
        steps, task = self.steps, self.steps.task
        writer = Writer(steps.dtype, self._space, self.lib.rota_product_space)
        code = translate(steps.single(width, fused), self._inputs(width, fused), writer)
        constants = ctypes.create_string_buffer(code.constants, max(1, len(code.constants)))
        program = Program(
            list=code.list,
            count=len(code.list),
            arena=code.arena,
            width=width,
            params=steps.params.numel,
            buffers=steps.buffers.numel,
            x_bytes=self.x[0].nbytes,
            y_bytes=self.y[0].nbytes,
            fused=fused,
            constants=ctypes.cast(constants, ctypes.c_void_p),
            momentum=task.momentum,
            weight_decay=task.weight_decay,
            prox=task.prox,
            clip=-1.0 if task.clip is None else task.clip,
            local_decay=task.lr_local_decay,
            nesterov=task.nesterov,
            adam=task.optimizer in ("adam", "adamw"),
            decoupled=task.optimizer == "adamw",
            touched=code.touched.ctypes.data,
        )
        program.keep = code, constants  # the pointers lead to these
        return program

    def _space(self, shape: object) -> int:
        numbers = (ctypes.c_int64 * 16)(*shape)  # type: ignore[misc]
        return int(self.lib.rota_convolution_space(numbers))

    def _inputs(self, width: int, fused: bool) -> list[Place]:
        """Where the inputs of a step lie."""
        steps = self.steps
        real = torch.empty(0, dtype=steps.dtype, device="meta")
        word = torch.empty((), dtype=torch.int64, device="meta")
        params = steps.params.views(real.new_empty(steps.params.numel))
        buffers = steps.buffers.views(real.new_empty(steps.buffers.numel))
        examples = [(X, self.x), (Y, self.y)]
        inputs = [Place(PARAMS, 0, view) for view in params]
        inputs += [Place(BUFFERS, 0, view) for view in buffers]
        for space, part in examples:
            like = part.new_empty((width, *part.shape[1:]), device="meta")
            inputs.append(Place(space, 0, like))
        inputs += [
            Place(WEIGHT, 0, real.new_empty(width)),
            Place(KEY, 0, word),
            Place(NUMBER, 0, word),
            Place(LOSS, 0, real.new_empty(())),
        ]
        return inputs if fused else [*inputs, *(Place(GRADIENT, 0, view) for view in params)]

    def room(self, rows: int, columns: int) -> Tensor:
        """Memory for results: that of earlier results which nobody holds any more.

        Fresh memory would cost as much time as a local step.
        """
        size = rows * columns * self.steps.dtype.itemsize
        order = sorted(range(len(self.spare)), key=lambda at: len(self.spare[at]))
        fits = [at for at in order if len(self.spare[at]) >= size]
        base = self.spare.pop([*fits, *order[-1:]][0]) if order else np.empty(0, np.uint8)
        if len(base) < size:
            base = torch.empty(size, dtype=torch.uint8).numpy()
        part = base[:size]
        weakref.finalize(part, self.spare.append, base).atexit = False  # the tensor holds `part`
        return torch.from_numpy(part).view(self.steps.dtype).view(rows, columns)

    def start(
        self,
        threads: Executor,
        workers: int,
        width: int,
        plain: bool,
        rows: Array,
        starts: Tensor,
        buffers: Tensor,
        shift: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Callable[[], Result]:
        """Begin to train rows (a ROW array, most steps first), and return what waits for them.

        rows["start"] says which of the models in `starts` and `buffers` each row begins with.
        `shift` and `anchor` have one line per row: `shift` is added to its gradients, and the
        proximal term pulls to `anchor` (None: to the row's start). `plain` takes steps of plain
        SGD, whatever the task says.
        """
        self._check(rows, width)
        number, params = len(rows), self.steps.params.numel
        update = self.room(number, params)
        after = torch.empty(number, self.steps.buffers.numel, dtype=self.steps.dtype)
        each, first = np.arange(number), rows["start"].astype(np.int64)
        for name, matrix, lines in (
            ("start", starts, first),
            ("start_buffers", buffers, first),
            ("update", update, each),
            ("buffers", after, each),
            ("shift", shift, each),
            ("anchor", anchor, each),
        ):
            columns = after.shape[1] if "buffers" in name else params
            rows[name] = self._addresses(matrix, lines, columns)
        rows["status"] = UNTRAINED
        program, taken = self.program(width, plain), ctypes.c_int64(0)
        call = (
            ctypes.byref(program),
            rows.ctypes.data,
            number,
            ctypes.byref(taken),
            self.x.data_ptr(),
            self.y.data_ptr(),
        )
        held = program, taken, rows, starts, buffers, shift, anchor, update, after

        def run() -> None:
            """Train some rows. Their memory stays while this runs, even if nobody waits for it."""
            _ = self.lib.rota_train(*call), held

        done = [threads.submit(run) for _ in range(min(workers, number))]

        def finish() -> Result:
            for each in done:  # all of them, before anything is read
                each.result()
            if (rows["status"] == UNTRAINED).any():
                raise MemoryError(
                    "no memory for a client's local training: fewer cores need less (taskset, or "
                    "--engine sequential)"
                )
            return Result(update, after, rows["loss"].copy(), reasons(rows))

        return finish

    def _check(self, rows: Array, width: int) -> None:
        """Raise ValueError if rows ask for what is not there: C trusts these numbers."""
        first, examples, batch = rows["first"], rows["examples"], rows["batch"]
        there = (first >= 0) & (examples > 0) & (examples <= len(self.y) - first)
        fits = (batch > 0) & (np.minimum(batch, examples) <= width)
        whole = (examples - 1) // np.maximum(batch, 1)  # mini-batches besides the last one
        slots = (rows["per_epoch"] > 0) & (rows["per_epoch"] - 1 <= whole)
        if not (there & fits & slots & (rows["steps"] > 0)).all():
            raise ValueError("rows with examples or mini-batches that are not there")

    def _addresses(self, matrix: Tensor | None, lines: Array, columns: int) -> Array | int:
        """Where lines of a matrix begin in memory; 0 where there is no matrix."""
        if matrix is None:
            return 0
        right = matrix.shape[1:] == (columns,) and matrix.dtype == self.steps.dtype
        within = not len(lines) or (lines.min() >= 0 and lines.max() < len(matrix))
        if not right or not matrix.is_contiguous() or not within:
            raise ValueError(f"a matrix {tuple(matrix.shape)} of {matrix.dtype} for {columns}")
        return matrix.data_ptr() + lines.astype(np.uintp) * columns * matrix.itemsize


def reasons(rows: Array) -> list[str]:
    """Why each row of a ROW array failed; empty where it did not."""
    columns = (rows[name].tolist() for name in ("status", "value", "size"))
    return [
        f"{OUTSIDE[status]}: {value} is not in 0..{size - 1}" if status in OUTSIDE else ""
        for status, value, size in zip(*columns, strict=True)
    ]


def verify(native: Native, width: int) -> None:
    """Compare one step, half of it padding, with autograd; raise Unbatchable if they differ."""
    steps, key = native.steps, torch.zeros((), dtype=torch.int64)
    real, start = half(width), weights.read(steps.module)
    sample, rows = copy.copy(native), np.zeros(1, ROW)
    given = {"examples": real, "batch": width, "per_epoch": 1, "steps": 1, "rate": 1.0}
    for name, value in given.items():
        rows[name] = value

    def trial(number: int) -> None:
        pick = steps.some(real, width + number * real)  # not those that it was traced on
        sample.x, sample.y = native.x[pick], native.y[pick]
        begin = start.params[None], start.buffers[None]
        with ThreadPoolExecutor(1) as thread:
            result = sample.start(thread, 1, width, True, rows.copy(), *begin)()
        if result.reason[0]:
            raise Unbatchable(f"leaves its tables: {result.reason[0]}")
        order = rng.permutation(rng.fold(key, 0), real)
        same_step(steps, result.update, result.buffers, pick[order], key)

    repeated(trial)
