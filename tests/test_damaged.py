"""Data files that are damaged, encrypted or forged, and data beyond memory: one sentence each."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation
from torch import nn

import rota
from rota.data import SOURCES, fit, memory, partition, synthetic
from rota.data.federation import Examples
from rota.errors import BadInput
from rota.plan import Task
from rota.world.devices import DEVICES

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def npz(**arrays: Any) -> bytes:
    room = io.BytesIO()
    np.savez_compressed(room, **arrays)
    return room.getvalue()


def encrypted() -> bytes:
    """The flag of encryption in both headers of every member."""
    data = bytearray(npz(x=X, y=Y))
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(mark)
        while at >= 0:
            data[at + flags] |= 1
            at = data.find(mark, at + 1)
    return bytes(data)


def with_header(header: str, body: bytes = b"\0" * 48) -> bytes:
    """An .npz file whose x has this header."""
    raw = header.encode()
    raw += b" " * (63 - (len(raw) + 10) % 64) + b"\n"
    return with_member(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + body)


def with_member(x: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    room = io.BytesIO()
    with zipfile.ZipFile(room, "w", method) as archive:
        archive.writestr("x.npy", x)
        y = io.BytesIO()
        np.save(y, Y)
        archive.writestr("y.npy", y.getvalue())
    return room.getvalue()


def unknown_method() -> bytes:
    data = bytearray(npz(x=X, y=Y))
    at = data.find(b"PK\x03\x04")
    data[at + 8 : at + 10] = b"\x63\0"
    at = data.find(b"PK\x01\x02")
    data[at + 10 : at + 12] = b"\x63\0"
    return bytes(data)


def bad_stream() -> bytes:
    """The compressed bytes are not what the method says."""
    data = bytearray(npz(x=X, y=Y))
    at = data.find(b"x.npy") + 5 + 20
    data[at : at + 12] = b"\xff" * 12
    return bytes(data)


FORGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "encrypted": (encrypted, "encrypted"),
    "unknown compression": (unknown_method, "compression"),
    "broken stream": (bad_stream, "cannot be read as"),
    "a trillion rows": (
        lambda: with_header(
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2)}"
        ),
        "cannot be read as",
    ),
    "fewer rows than it says": (
        lambda: with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (600, 2)}"),
        "cannot be read as",
    ),
    "negative rows": (
        lambda: with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-6, 2)}"),
        "cannot be read as|rows",
    ),
    "no header": (lambda: with_header("{'descr': "), "cannot be read as"),
    "a call for a header": (
        lambda: with_header("__import__('os').system('true')"),
        "cannot be read",
    ),
    "deep header": (lambda: with_header("(" * 5000 + ")" * 5000), "cannot be read as"),
    "objects": (
        lambda: with_header("{'descr': '|O', 'fortran_order': False, 'shape': (6, 2)}"),
        "cannot be read as",
    ),
    "records": (
        lambda: npz(x=np.zeros(6, [("a", "f4")]), y=Y),
        "array of numbers",
    ),
    "times": (lambda: npz(x=np.zeros((6, 2), "M8[s]"), y=Y), "array of numbers"),
    "complex": (lambda: npz(x=X.astype(complex), y=Y), "array of numbers"),
    "a number": (lambda: npz(x=np.float32(3), y=Y), "array of numbers"),
    "too large for float32": (
        lambda: npz(x=X * 1e300, y=Y),
        "too large numbers in x, first in row 0",
    ),
    "too large for int64": (
        lambda: npz(x=X, y=Y.astype(np.uint64) + np.uint64(2**63)),
        "above 2..63 in y",
    ),
    "empty": (lambda: b"", "cannot be read as"),
    "an empty zip": (lambda: b"PK\x05\x06" + b"\0" * 18, "no test set|no array"),
    "text for an array": (lambda: with_member(b"hello"), "has x, but not as an array"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("file", ["1.npz", "test.npz"])
@pytest.mark.filterwarnings("ignore")
def test_a_forged_file_is_named(tmp_path: Path, name: str, file: str) -> None:
    for each in ("0.npz", "1.npz", "2.npz", "test.npz"):
        (tmp_path / each).write_bytes(npz(x=X, y=Y))
    forge, words = FORGED[name]
    (tmp_path / file).write_bytes(forge())
    with pytest.raises(BadInput, match=words) as caught:
        rota.data.folder(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks to more than there is memory; and many that do together."""
    small, large = (
        npz(x=X, y=Y),
        npz(x=np.zeros((1_000_000, 2), np.float32), y=np.zeros(1_000_000, int)),
    )
    assert len(large) < 100_000
    for each in ("0.npz", "test.npz"):
        (tmp_path / each).write_bytes(small)
    for number in range(1, 4):
        (tmp_path / f"{number}.npz").write_bytes(large)
    assert rota.data.folder(tmp_path).clients == 4
    monkeypatch.setattr(memory, "total", lambda: 40e6)
    with pytest.raises(BadInput, match=r"the data up to .*3\.npz would take 0 GB, and there are"):
        rota.data.folder(tmp_path)
    monkeypatch.setattr(memory, "total", lambda: 10e6)
    with pytest.raises(BadInput, match=r"the data up to .*1\.npz would take"):
        rota.data.folder(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "test.npz").write_bytes(npz(x=X, y=Y))
    path = tmp_path / "1.npz"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(BadInput, match=r"1\.npz is not a file"):
        rota.data.folder(tmp_path)


