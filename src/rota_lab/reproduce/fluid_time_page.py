"""The page of FLuID's times, from the runs that are finished."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rota.world.devices import PHONES
from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.fluid_page import made_on
from rota_lab.reproduce.interval import Statement, interval, judged
from rota_lab.reproduce.mmfl_cells import grid
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

Cells = dict[tuple[str, str, str], dict[int, Found]]
"""The finished runs: (setting, condition, method) -> seed -> numbers."""
Floats = NDArray[np.float64]
TITLES = {
    "baseline": "Baseline",
    "fluid": "FLuID",
    "several": "FLuID, up to two",
    "exact": "FLuID, exact widths",
    "static": "Static straggler",
}
FASTER, NEAR, OVERHEAD = 0.18, 0.1, 0.05
"""The paper's bars: FLuID against the baseline, stragglers against the target, and calibration."""
CALIBRATED = 4
"""The rounds after which FLuID has chosen its first widths."""

FIRST = """\
FLuID's Figures 2a, 4a and 4b, whose numbers are in pictures and in its text. The clients are
FLuID's five phones, by the device profile: their relative speeds are what their cores can do at
most. The clock is virtual. In the changing condition, work in the background takes 25, 50 or 75 %
of a phone in some quarters of the run, and times are noisy; a phone is busy in a quarter with a
chance of 20 %. The networks are the 2NN (small) and FLuID's FEMNIST network (writers). Brackets
show 95 % intervals of means over the seeds (Student's t)."""
SHORT = """\
**This is the short version. It shows that the reproduction runs, and is not the result.**"""
METHODS = """\
- **Baseline**: everybody trains whole models.
- **FLuID**: the slowest of the five phones trains a part of one of the paper's widths; widths
  are chosen anew in every round.
- **FLuID, up to two**: as FLuID, with up to two stragglers of the five phones.
- **FLuID, exact widths**: as FLuID, with any width instead of the nearest of the paper's.
- **Static straggler**: the first choice, for the whole run."""
PAPER = {
    "changing": """\
FLuID's paper, in changing conditions: FLuID takes 18 to 26 % less time than the baseline, and 14 to
18 % less than a static straggler.""",
    "stable": """\
FLuID's paper, in stable conditions: the straggler is 10 to 32 % above the target without FLuID, and
within 10 % of it with FLuID.""",
}
JUDGED = """\
Numbers are the distances from FLuID's bars, in percent. A verdict is Student's t-test at 5 %, with
Holm's correction for all claims of the page; brackets are the claim's own 95 % interval.
The small setting got more seeds after looks at its verdicts, so the chance of a wrong verdict is
somewhat above 5 %. Its last number of seeds was fixed before any of the new ones had run."""


def report(found: Cells, number: int, rounds: int, quick: bool) -> Result:
    """Tables, charts and verdicts, from the runs that are finished."""
    finished = sum(map(len, found.values()))
    lines = [SHORT if quick else FIRST, ""]
    if finished < number:
        lines += [f"**{number - finished} of {number} runs are missing.**", ""]
    lines += [*METHODS.splitlines(), ""]
    rows: list[Row] = []
    statements: list[Statement] = []
    charts: list[Chart] = []
    for setting, condition in dict.fromkeys((place[0], place[1]) for place in found):
        mine = {p[2]: runs for p, runs in found.items() if p[:2] == (setting, condition)}
        lines += [f"## {setting}, {condition}", "", *_phones(mine), *_totals(mine), ""]
        lines += [*_near(mine), *PAPER[condition].splitlines(), "", *_overhead(mine), ""]
        statements += _statements(f"{setting}, {condition}", condition, mine)
        charts += _charts(setting, condition, mine)
        for method, runs in mine.items():
            values = [run["virtual_seconds"] for run in runs.values()]
            name = f"{setting}, {condition}: {TITLES[method]}: virtual seconds"
            rows.append(over_seeds(name, None, values))
    lines += made_on(found)
    lines += ["", "## Claims", "", JUDGED] if statements else []
    title = "FLuID, Figures 2a, 4a and 4b: times of rounds"
    text = "\n".join(lines)
    return Result(NAME, title, text, rows, charts, {}, quick, claims=judged(statements))


