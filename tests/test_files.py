"""Finding, checking and downloading files, against a real server on this machine."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError

import pytest

from rota.data import files
from rota.data.files import Remote
from rota.errors import BadInput

BODY = bytes(range(256)) * 1000
MD5 = hashlib.md5(BODY).hexdigest()


class Mirror:
    """An HTTP server that answers its requests as a script says; the last entry is repeated."""

    def __init__(self) -> None:
        self.script: list[str] = ["good"]
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                what = mirror.script[min(len(mirror.asked), len(mirror.script)) - 1]
                if what.isdigit():
                    self.send_error(int(what))
                    return
                if what == "hang up":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if what == "say nothing":
                    time.sleep(1)
                    return
                self.send_response(200)
                if what != "no length":
                    self.send_header("Content-Length", str(len(BODY)))
                self.end_headers()
                bodies = {"truncated": BODY[:100_000], "corrupt": b"\xff" + BODY[1:]}
                self.wfile.write(bodies.get(what, BODY))
                self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        serve = self.server.serve_forever
        self.thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/set/file.bin"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def mirrors() -> Iterator[list[Mirror]]:
    both = [Mirror(), Mirror()]
    yield both
    for mirror in both:
        mirror.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty data folder, cache and system folder."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("ROTA_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(files, "SYSTEM", tmp_path / "system")
    return tmp_path


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which are noted and take no time."""
    noted: list[float] = []
    monkeypatch.setattr(files.time, "sleep", noted.append)
    return noted


def put(path: Path, data: bytes = BODY) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def remote(*urls: str, aliases: tuple[str, ...] = ()) -> Remote:
    return Remote("file.bin", (MD5,), urls, aliases)


@pytest.mark.parametrize(
    "place",
    [
        "own/set/file.bin",
        "cache/rota/set/file.bin",
        "system/set/file.bin",
        "own/set/inner/other.bin",
    ],
)
def test_found_in_every_place(home: Path, place: str) -> None:
    file = remote(aliases=("inner/other.bin",))
    assert not files.at_hand("set", (file,))
    path = put(home / place)
    assert files.at_hand("set", (file,))
    assert files.find("set", (file,)) == {"file.bin": path}


def test_the_users_folder_comes_first(home: Path) -> None:
    for place in ("cache/rota", "system", "own"):
        first = put(home / place / "set/file.bin")
    assert files.find("set", (remote(),)) == {"file.bin": first}


@pytest.mark.parametrize(
    "data", [BODY[:-1], b"", b"\xff" + BODY[1:]], ids=["truncated", "empty", "corrupt"]
)
@pytest.mark.parametrize("place", ["own/set/file.bin", "cache/rota/set/file.bin"])
def test_a_damaged_file_is_named_and_left_alone(
    home: Path, mirrors: list[Mirror], data: bytes, place: str
) -> None:
    path = put(home / place, data)
    with pytest.raises(BadInput, match="is damaged") as caught:
        files.find("set", (remote(mirrors[0].url),))
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data
    assert mirrors[0].asked == []


@pytest.mark.parametrize(
    "story",
    ["good", "no length", "truncated, good", "503, 429, good", "hang up, good", "corrupt, good"],
    ids=lambda s: s.replace(", ", "-"),
)
def test_download(home: Path, mirrors: list[Mirror], pauses: list[float], story: str) -> None:
    mirrors[0].script = story.split(", ")
    requests = len(mirrors[0].script)
    file = remote(mirrors[0].url, mirrors[1].url)
    path = files.find("set", (file,))["file.bin"]
    assert path == home / "cache/rota/set/file.bin"
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]  # no leftovers
    assert len(mirrors[0].asked) == requests
    assert pauses == [0.5, 1.0][: requests - 1]
    files.find("set", (file,))
    assert len(mirrors[0].asked) == requests  # it was in the cache
    assert mirrors[1].asked == []


@pytest.mark.parametrize(
    ("script", "requests", "why"),
    [
        ("404", 1, "HTTP 404"),
        ("truncated", 3, "damaged|broke off"),
        ("corrupt", 3, "damaged"),
        ("503", 3, "HTTP 503"),
    ],
)
def test_a_bad_mirror(
    home: Path, mirrors: list[Mirror], pauses: list[float], script: str, requests: int, why: str
) -> None:
    mirrors[0].script = [script]
    with pytest.raises(BadInput, match=why):
        files.find("set", (remote(mirrors[0].url),))
    assert len(mirrors[0].asked) == requests
    assert pauses == [0.5, 1.0][: requests - 1]
    assert not [path for path in (home / "cache").rglob("*") if path.is_file()]
    files.find("set", (remote(mirrors[0].url, mirrors[1].url),))
    assert len(mirrors[1].asked) == 1


def _unused() -> str:
    """A URL at which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/file.bin"


@pytest.mark.usefixtures("home")
def test_no_network_says_what_to_do_at_once(pauses: list[float]) -> None:
    wanted = (remote(_unused()), Remote("second.bin", (MD5,), (_unused(),)))
    with pytest.raises(BadInput) as caught:
        files.find("set", wanted)
    for word in (
        "$ROTA_DATA/set",
        "file.bin, second.bin",
        "'digits'",
        "'synthetic'",
        "cannot be reached",
    ):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert pauses == []  # an unreachable mirror is not tried again


@pytest.mark.usefixtures("home")
def test_without_a_name_server_one_mirror_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nameless(request: object, timeout: float) -> None:
        asked.append((request, timeout))
        raise URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))

    monkeypatch.setattr(files, "urlopen", nameless)
    with pytest.raises(BadInput, match="Temporary failure"):
        files.find("set", (remote("http://a.invalid/f", "http://b.invalid/f"),))
    assert len(asked) == 1


@pytest.mark.usefixtures("home")
def test_a_silent_mirror_is_asked_once(
    mirrors: list[Mirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors[0].script = ["say nothing"]
    monkeypatch.setattr(files, "TIMEOUT", 0.1)
    with pytest.raises(BadInput, match="does not answer"):
        files.find("set", (remote(mirrors[0].url),))
    assert len(mirrors[0].asked) == 1


def test_a_cache_that_cannot_be_written(home: Path, mirrors: list[Mirror]) -> None:
    put(home / "cache")  # a file where the folder should be
    with pytest.raises(BadInput, match="XDG_CACHE_HOME"):
        files.find("set", (remote(mirrors[0].url, mirrors[1].url),))
    assert mirrors[1].asked == []  # it is not the mirror's fault


def test_a_user_without_a_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(home / "tmp"))
    path = put(home / "own/set/file.bin")
    assert files.find("set", (remote(),)) == {"file.bin": path}
    path.unlink()
    assert not files.at_hand("set", (remote(),))
    with pytest.raises(BadInput, match=f"put file.bin into .* or {home / 'tmp'}/cache-"):
        files.find("set", (remote(),))


@pytest.mark.usefixtures("home")
def test_rota_data_must_be_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_DATA", "/nowhere")
    with pytest.raises(BadInput, match="ROTA_DATA is /nowhere"):
        files.find("set", (remote(),))


@pytest.mark.usefixtures("home")
def test_progress_goes_to_standard_error(
    mirrors: list[Mirror], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files.find("set", (remote(mirrors[0].url),))
    assert capsys.readouterr() == ("", "")  # not a terminal: silence

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    files.find("other", (remote(mirrors[0].url),))
    assert "file.bin" in terminal.getvalue()
    assert capsys.readouterr().out == ""
