"""Where the compiled C library is kept, and what happens where it cannot be kept."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rota.engine.native import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount and change owners")
COMPILED: list[bytes] = []
"""The library, compiled once for all tests here."""


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """How often the library was compiled, in a test with a home and a cache folder of its own."""
    monkeypatch.setenv("ROTA_NATIVE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    compile_it = build._compiled

    def compiled(command: list[str], real: str) -> bytes:
        calls.append(real)
        if not COMPILED:
            COMPILED.append(compile_it(command, real))
        return COMPILED[0]

    calls: list[str] = []
    monkeypatch.setattr(build, "FAST", ("-O0",))
    monkeypatch.setattr(build, "_compiled", compiled)
    build._library.cache_clear()
    yield calls
    build._library.cache_clear()


def load() -> None:
    """Load the library as a new process does, and use it."""
    build._library.cache_clear()
    assert build.library(torch.float32).rota_product_space(1, 1) > 0


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def put(path: Path, code: bytes) -> None:
    """Put another file in the place of one that this process has loaded."""
    path.unlink()
    path.write_bytes(code)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_it_is_compiled_once_and_then_loaded(tmp_path: Path, compilations: list[str]) -> None:
    load()
    (name,) = kept(tmp_path)
    folder = tmp_path / "cache" / "rota" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / name).stat().st_mode & 0o077 == 0
    load()
    assert compilations == ["float"]
    assert kept(tmp_path) == [name]


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_truncated_library_is_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    load()
    (path,) = (tmp_path / "cache").rglob("*.so")
    whole = path.read_bytes()
    put(path, whole[:left])
    load()
    assert said(caplog) == [f"{path} is damaged: CPU kernels are compiled again"]
    assert path.read_bytes() == whole


def test_a_changed_library_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load()
    (path,) = (tmp_path / "cache").rglob("*.so")
    code = bytearray(path.read_bytes())
    code[len(code) // 2] ^= 1
    put(path, bytes(code))
    load()
    assert "is damaged" in said(caplog)[0]
    assert path.read_bytes() != code


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    load()
    folder = tmp_path / "cache" / "rota" / "native"
    folder.chmod(mode)
    load()
    other = tmp_path / "home" / ".cache" / "rota" / "native"
    reason = f"{folder} cannot keep them (other users can write to it)"
    assert said(caplog) == [f"CPU kernels are in {other}, because {reason}"]
    assert len(kept(other)) == 1


@root
def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    folder = tmp_path / "cache" / "rota" / "native"
    os.chown(folder, 12345, 12345)
    load()
    assert f"{folder} cannot keep them (it belongs to another user)" in said(caplog)[0]


def test_a_file_in_the_folders_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("")
    load()
    assert "cannot keep them (Not a directory)" in said(caplog)[0]


def test_a_relative_cache_folder_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    load()
    assert "(XDG_CACHE_HOME is not an absolute path)" in said(caplog)[0]
    assert not (tmp_path / "here").exists()
    assert len(kept(tmp_path / "home")) == 1


@pytest.mark.parametrize("home", ["/nonexistent/home", "here"])
def test_without_a_home_folder_it_is_compiled_for_one_run(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    home: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    load()
    reason = f"{home}/.cache/rota/native cannot keep them (there is no home folder)"
    assert said(caplog) == [f"CPU kernels are compiled for this run alone, because {reason}"]
    assert kept(tmp_path) == []
    assert not Path(home).exists()


def test_without_the_variable_home_the_password_file_names_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    (folder,) = build._folders()
    assert folder[0].is_absolute()
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert list(build._folders()) == [(Path("~/.cache/rota/native"), "there is no home folder")]


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, mounted with the options of the test, at the cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@root
@pytest.mark.parametrize(
    ("mounted", "reason"),
    [
        ("noexec", "failed to map segment from shared object"),
        ("size=64k", "No space left on device"),
        ("ro", "Read-only file system"),
    ],
    indirect=["mounted"],
)
def test_a_file_system_that_will_not_do(
    mounted: Path, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    assert reason in said(caplog)[0]
    other = tmp_path / "home" / ".cache" / "rota" / "native"
    assert said(caplog)[0].startswith(f"CPU kernels are in {other}, because {mounted}")
    assert len(kept(other)) == 1
    if reason.startswith("No space"):
        assert kept(mounted) == []


@root
@pytest.mark.parametrize("mounted", ["noexec"], indirect=True)
def test_where_no_folder_will_do_the_reason_is_said_once(
    mounted: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = mounted / "home", mounted / "temporary"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for _ in range(2):
        with pytest.raises(build.Unavailable, match="a temporary folder cannot keep them"):
            build.library(torch.float32)
    (sentence,) = said(caplog)
    assert sentence.startswith("small models train several times slower without CPU kernels: ")


def test_a_compiler_that_fails_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("ROTA_NATIVE", "1")
    for _ in range(2):
        with pytest.raises(build.Unavailable, match="false failed: it said nothing"):
            build.library(torch.float32)
    assert len(said(caplog)) == 1


def test_without_a_compiler_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for _ in range(2):
        with pytest.raises(build.Unavailable, match="there is no C compiler"):
            build.library(torch.float32)
    assert len(said(caplog)) == 1


def test_several_that_write_it_at_once_do_not_meet(tmp_path: Path) -> None:
    """Each loads a whole library, whoever wrote it first."""
    load()
    (path,) = (tmp_path / "cache").rglob("*.so")
    path.unlink()
    with ThreadPoolExecutor(8) as threads:
        every = list(threads.map(lambda _: build._load("float", ["-O0"]), range(32)))
    assert all(library.rota_product_space(1, 1) > 0 for library in every)
    assert len(kept(tmp_path)) == 1


def test_an_unknown_type_of_number_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(build.Unavailable, match="no kernels for"):
        build.library(torch.bfloat16)
    assert said(caplog) == []
