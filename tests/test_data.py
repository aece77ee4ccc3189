"""The data sources, on their real files if those are at hand, and else on made-up ones."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import inspect
import json
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import federation, linear
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rota.data
from rota.data import SOURCES, Examples, Federation, files, idx, partition
from rota.data.files import Remote
from rota.data.owners import federate_owned, part, split
from rota.errors import BadInput
from rota.estimate import ESTIMATORS
from rota.recipe import registry
from rota.sampling import SAMPLERS


def module(name: str) -> ModuleType:
    """A source's module; rota.data.NAME is the function."""
    return importlib.import_module(f"rota.data.{name}")


def needs(source: str) -> Any:
    missing = f"the files of {source} are not on this machine"
    here = pytest.mark.skipif(not rota.data.at_hand(source), reason=missing)
    return pytest.param(source, marks=[pytest.mark.data, here], id=source)


@cache
def load(source: str) -> Federation:
    return SOURCES[source]()


FREE = ["digits", "synthetic", "synthetic-kvib"]
FILED = [
    needs(name)
    for name in (
        "mnist",
        "fashion-mnist",
        "cifar10",
        "mnist-writers",
        "femnist",
        "shakespeare",
        "heart",
    )
]


def same(a: Federation, b: Federation) -> bool:
    for mine, theirs in ((a.train, b.train), (a.test, b.test)):
        if not torch.equal(mine.x, theirs.x) or not torch.equal(mine.y, theirs.y):
            return False
    return np.array_equal(a.train.offsets, b.train.offsets)


# --- all sources ---


def test_registry_is_complete() -> None:
    named = {p.id for p in FILED} | set(FREE) | {"folder", "packed", "csv", "leaf"}
    assert set(SOURCES) == named
    for name, source in SOURCES.items():
        assert getattr(rota.data, name.replace("-", "_")) is source
        first = (inspect.getdoc(source) or "").split("\n")[0]
        assert 20 < len(first) < 140
        assert first[-1] in ".)"


@pytest.mark.parametrize("source", [*FREE, *FILED])
def test_every_source(source: str) -> None:
    fed = load(source)
    assert fed.name == source
    assert fed.clients > 1
    for half in (fed.train, fed.test):
        assert half.offsets[0] == 0
        assert half.offsets[-1] == len(half.x) == len(half.y) > 0
        assert half.x.dtype == (torch.int64 if source == "shakespeare" else torch.float32)
        assert half.x.is_contiguous()
        assert torch.isfinite(half.x).all()
        assert half.y.dtype == torch.int64
        assert half.y.shape == (len(half.x),)
        assert half.x.shape[1:] == fed.shape
        assert 0 <= half.y.min() <= half.y.max() < fed.classes
    assert fed.train.sizes.min() >= 1
    if not fed.shared_test:
        assert fed.test.sizes.min() >= 1


@pytest.mark.parametrize(
    "source",
    ["digits", "synthetic", "synthetic-kvib", *(p for p in FILED if p.id in ("femnist", "heart"))],
)
def test_the_seed_decides(source: str) -> None:
    assert same(load(source), SOURCES[source]())
    if "seed" in inspect.signature(SOURCES[source]).parameters:
        assert not same(load(source), SOURCES[source](seed=1))


SHARED_TEST = {
    "digits": 355,
    "mnist": 10_000,
    "fashion-mnist": 10_000,
    "cifar10": 10_000,
    "mnist-writers": 10_000,
}


@pytest.mark.parametrize("source", ["digits", *(p for p in FILED if p.id in SHARED_TEST)])
def test_shared_tests_can_be_matched(source: str) -> None:
    assert load(source).shared_test
    assert len(load(source).test.y) == SHARED_TEST[source]
    if source != "cifar10":  # 600 MB once is enough
        matched = SOURCES[source](matched_test=True)
        assert matched.test.clients == matched.clients == load(source).clients
        assert len(matched.test.y) == SHARED_TEST[source]


# --- synthetic ---


def test_digits() -> None:
    fed = rota.data.digits(partition=partition.shards(clients=10, per_client=2))
    assert fed.clients == 10
    assert fed.shape == (1, 8, 8)
    assert len(fed.train.y) + len(fed.test.y) == 1797
    assert (fed.train.x.min(), fed.train.x.max()) == (0, 1)
    assert np.bincount(fed.test.y).min() >= 34  # a fifth of each class
    assert load("digits").clients == 20


