"""rota.c as a library, compiled on first use with the machine's C compiler and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from rota.engine.native.program import Instruction

SOURCES = ("rota.c", "product.h", "convolution.h", "elementwise.h")
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)


class Unavailable(Exception):
    """There is no C compiler, or it failed: why."""


class Work(ctypes.Structure):
    """rota.c's Program."""

    _fields_ = [
        ("list", ctypes.POINTER(Instruction)),
        *(
            (name, ctypes.c_int64)
            for name in (
                "count",
                "arena",
                "width",
                "params",
                "buffers",
                "x_bytes",
                "y_bytes",
                "fused",
            )
        ),
        ("constants", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("momentum", "weight_decay", "prox", "clip")),
        *((name, ctypes.c_int64) for name in ("nesterov", "adam")),
    ]


ROW = np.dtype(
    [
        ("key", np.uint64),
        *((name, np.int64) for name in ("first", "examples", "batch", "per_epoch", "steps")),
        *((name, np.float64) for name in ("rate", "loss")),
        *((name, np.uintp) for name in ("start", "start_buffers", "shift", "update", "buffers")),
        *((name, np.int64) for name in ("status", "value", "size")),
    ]
)
"""rota.c's Row."""

TRAINED, UNTRAINED, TOKEN_OUTSIDE, LABEL_OUTSIDE = range(4)
"""How a row's training ended."""


def compiler() -> str | None:
    """The C compiler: $CC, or cc, gcc or clang."""
    return next(
        (
            found
            for name in (os.environ.get("CC"), "cc", "gcc", "clang")
            if name and (found := shutil.which(name))
        ),
        None,
    )


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for float or double; raises Unavailable. ROTA_NATIVE=0 in the environment does without it."""
    if os.environ.get("ROTA_NATIVE") == "0":
        raise Unavailable("ROTA_NATIVE is 0")
    return _library(dtype)


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    names = {torch.float32: "float", torch.float64: "double"}
    if dtype not in names:
        raise Unavailable(f"no kernels for {dtype}")
    here = Path(__file__).parent
    source = b"".join((here / name).read_bytes() for name in SOURCES)
    words = " ".join((names[dtype], *FLAGS, _processor(), str(compiler())))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rota" / "native"
    path = cache / f"{hashlib.sha256(source + words.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        _compile(here / SOURCES[0], path, names[dtype])
    lib = ctypes.CDLL(str(path))
    lib.rota_train.argtypes = [
        ctypes.POINTER(Work),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    lib.rota_train.restype = None
    lib.rota_convolution_space.argtypes = [ctypes.c_void_p]
    lib.rota_product_space.argtypes = [ctypes.c_int64, ctypes.c_int64]
    lib.rota_convolution_space.restype = lib.rota_product_space.restype = ctypes.c_int64
    return lib


def _compile(source: Path, path: Path, real: str) -> None:
    cc = compiler()
    if cc is None:
        raise Unavailable("there is no C compiler (cc, gcc or clang)")
    print(
        f"rota: compiling its CPU kernels for {real} numbers, once on this machine ...",
        file=sys.stderr,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run(
                [cc, *FLAGS, f"-DR={real}", "-o", str(made), str(source), "-lm"],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise Unavailable(
                    f"{cc} failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
                )
            made.replace(path)
    except OSError as error:
        raise Unavailable(
            f"the kernels cannot be kept in {path.parent}: {error.strerror}"
        ) from error


def _processor() -> str:
    """What -march=native depends on: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(
        next((line for line in lines if line.startswith(word)), "")
        for word in ("model name", "flags", "Features")
    )
