"""Nodes that reply anything, and strangers who knock: real processes."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fleets import HASTY, PATIENT, bench

from rota.flower import superlink

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'rota[flower]'")
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # flwr's own
]
ROGUE = str(Path(__file__).with_name("rogue.py"))
WORDS = {
    "noise": "cannot be read",
    "torn": "cannot be read",
    "nothing": "no letter of rota",
    "large": "more than",
    "others": "does not have this row",
    "announced": "no reply within",
}
"""What a reply is, and the reason that its rows fail for."""


def test_replies_that_are_none(tmp_path: Path) -> None:
    """They are failed rows with a reason, and the others' rows count."""
    with bench(tmp_path) as one:
        for mode, words in WORDS.items():
            one.back(1, program=[ROGUE, mode])
            one.fleet.rules = HASTY if mode == "announced" else PATIENT
            reasons = one.play({1, 4})
            assert all(words in reason for reason in reasons.values()), reasons
        one.fleet.rules = PATIENT
        one.back(1, program=[ROGUE, "twice"])
        for _ in range(3):  # the second reply is nobody's
            one.play(set())
        one.back(1)
        one.play(set())


def test_strangers(tmp_path: Path) -> None:
    """Who is not registered gets no number, no message and no model; nor does who poses as a node.

    The SuperLink's other interfaces cannot be reached through the gate.
    """
    import httpx
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    from rota.flower import keys as made
    from rota.flower.inside import Member

    keys, other = tmp_path / "keys", tmp_path / "other"
    made.certify(keys, ["fleet.example.org"])
    made.certify(other, ["fleet.example.org"])
    for name in "012":
        made.node_key(keys / "nodes" / name)
    made.node_key(tmp_path / "stranger")
    with bench(tmp_path / "data", host="0.0.0.0", keys=keys) as one:
        address = one.nodes.address
        authority = (keys / "ca.crt").read_bytes()
        data = tmp_path / "mine"
        data.mkdir()
        words = [sys.executable, "-m", "rota", "client", "--data", str(data), "--server", address]
        strangers = {  # a client that does not say who it is; with a key; with another authority
            "does not let this client in": ["--root", str(keys / "ca.crt")],
            "give it a --key": [
                "--root",
                str(keys / "ca.crt"),
                "--key",
                str(tmp_path / "stranger"),
            ],
            "give the right --root": ["--root", str(other / "ca.crt")],
        }
        running = {
            sentence: subprocess.Popen(
                [*words, *more, "--state", str(tmp_path / f"s{i}")],
                stderr=subprocess.PIPE,
                text=True,
            )
            for i, (sentence, more) in enumerate(strangers.items())
        }
        one.play(set())
        for sentence, process in running.items():
            said = process.communicate(timeout=240)[1]
            assert process.returncode == 2, said
            assert sentence in said.replace("\n", " ")
        assert len(one.fleet.wire.nodes()) == 3
        # a registered node asks for what is another's; a stranger does, too
        for key in (keys / "nodes" / "0", tmp_path / "stranger"):
            member = Member(address, tmp_path, authority, key.read_bytes(), 10)
            taken = 0
            for node in one.fleet.wire.nodes():
                with suppress(httpx.HTTPStatusError):
                    member.client.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
                    taken += 1
            member.client.close()
            assert taken == (key.name == "0")  # its own
        # what the gate does not pass on; the SuperLink itself listens on loopback alone
        trust = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        inner = one.fleet.wire.door.address
        with httpx.Client(base_url=f"https://{address}", verify=trust) as web:
            for path in (
                "control/list-runs",
                "control/start-run",
                "runtime/acquire-task",
                "fleet/../control/list-runs",
                "fleet/%2e%2e/control/list-runs",
            ):
                assert web.post(f"/v1/{path}", content=b"").status_code == 404
            assert web.post("/v1/fleet/push-object", content=bytes(9 << 20)).status_code == 403
        found = httpx.post(f"https://{inner}/v1/control/list-runs", verify=trust, content=b"")
        assert found.status_code != 404  # it is there, for this machine
        outside = socket.gethostbyname(socket.gethostname())
        if outside not in superlink.LOOPBACK:
            assert superlink.answers(outside, int(address.rpartition(":")[2]))  # the gate
            assert not superlink.answers(outside, int(inner.rpartition(":")[2]))
        one.play(set())


def test_a_key_that_was_removed(tmp_path: Path) -> None:
    """It counts no more after a restart, though the database keeps it; and it may come back."""
    import httpx

    from rota.flower import keys as made
    from rota.flower.inside import Member
    from rota.flower.serve import fleet_at

    keys, own = tmp_path / "keys", tmp_path / "own"
    made.certify(keys, ["localhost"])
    own.mkdir()
    secret = keys / "nodes" / "phone"
    made.node_key(secret)
    public = secret.with_name("phone.pub").read_bytes()
    for known in (True, False, True):
        address = f"127.0.0.1:{superlink.free_port()}"
        if known:
            secret.with_name("phone.pub").write_bytes(public)
        else:
            secret.with_name("phone.pub").unlink()
        with fleet_at(address, keys, database=tmp_path / "link.db") as fleet:
            authority = (keys / "ca.crt").read_bytes()
            member = Member(address, own, authority, secret.read_bytes(), 10)
            if known:
                number = member.join()
                assert fleet.wire.nodes() == [number]
            else:
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    member.join()
            member.leave()
            member.client.close()