NAME = "fluid-time"


def _paired(mine: dict[str, dict[int, Found]], *methods: str) -> list[list[Found]]:
    """These methods' runs with the seeds that all of them have; nothing if one has none."""
    some = sorted(set.intersection(*(set(mine.get(method, {})) for method in methods)))
    return [[mine[method][seed] for seed in some] for method in methods] if some else []


def _phones(mine: dict[str, dict[int, Found]]) -> list[str]:
    """Figure 2a: the phones' seconds per round with whole models."""
    runs = mine.get("baseline", {})
    if not runs:
        return []
    by_phone = np.array([np.mean(run["seconds_by_round"], axis=0) for run in runs.values()])
    rows = []
    for name, values in zip(PHONES, by_phone.T, strict=True):
        between = interval(values.tolist())
        rows.append([name, f"{between.mean:.2f} ({between.low:.2f} to {between.high:.2f})"])
    spread = float(np.mean(by_phone.std(axis=1, ddof=1)))
    most = float(np.mean(by_phone.max(axis=1) / by_phone.min(axis=1)))
    words = (
        f"The slowest phone takes {most:.2f} times as long as the fastest, and the standard "
        f"deviation between phones is {spread:.2f} s (FLuID's paper: up to twice as long)."
    )
    return [*grid(("phone", "seconds per round, whole model"), rows), "", words, ""]


def _totals(mine: dict[str, dict[int, Found]]) -> list[str]:
    """Figure 4b: the time of a run, against the baseline's and the static straggler's."""
    rows = []
    for method, runs in mine.items():
        total = interval([run["virtual_seconds"] for run in runs.values()])
        accuracy = interval([100 * run["accuracy"] for run in runs.values()])
        row = [TITLES[method], f"{total.mean:.0f} ({total.low:.0f} to {total.high:.0f})"]
        for other in ("baseline", "static"):
            saved = _saved(mine, method, other)
            row.append(_percent(saved) if saved and method != other else "–")
        rows.append([*row, f"{accuracy.mean:.1f} ({accuracy.low:.1f} to {accuracy.high:.1f})"])
    head = ("", "virtual seconds", "below the baseline, %", "below static, %", "accuracy, %")
    return grid(head, rows)


def _saved(mine: dict[str, dict[int, Found]], method: str, other: str) -> list[float]:
    """How much less time a method takes than another, as a share, seed by seed."""
    pairs = _paired(mine, method, other)
    if not pairs:
        return []
    return [
        1 - run["virtual_seconds"] / than["virtual_seconds"]
        for run, than in zip(*pairs, strict=True)
    ]


def _percent(values: list[float]) -> str:
    between = interval([100 * value for value in values])
    if len(values) < 2:
        return f"{between.mean:.1f}"
    return f"{between.mean:.1f} ({between.low:.1f} to {between.high:.1f})"


def against_target(run: Found) -> Floats:
    """Stragglers' times / the target, after the first choice; the target is the slowest other."""
    seconds, width = np.array(run["seconds_by_round"]), np.array(run["widths"])
    out = []
    for took, wide in zip(seconds[CALIBRATED:], width[CALIBRATED:], strict=True):
        if (wide < 1).any() and (wide == 1).any():
            out += (took[wide < 1] / took[wide == 1].max()).tolist()
    return np.array(out)


def before(run: Found) -> float:
    """The slowest client's time / the next slowest's, in the mean over the rounds."""
    seconds = np.sort(np.array(run["seconds_by_round"]), axis=1)
    return float(np.mean(seconds[:, -1] / seconds[:, -2]))


