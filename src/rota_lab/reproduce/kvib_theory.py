"""The command `rota reproduce kvib-theory`: its parts, their order, and the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from rota import data
from rota.data.federation import Federation
from rota_lab.reproduce.kvib_parts import ROUNDS, SEEDS, SETTINGS, Piece, budgets, main, systematic
from rota_lab.reproduce.kvib_studies import (
    CLIENTS,
    GROWTH_ROUNDS,
    MADE,
    MADE_ROUNDS,
    OTHER_ROUNDS,
    TASKS,
    growth,
    holds,
    made,
    other,
    sweep,
)
from rota_lab.reproduce.kvib_theory_page import report
from rota_lab.reproduce.parts import Found, chosen, results, run_parts, start
from rota_lab.reproduce.result import Result

STUDIES: dict[str, Callable[[Piece, Federation, float], Found]] = {
    "logits": main,
    "holds": holds,
    "sweep": sweep,
    "made": made,
    "other": other,
    "growth": growth,
    "twice": main,
    "budgets": budgets,
    "systematic": systematic,
}
SECONDS = {
    "logits": 26,
    "holds": 2,
    "sweep": 8,
    "made": 2,
    "other": 60,
    "growth": 6,
    "twice": 24,
    "budgets": 24,
    "systematic": 50,
}
"""The rough times of parts on one core."""
SWEEP_SEEDS, SWEEP_ROUNDS = range(2), 125
QUICK_ROUNDS, QUICK_SEEDS = 12, 2


def parts(quick: bool = False) -> list[Piece]:
    """All parts, in the order in which they run: the primary comparison comes first."""
    seeds, rounds = (SEEDS[:QUICK_SEEDS], QUICK_ROUNDS) if quick else (SEEDS, ROUNDS)
    out = [Piece("logits", f"seed{seed}", rounds, quick) for seed in seeds]
    out += [Piece("made", name, min(rounds, MADE_ROUNDS), quick) for name in MADE]
    if not quick:
        out += [Piece("other", name, OTHER_ROUNDS) for name in TASKS]
    out.append(Piece("holds", "figure6", rounds, quick))
    out += [Piece("growth", f"N{n}", min(rounds, GROWTH_ROUNDS), quick) for n in CLIENTS]
    swept = min(rounds, SWEEP_ROUNDS)
    out += [Piece("sweep", f"seed{seed}", swept, quick) for seed in SWEEP_SEEDS]
    for study in ("twice", "budgets"):
        out += [Piece(study, f"seed{seed}", rounds, quick) for seed in seeds]
    for setting in SETTINGS:
        out += [Piece("systematic", f"{setting}-seed{seed}", rounds, quick) for seed in seeds]
    return out + [Piece("budgets", f"twice-seed{seed}", rounds, quick) for seed in seeds]


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    lines = [f"{part.name:20}{part.rounds:4} rounds{SECONDS[part.study]:5} s" for part in some]
    minutes = sum(SECONDS[part.study] for part in some) / 60
    return [*lines, "", f"{len(some)} parts, roughly {minutes:.0f} minutes of one core"]


def kvib_theory(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """K-Vib's variance and regret against rivals on Synthetic, its theorems, and rota's sampler.

    Finished parts are kept in `out`, and are not run again. `minutes` limits the time; 0 runs
    nothing and returns what is finished.
    """
    wanted = parts(quick=True) if quick else chosen(only, parts())
    files = [] if quick else results(out, "kvib-theory")
    everything = [part.name for part in parts(quick)]
    runner = start(files, everything, minutes, "cpu", "fp32", say)

    def load(_: str) -> Federation:
        return data.synthetic_kvib()

    def measure(federation: Federation, part: Piece) -> tuple[Found, str]:
        found = STUDIES[part.study](part, federation, runner.deadline)
        return asdict(part) | found, "finished"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small
    try:
        run_parts(runner, wanted, lambda part: "", load, measure)
    finally:
        torch.set_num_threads(threads)
    found = {name: runner.found[name] for name in everything if name in runner.found}
    return report(found, everything, quick)
