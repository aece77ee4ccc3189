"""What an attack found: long names, full disks, folders that vanish, numbers that overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from conftest import federation, linear

from rota.errors import BadInput
from rota.experiment import Experiment
from rota.plan import Task
from rota.running.run import execute
from rota.sampling import Full

SIZES = [5, 12, 7, 9]


def make(**changes: Any) -> Experiment:
    tasks = [Task(linear, federation(SIZES), name="line")]
    given = {"tasks": tasks, "sampler": Full(), "rounds": 2, "seed": 3}
    return Experiment(**{**given, **changes})


@pytest.mark.parametrize("name", ["x" * 300, "ü" * 60, "/" * 90])
def test_a_name_too_long_for_a_file_is_refused_before_round_1(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="is too long for a file's name: give it a shorter name"):
        execute(make(tasks=[Task(linear, federation(SIZES), name=name)]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    name = name[: 200 // len(quote(name[0], safe=""))]
    longest = make(tasks=[Task(linear, federation(SIZES), name=name)], rounds=1)
    execute(longest, engine="sequential", out=tmp_path / "run")
    assert len(list((tmp_path / "run" / "models").iterdir())) == 1