def _near(mine: dict[str, dict[int, Found]]) -> list[str]:
    """Figure 4a: how far the straggler is from the target, before and after."""
    rows = []
    if "baseline" in mine:
        values = [before(run) - 1 for run in mine["baseline"].values()]
        rows.append(["Baseline: slowest against the next", _percent(values), "–", "–"])
    for method in ("fluid", "several", "exact", "static"):
        runs = [against_target(run) for run in mine.get(method, {}).values()]
        runs = [each for each in runs if len(each)]
        if runs:
            off = [float(np.mean(each)) - 1 for each in runs]
            near = [float(np.mean(np.abs(each - 1) <= NEAR)) for each in runs]
            late = [float(np.mean(each <= 1 + NEAR)) for each in runs]
            rows.append([TITLES[method], _percent(off), _percent(near), _percent(late)])
    if not rows:
        return []
    head = (
        "stragglers' times",
        "above the target, %",
        "rounds within 10 %, %",
        "rounds at most 10 % late, %",
    )
    return [*grid(head, rows), ""]


def overhead(run: Found, base: Found) -> tuple[float, float]:
    """Calibration's processor time per round, as a share of two times.

    It is what the server computes more than in the baseline. The first share is of the virtual time
    of the baseline's round, and the second of one client's training on this machine.
    """
    more = run["server"] - base["server"]
    rounds, clients = len(base["widths"]), len(base["widths"][0])
    return more / (base["virtual_seconds"] / rounds), more / (base["training"] / clients)


def _overheads(mine: dict[str, dict[int, Found]], method: str) -> list[tuple[float, float]]:
    pairs = _paired(mine, method, "baseline")
    return [overhead(*pair) for pair in zip(*pairs, strict=True)] if pairs else []


def _overhead(mine: dict[str, dict[int, Found]]) -> list[str]:
    shares = _overheads(mine, "fluid")
    if not shares:
        return []
    on_phones, here = ([pair[k] for pair in shares] for k in (0, 1))
    return [
        "Calibration is what the server computes per round more than in the baseline, measured on",
        f"this machine: {_percent(on_phones)} % of a round's time on the phones, and",
        f"{_percent(here)} % of the time in which this machine trains one client.",
    ]


def _statements(where: str, condition: str, mine: dict[str, dict[int, Found]]) -> list[Statement]:
    """The bars; the time against the baseline's is FLuID's claim for changing conditions."""
    out = []

    def state(words: str, values: list[float]) -> None:
        if values:
            out.append(Statement(f"{where}: {words}", values, " %", 0.01))

    for method in ("fluid", "several", "exact") if condition == "changing" else ():
        saved = _saved(mine, method, "baseline")
        words = f"{TITLES[method]} is at least 18 % faster than the baseline"
        state(words, [value - FASTER for value in saved])
    if condition == "changing":
        state("FLuID is faster than a static straggler", _saved(mine, "fluid", "static"))
    else:
        state("FLuID is faster than the baseline", _saved(mine, "fluid", "baseline"))
    runs = [against_target(run) for run in mine.get("fluid", {}).values()]
    off = [NEAR - abs(float(np.mean(each)) - 1) for each in runs if len(each)]
    state("stragglers with FLuID are within 10 % of the target on average", off)
    shares = _overheads(mine, "fluid")
    state("calibration costs under 5 % of a round's time", [OVERHEAD - a for a, _ in shares])
    return out


def _charts(setting: str, condition: str, mine: dict[str, dict[int, Found]]) -> list[Chart]:
    """The time of each round, for the first seed."""
    lines = []
    for number, (method, runs) in enumerate(mine.items()):
        run: dict[str, Any] = runs[min(runs)]
        times = np.max(run["seconds_by_round"], axis=1).tolist()
        lines.append(Line(TITLES[method], list(range(1, len(times) + 1)), times, number))
    words = f"{setting}, {condition}: time of each round, seed {min(next(iter(mine.values())))}"
    return [Chart(f"{setting}-{condition}", words, "round", "virtual seconds", lines)]