def test_kvib_is_the_published_set() -> None:
    fed = load("synthetic-kvib")
    sizes = fed.train.sizes + fed.test.sizes
    assert sizes[:10].tolist() == [76, 725, 597, 84, 495, 170, 81, 75, 107, 417]
    assert (sizes.sum(), sizes.max(), np.median(sizes)) == (36_068, 5_744, 110.5)
    assert fed.train.sizes.sum() == 32_417
    assert np.sort(sizes)[-10:].sum() / sizes.sum() == pytest.approx(0.631, abs=5e-4)
    # values of the published files: first training and test examples of clients 0 and 99
    x, y = fed.train.of(0)
    assert x[0, :4].tolist() == pytest.approx([0.6141547, 0.8223272, -0.05430537, 1.0229747])
    assert y[:8].tolist() == [0, 5, 0, 0, 0, 0, 0, 0]
    assert x[-1, -2:].tolist() == pytest.approx([-0.11691245, -1.4790092])
    assert fed.test.of(0)[0][0, :4].tolist() == pytest.approx(
        [0.6894977, -0.4805753, -0.3063833, 0.28198546]
    )
    assert fed.test.of(99)[0][0, :3].tolist() == pytest.approx([-0.3335979, 0.6342632, 1.1168684])


@given(
    clients=st.integers(1, 40),
    more=st.integers(0, 1100),
    examples=st.integers(2, 30),
    dim=st.integers(1, 6),
    iid=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_synthetic_clients_do_not_depend_on_their_number(
    clients: int, more: int, examples: int, dim: int, iid: bool
) -> None:
    few = rota.data.synthetic(clients=clients, examples=examples, dim=dim, iid=iid)
    many = rota.data.synthetic(clients=clients + more, examples=examples, dim=dim, iid=iid)
    assert (few.train.sizes == max(1, examples * 9 // 10)).all()
    assert (few.train.sizes + few.test.sizes == examples).all()
    for a, b in ((few.train, many.train), (few.test, many.test)):
        assert torch.equal(a.x, b.x[: len(a.x)])
        # a product of another shape may round otherwise
        assert (a.y == b.y[: len(a.y)]).float().mean() > 0.99


def test_synthetic_alpha_beta_and_iid() -> None:
    def spread(fed: Federation) -> float:
        """The deviation of the clients' mean inputs, over all coordinates."""
        return float(np.std([float(fed.train.of(i)[0].mean()) for i in range(fed.clients)]))

    def labels(fed: Federation) -> float:
        """The mean share of a client's most frequent label."""
        counts = fed.train.label_counts(10)
        return float((counts.max(1) / counts.sum(1)).mean())

    kwargs = {"clients": 200, "examples": 100}
    alike = rota.data.synthetic(alpha=0, beta=0, iid=True, **kwargs)
    plain = rota.data.synthetic(alpha=0, beta=0, **kwargs)
    wide = rota.data.synthetic(alpha=0, beta=3, **kwargs)
    assert spread(alike) < 0.03
    assert spread(plain) == pytest.approx(60**-0.5, rel=0.2)  # 60 coordinates with deviation 1
    assert spread(wide) == pytest.approx(3, rel=0.2)
    assert labels(alike) < labels(plain) < 1
    deviation = alike.train.x.std(0)  # j^-0.6
    assert deviation.numpy() == pytest.approx(np.arange(1, 61) ** -0.6, rel=0.05)
    sizes = rota.data.synthetic(clients=2000, dim=1, classes=2).train.sizes
    assert sizes.min() >= 45
    assert np.median(sizes) == pytest.approx(0.9 * (50 + np.exp(4)), rel=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1},
        {"beta": float("nan")},
        {"clients": 0},
        {"dim": 0},
        {"classes": 1},
        {"examples": 1},
    ],
)
def test_synthetic_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        rota.data.synthetic(**wrong)  # type: ignore[arg-type]


# --- owners ---


@given(
    groups=hnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 5)),
    seed=st.integers(0, 9),
)
def test_split_takes_a_fifth_of_each_group(groups: np.ndarray, seed: int) -> None:
    chosen = split(groups, np.random.default_rng(seed))
    sizes = np.bincount(groups)
    assert np.bincount(groups[chosen], minlength=len(sizes)).tolist() == (sizes // 5).tolist()


def owned() -> tuple[Examples, Examples]:
    groups = np.array([2, 0, 1, 2, 0, 1, 3, 2, 2, 0])
    x = torch.from_numpy(groups).float()[:, None]
    both = Examples(x, torch.from_numpy(groups % 2), groups)
    return part(both, np.arange(10) >= 7)


def test_test_examples_stay_with_their_owners() -> None:
    train, test = owned()
    fed = federate_owned("toy", train, test, None, classes=2)
    assert fed.train.sizes.tolist() == [2, 2, 2, 1]
    assert fed.test.sizes.tolist() == [1, 0, 2, 0]
    for client in range(4):
        assert all((half.of(client)[0] == client).all() for half in (fed.train, fed.test))
    first = federate_owned("toy", train, test, partition.natural(limit=2), classes=2)
    assert first.train.sizes.tolist() == [2, 2]
    assert first.test.sizes.tolist() == [1, 0]
    assert federate_owned("toy", train, test, partition.iid(clients=3), classes=2).shared_test
    dealt = partition.iid(clients=3)
    assert not federate_owned("toy", train, test, dealt, classes=2, matched_test=True).shared_test


# --- IDX and MNIST's relatives ---


def write_idx(path: Path, array: np.ndarray) -> Path:
    kind = {"uint8": 8, "int32": 12}[str(array.dtype)]
    head = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + array.astype(array.dtype.newbyteorder(">")).tobytes(), 1))
    return path