def test_clients_of_a_folder_are_named_by_their_files(tmp_path: Path) -> None:
    for each in ("north", "south", "test"):
        (tmp_path / f"{each}.npz").write_bytes(npz(x=X, y=Y))
    assert list(rota.data.folder(tmp_path).roster.ids) == ["north", "south"]


def flipped(data: bytes, generator: random.Random) -> bytes:
    """A file with some bytes changed, cut out, doubled or cut off."""
    out = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        at = generator.randrange(len(out))
        match generator.randrange(4):
            case 0:
                out[at] = generator.randrange(256)
            case 1:
                del out[at : at + generator.randrange(1, 40)]
            case 2:
                out[at:at] = out[at : at + generator.randrange(1, 40)]
            case _:
                out = out[: max(1, at)]
        if not out:
            return b"\0"
    return bytes(out)


def leaf(users: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"users": list(users), "user_data": users} | more).encode()


def image(shade: float = 0.5) -> list[float]:
    return [shade] * 784


def fuzz(folder: Path, file: str, good: bytes, load: Callable[[], Any], number: int) -> int:
    """Load damaged copies of a file: each is refused in one sentence, or is still readable."""
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    generator = random.Random(seed)
    sentences = []
    for _ in range(number):
        (folder / file).write_bytes(flipped(good, generator))
        try:
            load()
        except BadInput as mistake:
            sentences.append(str(mistake))
    for sentence in sentences:
        assert "\n" not in sentence
        assert file in sentence or folder.name in sentence
    return len(sentences)


def npz_fuzz(tmp_path: Path, number: int) -> int:
    for each in ("0.npz", "test.npz"):
        (tmp_path / each).write_bytes(npz(x=X, y=Y))
    return fuzz(tmp_path, "0.npz", npz(x=X, y=Y), lambda: rota.data.folder(tmp_path), number)


def leaf_fuzz(root: Path, number: int) -> int:
    place = root / "femnist"
    place.mkdir(exist_ok=True)
    users = {name: {"x": [image()] * 2, "y": [1, 2]} for name in ("a", "b")}
    return fuzz(place, "0.json", leaf(users), SOURCES["femnist"], number)


def devices_fuzz(root: Path, number: int) -> int:
    """Files of devices: those that are accepted give every client a finite time."""
    good = Path(__file__).parents[1] / "examples" / "devices.jsonl"

    def load() -> None:
        profile = DEVICES["trace"](file=root / "devices.jsonl").profile(7, 1)
        for now in (1, 30):
            times = profile.seconds(np.arange(7), np.full(7, 1e9), np.full(7, 1e6), now)
            assert all(np.isfinite(each).all() and (each >= 0).all() for each in times)

    return fuzz(root, "devices.jsonl", good.read_bytes(), load, number)


@pytest.fixture
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTA_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_files_damaged_at_random(own_data: Path) -> None:
    (own_data / "clients").mkdir()
    assert npz_fuzz(own_data / "clients", 200) > 100
    assert leaf_fuzz(own_data, 60) > 10
    assert devices_fuzz(own_data, 200) > 50


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore")
def test_ten_thousand_files_damaged_at_random(own_data: Path) -> None:
    (own_data / "clients").mkdir()
    assert npz_fuzz(own_data / "clients", 8000) > 4000
    assert leaf_fuzz(own_data, 1000) > 200
    assert devices_fuzz(own_data, 1000) > 300


