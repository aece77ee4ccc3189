"""Data in mapped files: the same runs as in memory, and memory for what is needed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import federation
from test_store import contents
from torch import nn

import rota
from rota import spread
from rota.errors import BadInput

SIZES = [9, 12, 20, 31, 8, 17]


@pytest.mark.parametrize("own_test", [False, True], ids=["shared test", "own tests"])
@pytest.mark.parametrize("model", [rota.models.logistic, rota.models.two_nn])
def test_a_run_on_mapped_data_leaves_the_same_bytes(
    tmp_path: Path, own_test: bool, model: object
) -> None:
    held = federation(SIZES, own_test=own_test)
    rota.data.save(held, tmp_path / "blobs")
    mapped = rota.data.packed(tmp_path / "blobs")
    assert (mapped.name, mapped.classes, mapped.shared_test) == ("blobs", 3, not own_test)
    for name, data, engine in (
        ("held", held, "auto"),
        ("mapped", mapped, "auto"),
        ("two", mapped, spread.Processes(2)),
    ):
        task = rota.Task(model, data, batch=5, lr=0.1)
        rota.run([task], rota.sampling.KVib(budget=3), rounds=3, engine=engine, out=tmp_path / name)
    assert contents(tmp_path / "held") == contents(tmp_path / "mapped")
    assert contents(tmp_path / "held") == contents(tmp_path / "two")


def own_memory() -> int:
    """The bytes of memory of this process that no file holds."""
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(words["RssAnon"].split()[0])


def first(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(shape[0], classes)


def test_what_is_mapped_stays_in_its_file(tmp_path: Path) -> None:
    """The inputs are half a gigabyte of holes in a file; a copy of them would be seen."""
    clients, each, features = 1000, 16, 8192
    shape = clients * each, features
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, shape)
    np.save(tmp_path / "y.npy", np.arange(shape[0]) % 3)
    np.save(tmp_path / "offsets.npy", np.arange(clients + 1) * each)
    np.save(tmp_path / "x_test.npy", np.zeros((10, features), np.float32))
    np.save(tmp_path / "y_test.npy", np.arange(10) % 3)
    data = rota.data.packed(tmp_path)
    assert data.train.x.nbytes > 5e8
    before = own_memory()
    rota.run([rota.Task(first, data, batch=5)], rota.sampling.Uniform(budget=10), rounds=2)
    assert own_memory() - before < data.train.x.nbytes / 2
    assert torch.equal(data.train.of(3)[0], torch.zeros(each, features))


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        rota.data.packed(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"there is no .*x\.npy"):
        rota.data.packed(tmp_path)
    rota.data.save(federation(SIZES), tmp_path)
    np.save(tmp_path / "x.npy", np.zeros((97, 4), np.uint8))
    with pytest.raises(BadInput, match=r"x\.npy holds uint8: write it as one array of float32 or"):
        rota.data.packed(tmp_path)
    (tmp_path / "x.npy").write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"x\.npy cannot be mapped"):
        rota.data.packed(tmp_path)
    rota.data.save(federation(SIZES), tmp_path)
    np.save(tmp_path / "offsets.npy", np.array([0, 50]))
    with pytest.raises(BadInput, match="offsets must be whole numbers that rise"):
        rota.run([rota.Task(first, rota.data.packed(tmp_path))], rota.sampling.Full(), rounds=1)