@given(
    array=hnp.arrays(
        st.sampled_from([np.dtype(np.uint8), np.dtype(np.int32)]),
        hnp.array_shapes(max_dims=3, min_side=0),
    ),
    cut=st.integers(1, 40),
)
@settings(deadline=None)
def test_idx(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, cut: int) -> None:
    path = write_idx(tmp_path_factory.mktemp("idx") / "f.gz", array)
    back = idx.read_idx(path)
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    whole = gzip.decompress(path.read_bytes())
    for damaged in (
        path.read_bytes()[:-cut],
        gzip.compress(whole[:-cut], 1),
        gzip.compress(whole + b"x", 1),
        b"\x89PNG",
        gzip.compress(b"", 1),
    ):
        path.write_bytes(damaged)
        with pytest.raises(BadInput) as caught:
            idx.read_idx(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", [p for p in FILED if "mnist" in str(p.id) and p.id != "femnist"])
def test_mnist_and_relatives(source: str) -> None:
    fed = load(source)
    assert fed.shape == (1, 28, 28)
    assert len(fed.train.y) == 60_000
    assert (fed.train.x.min(), fed.train.x.max()) == (0, 1)
    if source == "mnist-writers":
        assert fed.clients == 539
        assert (fed.train.sizes.min(), fed.train.sizes.max()) == (19, 131)
        different = (fed.train.label_counts(10) > 0).sum(axis=1)
        assert different.min() >= 5
    else:
        assert (fed.train.sizes == 600).all()


@pytest.mark.parametrize("source", [needs("mnist")])
def test_a_truncated_file_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = files.find(source, module(source).FILES)
    (tmp_path / source).mkdir()
    for name, path in found.items():
        data = path.read_bytes()
        if name.startswith("t10k-labels"):
            data = data[: len(data) // 2]
        (tmp_path / source / name).write_bytes(data)
    monkeypatch.setenv("ROTA_DATA", str(tmp_path))
    with pytest.raises(BadInput, match="is damaged") as caught:
        SOURCES[source]()
    assert str(tmp_path / source / "t10k-labels-idx1-ubyte.gz") in str(caught.value)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any data and without a network."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("ROTA_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(files, "_download", lambda *_: "no network")
    return tmp_path / "own"


@pytest.mark.parametrize("source", [str(p.id) for p in FILED])
@pytest.mark.usefixtures("empty")
def test_without_files_it_says_what_to_do(source: str) -> None:
    assert not rota.data.at_hand(source)
    with pytest.raises(BadInput, match=r"into \$ROTA_DATA/.*'digits' or 'synthetic'") as caught:
        SOURCES[source]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", FREE)
@pytest.mark.usefixtures("empty")
def test_some_need_no_files(source: str) -> None:
    assert rota.data.at_hand(source)
    assert SOURCES[source]().clients > 1


# --- CIFAR-10 ---


@pytest.mark.parametrize("form", ["files", "inner folder", "archive", "damaged archive"])
def test_cifar10_layouts(form: str, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar = module("cifar10")
    rows = np.random.default_rng(0).integers(0, 256, (6, 20, 3073), np.uint8)
    rows[:, :, 0] %= 10
    names = [batch.name for batch in cifar.BATCHES]
    sums = [hashlib.md5(batch.tobytes()).hexdigest() for batch in rows]
    pairs = zip(names, sums, strict=True)
    batches = tuple(Remote(name, (md5,), aliases=(cifar.INSIDE + name,)) for name, md5 in pairs)
    monkeypatch.setattr(cifar, "BATCHES", batches)
    root = empty / "cifar10"
    inner = root / cifar.INSIDE if form != "files" else root
    inner.mkdir(parents=True)
    for name, batch in zip(names, rows, strict=True):
        data = batch.tobytes()
        (inner / name).write_bytes(data[1:] if form == "damaged archive" else data)
    if "archive" in form:
        with tarfile.open(root / cifar.ARCHIVE.name, "w:gz") as archive:
            archive.add(inner, cifar.INSIDE.rstrip("/"))
        for name in names:
            (inner / name).unlink()
        whole = hashlib.md5((root / cifar.ARCHIVE.name).read_bytes()).hexdigest()
        monkeypatch.setattr(cifar, "ARCHIVE", Remote(cifar.ARCHIVE.name, (whole,)))
    if form == "damaged archive":
        with pytest.raises(BadInput, match=r"data_batch_1\.bin in .*tar\.gz is missing or damaged"):
            SOURCES["cifar10"]()
        return
    fed = SOURCES["cifar10"](partition=partition.iid(clients=1))
    assert fed.shape == (3, 32, 32)
    assert (len(fed.train.y), len(fed.test.y)) == (100, 20)
    assert torch.equal(fed.test.y, torch.from_numpy(rows[5, :, 0].astype(np.int64)))
    blue = rows[5, 3, 1 + 2048 + 5 * 32 + 7] / 255  # picture 3, line 5, column 7
    assert fed.test.x[3, 2, 5, 7].item() == pytest.approx((blue - 0.4465) / 0.2616, rel=1e-5)


@pytest.mark.parametrize("source", [needs("cifar10")])
def test_cifar10_is_standardised(source: str) -> None:
    x = load(source).train.x
    assert x.mean((0, 2, 3)).numpy() == pytest.approx(np.zeros(3), abs=1e-3)
    assert x.std((0, 2, 3)).numpy() == pytest.approx(np.ones(3), abs=1e-3)
    assert (np.bincount(load(source).train.y) == 5000).all()


# --- FEMNIST ---


def write_leaf(path: Path, users: dict[str, int], start: float = 0.0) -> None:
    """LEAF JSON: user u's image k is filled with start + k, label k."""
    data = {
        user: {"x": [[start + k] * 784 for k in range(count)], "y": list(range(count))}
        for user, count in users.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"users": list(users), "num_samples": list(users.values()), "user_data": data})
    )


@pytest.mark.parametrize("layout", ["femnist/data", "femnist", "femnist-leaf-sample"])
def test_femnist_in_leafs_layout(layout: str, empty: Path) -> None:
    write_leaf(empty / layout / "train/a.json", {"w2": 3, "w0": 2})
    write_leaf(empty / layout / "train/b.json", {"w1": 4})
    write_leaf(empty / layout / "test/a.json", {"w0": 1, "w1": 2}, start=100)
    fed = SOURCES["femnist"]()
    assert fed.train.sizes.tolist() == [2, 4, 3]
    assert fed.test.sizes.tolist() == [1, 2, 0]
    assert fed.shape == (1, 28, 28)
    assert fed.classes == 62
    assert fed.test.of(1)[0][:, 0, 0, 0].tolist() == [100, 101]
    assert SOURCES["femnist"](partition=partition.iid(clients=2)).shared_test


@pytest.mark.parametrize("other", ["w0", "w7"])
def test_femnist_with_writers_set_apart(other: str, empty: Path) -> None:
    write_leaf(empty / "femnist/data/train/a.json", {"w0": 2, "w1": 3})
    write_leaf(empty / "femnist/data/test/a.json", {other: 2, "w9": 1})
    fed = SOURCES["femnist"]()
    assert fed.train.sizes.tolist() == [2, 3]
    assert fed.shared_test
    assert len(fed.test.y) == 3


def test_femnist_flat_is_split(empty: Path) -> None:
    write_leaf(empty / "femnist-leaf-sample/0.json", {"b": 10})
    write_leaf(empty / "femnist-leaf-sample/1.json", {"a": 4, "b": 1})
    fed = SOURCES["femnist"]()
    assert fed.train.sizes.tolist() == [4, 9]
    assert fed.test.sizes.tolist() == [0, 2]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"user_data": {"a": {"x": [[0, 1]], "y": [0]}}}',
        '{"user_data": {"a": {"x": [], "y": [3]}}}',
    ],
)
def test_femnist_damaged_json_is_named(text: str, empty: Path) -> None:
    path = empty / "femnist/bad.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        SOURCES["femnist"]()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", [needs("femnist")])