LEAF: dict[str, tuple[Any, str]] = {
    "a list of users": ([], "it has no object user_data"),
    "no users": ({}, "has no images in its JSON files"),
    "users without data": ({"a": {"x": [], "y": []}}, "has no images in its JSON files"),
    "a number for a user": ({"a": 5}, "user a has no x and y"),
    "null for a user": ({"a": None}, "user a has no x and y"),
    "no labels": ({"a": {"x": [image()]}}, "user a has no x and y"),
    "more images": ({"a": {"x": [image()] * 2, "y": [3]}}, "user a has 2 images and 1 labels"),
    "more labels": ({"a": {"x": [image()], "y": [3, 3]}}, "user a has 1 images and 2 labels"),
    "labels alone": ({"a": {"x": [], "y": [3]}}, "user a: x is not a list of images"),
    "ragged images": ({"a": {"x": [image(), image()[:5]], "y": [3, 3]}}, "x has rows of different"),
    "short images": ({"a": {"x": [[0.5] * 783], "y": [3]}}, "x is not a list of images of 784"),
    "a flat list": ({"a": {"x": image(), "y": [3]}}, "x is not a list of images of 784 numbers"),
    "deep images": (
        {"a": {"x": [[image()]], "y": [3]}},
        "x is not a list of images of 784 numbers",
    ),
    "words": ({"a": {"x": [["0.5"] * 784], "y": [3]}}, "user a: x is not a list of numbers"),
    "truths": ({"a": {"x": [image()], "y": [True]}}, "user a: y is not a list of numbers"),
    "an object": ({"a": {"x": {"0": image()}, "y": [3]}}, "user a: x is not a list of numbers"),
    "huge labels": ({"a": {"x": [image()], "y": [10**30]}}, "user a: y is not a list of numbers"),
    "labels outside": ({"a": {"x": [image()], "y": [62]}}, r"user a has labels outside 0\.\.61"),
    "half labels": ({"a": {"x": [image()], "y": [1.5]}}, r"user a has labels outside 0\.\.61"),
    "nested labels": ({"a": {"x": [image()], "y": [[1]]}}, "user a has 1 images and 1 labels"),
    "NaN": ({"a": {"x": [image(float("nan"))], "y": [1]}}, "x is not a list of images of 784 num"),
    "huge numbers": (
        {"a": {"x": [image(1e300)], "y": [1]}},
        "x is not a list of images of 784 num",
    ),
}


@pytest.mark.parametrize("name", LEAF)
def test_leaf_files_that_are_not_what_they_seem(name: str, own_data: Path) -> None:
    users, words = LEAF[name]
    path = own_data / "femnist/data.json"
    path.parent.mkdir()
    path.write_bytes(json.dumps({"user_data": users}).encode())
    with pytest.raises(BadInput, match=words) as caught:
        SOURCES["femnist"]()
    assert str(path if "has no images in" not in words else path.parent) in str(caught.value)


def test_leaf_users_without_data_are_left_out(own_data: Path) -> None:
    users = {"a": {"x": [], "y": []}, "b": {"x": [image()] * 5, "y": [1] * 5}}
    (own_data / "femnist").mkdir()
    (own_data / "femnist/data.json").write_bytes(leaf(users))
    assert SOURCES["femnist"]().train.sizes.tolist() == [4]


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 10**12},
        {"clients": 10**30},
        {"examples": 10**12},
        {"dim": 10**12},
        {"classes": 10**12},
        {"clients": 10**6, "examples": 10**6},
    ],
)
def test_synthetic_data_beyond_memory(options: dict[str, Any]) -> None:
    sentence = r"synthetic: .* GB of memory: lower clients, examples, dim or classes"
    with pytest.raises(BadInput, match=sentence):
        synthetic(**options)


@pytest.mark.parametrize("scale", [1e13, 1e300, float("inf"), -1.0, float("nan")])
def test_synthetic_scales(scale: float) -> None:
    with pytest.raises(BadInput, match="it is a standard deviation: give a number from 0 to 1e"):
        synthetic(clients=2, alpha=scale)
    fed = synthetic(clients=2, alpha=1e12, beta=1e12, examples=5)
    assert torch.isfinite(fed.train.x).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition.iid(10**12), "iid: it needs 1000000000000 examples and there are 60"),
        (lambda: partition.shards(10**12), "shards: it needs 2000000000000 examples"),
        (lambda: partition.shards(10**6, 10**6), "shards: it needs 1000000000000 examples"),
        (lambda: partition.dirichlet(10**12), "dirichlet: it needs 1000000000000 examples"),
        (
            lambda: partition.dirichlet(10, least=10**12),
            "dirichlet: it needs 10000000000000 examples",
        ),
        (lambda: partition.three_way(clients=3 * 10**11), "are too few for 300000000000 clients"),
        (lambda: partition.high_low(10**12), "would take 200,000 GB"),
        (lambda: partition.high_low(10, low_size=(1, 10**30)), "must be two whole numbers"),
        (lambda: partition.high_low(10, low_size=(10**12, 10**12)), "the 60 examples ran out"),
        (lambda: partition.unbalanced(clients=10**12), "iid: it needs 1000000000000 examples"),
        (lambda: partition.iid(10**30), "iid: clients is 10{30}, but it must be a whole number"),
    ],
)
def test_partitions_of_more_clients_than_anything(make: Callable[[], Any], words: str) -> None:
    examples = Examples(torch.zeros(60, 2), torch.arange(60) % 10)
    with pytest.raises(BadInput, match=words):
        make()(examples, np.random.default_rng(0))


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory.total()
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "memory.max")
    unlimited = memory.total()
    assert unlimited >= machine > 1e8
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total() == unlimited
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory.total() == 1e6


@pytest.mark.parametrize(
    "module", [nn.LazyLinear(3), nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 3))]
)
def test_lazy_modules(module: nn.Module) -> None:
    sentence = (
        "task 'blobs': the model has lazy layers, whose sizes come with the first batch: give"
    )
    for model in (module, lambda: module):
        with pytest.raises(BadInput, match=sentence):
            fit.check(Task(model, federation([5, 6])), "blobs")
