"""Sub-models in company: samplers, several models, groups, availability, from recipes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_cli import call, lines

INVARIANT = ("capacity=stragglers", "submodel=invariant", "capacity.margin=0.05")
UNEQUAL = ("devices.gflops=0.001", "devices.mbps=10000", "devices.spread=0.6")
COMPANY = {
    "kvib": ("fluid-digits", ("sampler=kvib", "sampler.budget=8", "estimator=unbiased")),
    "several models": ("mmfl-digits", (*INVARIANT, *UNEQUAL)),
    "several models, mmfl-kvib": ("mmfl-digits", (*INVARIANT, *UNEQUAL, "sampler=mmfl-kvib")),
    "availability": ("fluid-digits", ("availability.chance=0.7", "availability.memory=0.5")),
    "groups": ("selective-digits", (*INVARIANT, *UNEQUAL)),
    "groups, kvib": (
        "selective-digits",
        (*INVARIANT, *UNEQUAL, "sampler=kvib", "sampler.budget=6", "estimator=unbiased"),
    ),
    "all of it": (
        "mmfl-digits",
        (
            *INVARIANT,
            *("sampler=mmfl-kvib", "estimator=unbiased", "availability.chance=0.8"),
            *("devices=spread-of-4", "devices.gflops=0.001", "devices.load=[0.25,0.5,0.75]"),
            *("devices.spell=3", "devices.noise=0.05", "server=adam", "server.lr=0.01"),
        ),
    ),
}


@pytest.mark.parametrize("name", COMPANY)
def test_invariant_dropout_runs_from_a_recipe_in_any_company(name: str, tmp_path: Path) -> None:
    recipe, changes = COMPANY[name]
    words = [word for change in (*changes, "rounds=10") for word in ("--set", change)]
    outcome = call("run", recipe, *words, "--engine", "sequential", "--out", tmp_path / "a")
    assert outcome.status == 0, outcome.err
    records = lines(tmp_path / "a")
    assert not any(record["failures"] for record in records)
    assert len(records[-1]["models"]) == (1 if recipe == "fluid-digits" else 3)
    last = sorted((tmp_path / "a" / "checkpoint").iterdir())[-1]
    state = load_file(last / "state.safetensors")
    slow = state["capacity.width"] < 1
    assert 1 <= slow.sum() <= round(0.2 * len(slow)) + 1
    dropped = [value for key, value in state.items() if key.startswith("submodel.dropped")]
    assert any(each.any() for each in dropped)
    assert sum(record["parts"] for record in records) > 0
    assert min(record["narrowest"] for record in records) < 1
    summary: Any = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert np.isfinite(summary["loss"])