def test_femnist_sample(source: str) -> None:
    fed = load(source)
    if fed.clients != 28:
        pytest.skip("another FEMNIST than LEAF's sample is installed")
    assert len(fed.train.y) + len(fed.test.y) == 1761
    assert (fed.train.x.min(), fed.train.x.max()) == (0, 1)
    assert (fed.test.sizes == (fed.train.sizes + fed.test.sizes) // 5).all()


# --- Shakespeare ---

PLAY = b"""<?xml version="1.0"?><!DOCTYPE PLAY SYSTEM "play.dtd"><PLAY><TITLE>T</TITLE><ACT><SCENE>
<SPEECH><SPEAKER/><LINE>Nobody says this.</LINE></SPEECH>
<SPEECH><SPEAKER>Ann</SPEAKER><LINE><STAGEDIR>Aside</STAGEDIR> One  line,</LINE>
<LINE>and another $.</LINE></SPEECH>
<SPEECH><SPEAKER>BOB</SPEAKER><SPEAKER>ANN</SPEAKER><LINE>Together</LINE></SPEECH>
<SPEECH><SPEAKER>ANN </SPEAKER><LINE>Again</LINE></SPEECH>
</SCENE></ACT></PLAY>"""


def test_roles() -> None:
    plays = module("shakespeare")
    ann, bob = "One line, and another $.\nAgain", "Together"
    assert plays.roles([PLAY, PLAY]) == {
        (0, "ANN"): ann,
        (0, "BOB"): bob,
        (1, "ANN"): ann,
        (1, "BOB"): bob,
    }
    assert len(plays.LETTERS) == len(set(plays.LETTERS)) == 80
    codes = plays.encode("a\nZ$\u00e9")
    assert "".join(plays.LETTERS[code] for code in codes) == "a\nZ ?"


@given(length=st.integers(0, 900), stride=st.integers(1, 100))
def test_windows_do_not_leak(length: int, stride: int) -> None:
    plays = module("shakespeare")
    text = "".join(np.random.default_rng(length).choice(list(plays.LETTERS), length))
    codes, cut = plays.encode(text), len(text) * 4 // 5
    for windows, own in zip(plays._cut(text, stride), (codes[:cut], codes[cut:]), strict=True):
        assert len(windows) == max(0, (len(own) - 81) // stride + 1)
        for row, window in enumerate(windows):
            assert np.array_equal(window, own[row * stride : row * stride + 81])


@pytest.mark.parametrize("source", [needs("shakespeare")])
def test_shakespeare(source: str) -> None:
    plays = module(source)
    assert len(plays.FILES) == 37
    paths = files.find(source, plays.FILES)
    texts = plays.roles(paths[file.name].read_bytes() for file in plays.FILES)
    assert len(texts) == 1351
    assert sum(text.count("\n") + 1 for text in texts.values()) == 31_009
    fed = load(source)
    long = [text for text in texts.values() if len(text) - len(text) * 4 // 5 > 80]
    assert fed.clients == len(long) == 859
    for client in (0, 400, 858):
        x, y = fed.train.of(client)
        assert "".join(plays.LETTERS[c] for c in x[0]) == long[client][:80].replace("$", " ")
        # with stride 80 the next window begins with the letter to be predicted
        assert torch.equal(y[:-1], x[1:, 0])
    some = SOURCES[source](least=50)
    assert 0 < some.clients < fed.clients
    assert some.train.sizes.min() >= 50
    with pytest.raises(BadInput, match="least"):
        SOURCES[source](least=10**6)
    with pytest.raises(BadInput, match="stride"):
        SOURCES[source](stride=0)


# --- heart ---


@pytest.mark.parametrize("source", [needs("heart")])
def test_heart(source: str) -> None:
    fed = load(source)
    assert (fed.train.sizes + fed.test.sizes).tolist() == [303, 294, 123, 200]
    assert fed.test.sizes.tolist() == [60, 58, 24, 40]
    assert fed.shape == (23,)
    assert fed.train.x[:, :13].mean(0).numpy() == pytest.approx(np.zeros(13), abs=1e-5)
    assert fed.train.x[:, :13].std(0, correction=0).numpy() == pytest.approx(np.ones(13), abs=1e-4)
    assert set(fed.train.x[:, 13:].unique().tolist()) == {0, 1}
    both = torch.cat([fed.train.y, fed.test.y])
    # ill patients in Cleveland, Hungary, Switzerland and Long Beach
    assert both.sum() == 139 + 106 + 115 + 149
    # the Swiss wrote 0 for every cholesterol, the second measurement that is missing somewhere
    swiss = fed.train.of(2)[0][:, 13:]
    assert swiss[:, 1].all()
    assert SOURCES[source](partition=partition.iid(clients=3)).shared_test


# --- the user's own data ---


X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("empty", [None, ([], []), (X[:0], Y[:0]), (torch.zeros(0, 9), [])])
@pytest.mark.parametrize("first", [False, True])
def test_from_clients_without_data(empty: Any, first: bool) -> None:
    pairs = [empty, (X, Y)] if first else [(X, Y), empty]
    fed = rota.from_clients(pairs, pairs)
    assert fed.train.sizes.tolist() == fed.test.sizes.tolist() == [6 * (not first), 6 * first]
    assert (fed.classes, fed.shape, fed.train.y.dtype) == (3, (2,), torch.int64)
    assert np.array_equal(fed.train.of(int(first))[0], X)


def test_from_clients_takes_pairs_as_they_come() -> None:
    assert rota.from_clients(zip([X, X], [Y, Y], strict=True), (X, Y)).clients == 2
    lists: Any = [[X.tolist(), Y.tolist()]]
    assert rota.from_clients(lists, [(X, Y)]).clients == 1


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        ([], (X, Y), "train is empty: give a list with one (x, y) pair per client"),
        (None, (X, Y), "train is None: give a list with one (x, y) pair per client"),
        (
            {"a": (X, Y)},
            (X, Y),
            "train is a dict: give a list with one (x, y) pair per client",
        ),
        (
            (X, Y),
            (X, Y),
            "train is one pair instead of a list: give a list with one (x, y) pair per client",
        ),
        (
            (X[:2], Y[:2]),
            (X, Y),
            "train is one pair instead of a list: give a list with one (x, y) pair per client",
        ),
        (
            [(X, Y)],
            [X, Y],
            "test is one pair instead of a list: give a list with one (x, y) pair per client, or "
            "one pair (a tuple) that all share",
        ),
        (
            [(X, Y)],
            None,
            "test is None: give a list with one (x, y) pair per client, or one pair (a tuple)",
        ),
        (
            [(X, Y), (X, Y, Y)],
            (X, Y),
            "train client 1 is 3 things: give a pair (x, y), or None if it has no data",
        ),
        ([(X, Y)], (X, Y, Y), "test is 3 things: give a pair (x, y), or None if it has no data"),
        (
            [(X, Y), X, (X, Y)],
            (X, Y),
            "train client 1 is a ndarray: give a pair (x, y), or None if it has no data",
        ),
        ([(X, Y), (X, Y[:5])], (X, Y), "train client 1 has 6 examples but 5 targets"),
        ([(X, Y), (X, None)], (X, Y), "train client 1: y is no array of numbers ("),
        (
            [(X, Y), (X, 3)],
            (X, Y),
            "train client 1: y is a single number: give one row per example",
        ),
        (
            [(X, Y), (X, ["a"] * 6)],
            (X, Y),
            "train client 1: y holds texts: give numbers (classes count from 0)",
        ),
        (
            [(X, Y), (X, np.array(["a"] * 6))],
            (X, Y),
            "train client 1: y holds texts: give numbers (classes count from 0)",
        ),
        (
            [(X, Y), (X, np.array(["a"] * 6, object))],
            (X, Y),
            "train client 1: y holds texts: give numbers",
        ),
        ([(X, Y)], (["word"], [0]), "test: x holds texts: give numbers"),
        (
            [(X, Y), ([[1.0, 2.0], [3.0]], [0, 1])],
            (X, Y),
            "train client 1: x is no array of numbers (expected sequence of length 2 at dim 1",
        ),
        (
            [(X, Y), (X[:, :1], Y)],
            (X, Y),
            "train client 1 has examples of shape (1,), but those of client 0 have shape (2,)",
        ),
        (
            [None, (X, Y), (X, Y[:, None])],
            (X, Y),
            "train client 2 has targets that are whole numbers of shape (1,), but those of client "
            "1 are whole numbers of shape ()",
        ),
        (
            [None, ([], [])],
            (X, Y),
            "train has no examples: all of its 2 pairs are empty, and at least one client must",
        ),
        ([(X, Y)], ([], []), "test has no examples: all of its 1 pairs are empty"),
        (
            [(X, Y)] * 3,
            [(X, Y)] * 2,
            "test has 2 pairs and train 3: give one that all share, or one per client",
        ),
        (
            [(X, Y), (X, Y.astype(float))],
            (X, Y),
            "train client 1 has targets that are real numbers of shape (), but those of client 0",
        ),
        (
            [(X.astype(int), Y)],
            (X, Y),
            "test examples are real numbers of shape (2,), but training examples whole numbers",
        ),
        (
            [(X, Y)],
            (X, Y.astype(float)),
            "test targets are real numbers of shape (), but training targets whole numbers",
        ),
        ([(X, Y)], (X, [2**70] * 6), "test: y is no array of numbers ("),
        (
            [(X, Y)],
            (X[:, :1], Y),
            "test examples are real numbers of shape (1,), but training examples real numbers of",
        ),
    ],
)
def test_from_clients_names_the_mistake(train: Any, test: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as mistake:
        rota.from_clients(train, test)
    assert str(mistake.value).startswith(sentence)
    assert "\n" not in str(mistake.value)


def test_a_federation_shows_itself_in_a_line() -> None:
    fed = rota.from_clients([(X, Y), None], (X[:3], Y[:3]), name="mine")
    assert repr(fed) == "Federation('mine', 2 clients, 6 + 3 examples of shape (2,), 3 classes)"
    assert repr(fed.train) == "Part(2 clients, 6 examples of shape (2,))"
    assert repr(fed) in repr(rota.Task(rota.models.logistic, fed))


def write_clients(
    root: Path, clients: int = 12, own_test: bool = False, **more: np.ndarray
) -> Path:
    root.mkdir(exist_ok=True)
    for client in range(clients):
        arrays = {
            "x": np.full((client + 1, 2), client, ">f8"),
            "y": np.arange(client + 1, dtype=np.uint16) % 3,
        } | more
        tests = {"x_test": arrays["x"][:1], "y_test": arrays["y"][:1]} if own_test else {}
        np.savez(root / f"client{client}.npz", **arrays, **tests)
    if not own_test:
        np.savez(root / "test.npz", x=np.zeros((5, 2)), y=np.zeros(5, int))
    return root


@pytest.mark.parametrize("own_test", [False, True])
def test_folder(tmp_path: Path, own_test: bool) -> None:
    fed = rota.data.folder(str(write_clients(tmp_path / "mine", own_test=own_test)))
    assert fed.name == "mine"
    assert fed.classes == 3
    assert fed.train.sizes.tolist() == list(range(1, 13))  # client10 after client9
    assert fed.train.x.dtype == torch.float32
    assert all((fed.train.of(client)[0] == client).all() for client in range(12))
    assert fed.shared_test != own_test
    assert rota.data.folder(tmp_path / "mine", classes=7).classes == 7


def test_folder_of_images_and_real_targets(tmp_path: Path) -> None:
    x = np.full((4, 3, 2), 255, np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.zeros(4), x_test=x, y_test=np.zeros(4))
    fed = rota.data.folder(tmp_path)
    assert (fed.train.x == 1).all()
    assert fed.classes == 0


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "cannot be read"),
    "not a zip": (lambda p: p.write_bytes(b"hello"), "cannot be read"),
    "pickled": (
        lambda p: np.savez(p, x=np.array([{}], object), y=np.zeros(1, int)),
        "cannot be read",
    ),
    "one array": (
        lambda p: (
            np.save(p.with_suffix(".npy"), np.zeros((1, 2))),
            p.with_suffix(".npy").replace(p),
        ),
        "cannot be read",
    ),
    "no y": (lambda p: np.savez(p, x=np.zeros((1, 2))), "no array named y"),
    "words": (
        lambda p: np.savez(p, x=np.array([["a", "b"]]), y=np.zeros(1, int)),
        "array of numbers",
    ),
    "too few targets": (
        lambda p: np.savez(p, x=np.zeros((2, 2)), y=np.zeros(1, int)),
        "same number of both",
    ),
    "no examples": (lambda p: np.savez(p, x=np.zeros((0, 2)), y=np.zeros(0, int)), "at least one"),
    "negative labels": (lambda p: np.savez(p, x=np.zeros((1, 2)), y=np.array([-1])), "negative"),
    "another shape": (
        lambda p: np.savez(p, x=np.zeros((1, 3)), y=np.zeros(1, int)),
        "make them agree",
    ),
    "another kind": (lambda p: np.savez(p, x=np.zeros((1, 2)), y=np.zeros(1)), "make them agree"),
    "NaN": (lambda p: np.savez(p, x=np.full((1, 2), np.nan), y=np.zeros(1, int)), "NaN"),
    "two tests": (
        lambda p: np.savez(p, x=np.zeros((1, 2)), y=np.zeros(1, int), x_test=0, y_test=0),
        "keep only one kind",
    ),
}


