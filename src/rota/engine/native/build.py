"""rota.c as a library, compiled on first use with the machine's C compiler, and cached.

A cached library is code that rota will run. So it is only taken from a folder that belongs to the
user and that nobody else can write to, and only if its digest, which is a part of its name, is
right. It is written under another name and renamed, so that a crash or another process at the same
time leaves no half-written library. If no folder qualifies, a private temporary one is used, and
every process compiles the library anew.

Environment variables: ROTA_NATIVE=0 goes without the library. ROTA_SANITIZE=1 compiles it with
AddressSanitizer and UndefinedBehaviorSanitizer (make test-native-sanitized).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from rota.engine.machine import processor
from rota.engine.native.structures import Program
from rota.files import replacing, sync

SOURCES = ("rota.c", "product.h", "convolution.h", "elementwise.h", "groups.h")
NUMBERS = {torch.float32: "float", torch.float64: "double"}
FLAGS = (
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
)
FAST = ("-O3",)
SANITIZED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
)

log = logging.getLogger("rota")


class Unavailable(Exception):
    """Why there is no library for this machine or this type of number."""


def compiler() -> str | None:
    """The C compiler: $CC, or cc, gcc or clang."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    return None


def sanitized() -> bool:
    return os.environ.get("ROTA_SANITIZE") == "1"


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for float32 or float64. Raises Unavailable."""
    if os.environ.get("ROTA_NATIVE") == "0":
        raise Unavailable("ROTA_NATIVE is 0")
    if dtype not in NUMBERS:
        raise Unavailable(f"no kernels for {dtype}")
    found = _library(NUMBERS[dtype], sanitized())
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _library(real: str, sanitize: bool) -> ctypes.CDLL | str:
    """The library, or why there is none. The reason is logged once."""
    try:
        lib = _load(real, [*(SANITIZED if sanitize else FAST), *FLAGS])
    except Unavailable as reason:
        log.warning("small models train several times slower without CPU kernels: %s", reason)
        return str(reason)
    lib.rota_train.argtypes = [
        ctypes.POINTER(Program),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    lib.rota_train.restype = None
    lib.rota_product.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 4
    lib.rota_product.restype = None
    lib.rota_convolution_space.argtypes = [ctypes.c_void_p]
    lib.rota_product_space.argtypes = [ctypes.c_int64, ctypes.c_int64]
    lib.rota_convolution_space.restype = lib.rota_product_space.restype = ctypes.c_int64
    return lib


def _load(real: str, flags: list[str]) -> ctypes.CDLL:
    """Load the library from the first suitable folder; compile it if it is in none of them."""
    cc = compiler()
    if cc is None:
        raise Unavailable("there is no C compiler (cc, gcc or clang)")
    here = Path(__file__).parent
    words = " ".join((real, *flags, _processor(), cc))
    sources = b"".join((here / name).read_bytes() for name in SOURCES)
    name = hashlib.sha256(sources + words.encode()).hexdigest()[:24]
    command = [cc, *flags, f"-DR={real}", str(here / SOURCES[0]), "-lm"]
    made, troubles = b"", []
    for folder, trouble in _folders():
        try:
            if trouble:
                raise OSError(0, trouble)
            _check(folder)
            path = _cached(folder, name)
            if path is None:
                made = made or _compiled(command, real)
                path = _keep(folder, name, made)
            lib = ctypes.CDLL(str(path))
        except OSError as error:
            troubles.append(f"{folder} cannot keep them ({error.strerror or error})")
            continue
        if troubles:
            log.warning("CPU kernels are in %s, because %s", folder, "; ".join(troubles))
        return lib
    made = made or _compiled(command, real)
    return _load_from_private_folder(made, name, troubles)


def _folders() -> Iterator[tuple[Path, str]]:
    """The folders that may hold compiled libraries, each with what is wrong with its name."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        path = Path(chosen) / "rota" / "native"
        yield path, "" if path.is_absolute() else "XDG_CACHE_HOME is not an absolute path"
    try:
        home = Path.home()
    except RuntimeError:
        yield Path("~/.cache/rota/native"), "there is no home folder"
        return
    exists = home.is_absolute() and home.is_dir()
    yield home / ".cache" / "rota" / "native", "" if exists else "there is no home folder"


def _check(folder: Path) -> None:
    """Make the folder if it is not there; raise OSError if others could change what is in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise OSError(0, "it belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(0, "other users can write to it")


def _cached(folder: Path, name: str) -> Path | None:
    """The library with this name, if it is there and whole."""
    for path in folder.glob(f"{name}-*.so"):
        if path == _named(folder, name, path.read_bytes()):
            return path
        log.warning("%s is damaged: CPU kernels are compiled again", path)
        path.unlink()
    return None


def _named(folder: Path, name: str, code: bytes) -> Path:
    return folder / f"{name}-{hashlib.sha256(code).hexdigest()}.so"


def _keep(folder: Path, name: str, code: bytes) -> Path:
    """Write a library into a folder, in one step."""
    path = _named(folder, name, code)
    with replacing(path, shared=True) as aside:
        aside.touch(mode=0o600)
        aside.write_bytes(code)
    sync(folder)
    return path


def _compiled(command: list[str], real: str) -> bytes:
    log.info("compiling CPU kernels for %s numbers, once on this machine", real)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rota.so"
            done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
            if done.returncode:
                said = done.stderr.strip().splitlines() or ["it said nothing"]
                raise Unavailable(f"{command[0]} failed: {said[-1]}")
            return path.read_bytes()
    except OSError as error:
        raise Unavailable(f"they cannot be compiled ({error.strerror})") from error


def _load_from_private_folder(code: bytes, name: str, troubles: list[str]) -> ctypes.CDLL:
    """Load a library from a temporary folder, which can be removed as soon as it is loaded."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            lib = ctypes.CDLL(str(_keep(Path(folder), name, code)))
    except OSError as error:
        troubles.append(f"a temporary folder cannot keep them ({error.strerror or error})")
        raise Unavailable("; ".join(troubles)) from error
    log.warning("CPU kernels are compiled for this run alone, because %s", "; ".join(troubles))
    return lib


def _processor() -> str:
    """What -march=native depends on, since several machines may share a cache."""
    known = processor()
    if not known:
        return platform.processor() + platform.machine()
    return " ".join(known.get(name, "") for name in ("model name", "flags", "Features"))
