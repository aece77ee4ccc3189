"""Keys, certificates, and the gate before the SuperLink: mistakes are sentences, strangers wait."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rota.cli.app import app, status
from rota.errors import BadInput

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rota[flower]'")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    words = ["keys", str(tmp_path / "keys"), "--host", "*.example.org", "--client", "one"]
    assert CliRunner().invoke(app, [*words, "--host", "10.0.0.1", "--host", "::1"]).exit_code == 0
    return tmp_path / "keys"


def test_secrets_are_their_owners_alone(keys: Path) -> None:
    secret = {"ca.key", "server.key", "secret", "one"}
    files = [file for file in keys.rglob("*") if file.is_file()]
    assert {file.name for file in files} == secret | {"ca.crt", "server.crt", "one.pub"}
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 or file.name not in secret


@pytest.mark.parametrize("host", ["", "https://example.org", "a b", "a:9092", "bücher.de", "a..b"])
def test_a_host_is_a_name(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["keys", str(tmp_path / "keys"), "--host", host]) == 2
    assert "is no name of a host" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


RSA = "rsa"


@pytest.mark.parametrize("text", ["", "junk", "-----BEGIN OPENSSH PRIVATE KEY-----", RSA])
def test_what_is_no_key_is_a_sentence(
    text: str, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    from rota.flower import keys as made

    if text == RSA:
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        key = rsa.generate_private_key(65537, 2048)
        text = key.private_bytes(serialization.Encoding.PEM, form, plain).decode()
    file, data = tmp_path / "key", tmp_path / "data"
    file.write_text(text)
    data.mkdir()
    words = ["client", "--data", str(data), "--server", "127.0.0.1:1"]
    assert status([*words, "--key", str(file)]) == 2
    assert "--key" in capsys.readouterr().err
    assert status([*words, "--root", str(file)]) == 2
    assert "--root is no certificate" in capsys.readouterr().err
    assert status([*words, "--state", str(file)]) == 2
    assert "choose another --state" in capsys.readouterr().err
    assert len(made.known(keys)) == 1
    (keys / "nodes" / "two.pub").write_text(text)
    with pytest.raises(BadInput, match=r"two\.pub"):
        made.known(keys)


def asked(gate: Any, path: str, headers: dict[str, str]) -> tuple[int, bool]:
    """The status of what a gate answers, and whether it has looked at what was sent."""
    told, looked = [], False

    async def receive() -> dict[str, Any]:
        nonlocal looked
        looked = True
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
    }
    asyncio.run(gate(scope, receive, send))
    return told[0]["status"], looked


def test_the_gate_does_not_read_what_strangers_send() -> None:
    """The SuperLink behind it is away: what is passed on comes back as 503."""
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    from rota.flower import gate

    assert gate.KEY == FLEET_HTTP_PUBLIC_KEY_HEADER
    known, stranger, sized = {gate.KEY: "me"}, {gate.KEY: "you"}, {"content-length": "1"}
    closed = gate.build("127.0.0.1:9", None, {"me"})
    push, control = "/v1/fleet/push-object", "/v1/control/list-runs"
    for headers, path, expected in (
        ({}, push, 403),
        (stranger | sized, push, 403),
        (known | sized, control, 404),
        (known, push, 413),
        (known | {"content-length": str(gate.LARGEST + 1)}, push, 413),
    ):
        assert asked(closed, path, headers) == (expected, False)
    assert asked(closed, push, known | sized)[0] == 503
    assert asked(gate.build("127.0.0.1:9", None, None), push, sized)[0] == 503