@pytest.mark.parametrize("file", ["client7.npz", "test.npz"])
@pytest.mark.parametrize("broken", BROKEN)
def test_folder_names_the_broken_file(tmp_path: Path, broken: str, file: str) -> None:
    root = write_clients(tmp_path / "mine")
    spoil, message = BROKEN[broken]
    spoil(root / file)
    with pytest.raises(BadInput, match=message) as caught:
        rota.data.folder(root)
    assert str(root / file) in str(caught.value)


def test_folder_without_files_or_tests(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        rota.data.folder(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"has no \.npz files"):
        rota.data.folder(tmp_path)
    (write_clients(tmp_path / "mine") / "test.npz").unlink()
    with pytest.raises(BadInput, match="has no test set"):
        rota.data.folder(tmp_path / "mine")


class Rows:
    """The part of a Hugging Face dataset that the adapter uses."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def with_format(self, kind: str) -> Rows:
        assert kind == "numpy"
        return self

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        return {name: values[rows] for name, values in self.columns.items()}


def flower(parts: dict[str, list[Rows]], **splits: Rows) -> Any:
    """The part of a FederatedDataset that the adapter uses."""
    return SimpleNamespace(
        partitioners={
            split: SimpleNamespace(num_partitions=len(rows)) for split, rows in parts.items()
        },
        load_partition=lambda i, split: parts[split][i],
        load_split=splits.__getitem__,
    )


def pictures(count: int, shape: tuple[int, ...]) -> Rows:
    return Rows(
        id=["a"] * count, img=np.full((count, *shape), 51, np.uint8), label=np.arange(count)
    )


@pytest.mark.parametrize(("shape", "expected"), [((4, 5), (1, 4, 5)), ((4, 5, 3), (3, 4, 5))])
def test_from_flower_pictures(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    fed = rota.data.from_flower(
        flower({"train": [pictures(2, shape), pictures(4, shape)]}, test=pictures(6, shape))
    )
    assert fed.shape == expected
    assert fed.train.sizes.tolist() == [2, 4]
    assert fed.shared_test
    assert fed.classes == 6
    assert fed.train.x.unique().tolist() == pytest.approx([0.2])


def test_from_flower_tables() -> None:
    def table(count: int) -> Rows:
        return Rows(
            age=np.arange(count),
            name=np.array(["n"] * count),
            weight=np.full(count, 0.5),
            ill=np.ones(count, int),
        )

    data = flower({"train": [table(2), table(3)], "test": [table(1), table(1)]})
    fed = rota.data.from_flower(data, label="ill")
    assert not fed.shared_test
    assert fed.train.of(1)[0].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5]]
    assert rota.data.from_flower(data, features="weight", label="ill").shape == (1,)
    for wrong, message in (
        ({}, "'label'.*age, name, weight, ill"),
        ({"label": "sick"}, "'sick'"),
        ({"label": "ill", "features": "name"}, "'name'"),
        ({"label": "ill", "train": "training"}, "'training'"),
    ):
        with pytest.raises(BadInput, match=message):
            rota.data.from_flower(data, **wrong)


def test_from_flower_itself(tmp_path: Path) -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    import datasets
    from flwr_datasets import FederatedDataset

    images = np.random.default_rng(0).integers(0, 256, (60, 4, 5), np.uint8)
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}
    )
    for split_name in ("train", "test"):
        rows = datasets.Dataset.from_dict(
            {"image": list(images), "label": [i % 3 for i in range(60)]}, features=kinds
        )
        rows.to_parquet(tmp_path / f"{split_name}.parquet")
    found = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "test")}
    data = FederatedDataset(
        dataset="parquet",
        data_files=found,
        partitioners={"train": 7},
        cache_dir=str(tmp_path),
        shuffle=False,
    )
    fed = rota.data.from_flower(data)
    assert fed.clients == 7
    assert fed.classes == 3
    assert fed.shared_test
    assert torch.equal(fed.test.x, torch.from_numpy(images).float().div(255).unsqueeze(1))
    assert len(fed.train.y) == 60


# --- clients without data


FEW: dict[str, dict[str, object]] = {
    "pow-d": {"candidates": 3},
    "cpow-d": {"candidates": 3},
    "rpow-d": {"candidates": 3},
}
PAIRS = [(sampler, "stale-vre" if sampler == "mmfl-vre" else "fedavg") for sampler in SAMPLERS]
PAIRS += [
    ("mmfl-gvr" if estimator == "stale-vr" else "mmfl-random", estimator)
    for estimator in ESTIMATORS
]


@pytest.mark.parametrize(("sampler", "estimator"), PAIRS)
def test_with_several_models_a_client_may_have_no_data_at_all(sampler: str, estimator: str) -> None:
    tasks = [
        rota.Task(linear, federation([5, 0, 20, 0, 12, 9]), name="a"),
        rota.Task(linear, federation([7, 0, 0, 30, 12, 9], seed=1), name="b"),
    ]
    options: dict[str, Any] = {}
    if "budget" in registry.options("samplers", SAMPLERS[sampler]):
        options = {"budget": 2, **FEW.get(sampler, {})}
    run = rota.run(
        tasks,
        SAMPLERS[sampler](**options),
        estimator=ESTIMATORS[estimator](),
        rounds=6,
        engine="sequential",
    )
    a = {client for line in run.records for client in line["cohort"]["a"]}
    b = {client for line in run.records for client in line["cohort"]["b"]}
    assert a <= {0, 2, 4, 5}
    assert b <= {0, 3, 4, 5}
    assert a | b
    assert run.summary["failures"] == 0
