"""The pages of FLuID's accuracy studies, from the runs that are finished."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from rota.arrays import Array
from rota.world.devices import Devices
from rota_lab.reproduce.chart import COLOURS, Chart, Line
from rota_lab.reproduce.interval import Claim, Interval, Statement, fitted, interval, judged
from rota_lab.reproduce.mmfl_cells import grid, three_digits
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds

TITLES = {
    "whole": "Whole models",
    "random": "Random",
    "ordered": "Ordered",
    "invariant": "Invariant",
    "fjord": "FjORD",
    "heterofl": "HeteroFL",
    "rolling": "Rolling (FedRolex)",
    "importance": "Importance",
    "exclude": "Exclude stragglers",
    "frozen": "Same random units",
}
ORDER = (("invariant", "ordered"), ("ordered", "random"), ("invariant", "random"))
"""FLuID's claims: the first method is at least as accurate as the second."""
WHOLE = ("whole", "whole")

Place = tuple[str, str, str]
Cells = dict[Place, dict[int, Found]]
"""The finished runs: (setting, method, column) -> seed -> numbers."""


@dataclass(frozen=True)
class Compared:
    """A claim: the mean of some cells (method, column) is above the mean of others.

    `of` is the number of a run that is compared; it is a share, such as the accuracy.
    """

    words: str
    above: tuple[tuple[str, str], ...]
    below: tuple[tuple[str, str], ...]
    of: str = "accuracy"


@dataclass(frozen=True)
class About:
    """What a study is, for its page to say."""

    name: str
    title: str
    first: str
    settings: dict[str, list[str]]
    columns: list[str]
    methods: list[str]
    paper: dict[Place, float]
    invariant: dict[Place, float]
    """The source's percentages of invariant units."""
    why: str
    compared: tuple[Compared, ...]
    cells: list[tuple[str, str]]
    """Each method with each of its columns."""
    seeds: dict[str, int]
    """How many seeds the settings have."""
    rounds: dict[str, int]
    runs: int
    quick: bool
    over_costs: bool = False
    """Whether charts show accuracy against costs."""
    exclude: bool = False
    """Whether leaving stragglers out is a method of the study's own, and not run for a reason."""

    @property
    def claims(self) -> list[Compared]:
        """The order of the methods over all columns, and the study's own claims."""
        out = []
        for better, worse in ORDER:
            if better in self.methods and worse in self.methods:
                above = tuple((better, column) for column in self.columns)
                below = tuple((worse, column) for column in self.columns)
                words = f"{TITLES[better]} is above {TITLES[worse]}"
                out.append(Compared(words, above, below))
        return [*out, *self.compared]


def report(about: About, found: Cells) -> Result:
    """Tables, charts and verdicts, from the runs that are finished."""
    settings = [name for name in about.settings if any(place[0] == name for place in found)]
    missing, found = _missing(about, found), complete(found)
    lines = [about.first if not about.quick else SHORT, "", *missing, *READING, ""]
    rows = [about.settings[name] for name in about.settings]
    lines += ["## Settings", "", *grid(SETTINGS, rows, numbers=(4, 5, 6)), ""]
    for name in settings:
        lines += [f"## {name}", "", *_table(about, found, name), "", *_reasons(about, found, name)]
    worth = [line for name in settings for line in _worth(about, found, name)]
    lines += ["## Reasons", "", about.why, "", *worth] if about.why and settings else []
    lines += made_on(found)
    statements = [each for name in settings for each in _statements(about, found, name)]
    claims: list[Claim] = judged(statements)
    lines += ["", "## Claims", "", JUDGED] if claims else []
    charts = [chart for name in settings for chart in _charts(about, found, name)]
    return Result(
        about.name,
        about.title,
        "\n".join(lines),
        _rows(about, found),
        charts,
        {},
        about.quick,
        claims=claims,
    )


SHORT = """\
**This is the short version. It shows that the reproduction runs, and is not the result.**"""
SETTINGS = ("setting", "data", "network", "local work", "clients per round", "rounds", "seeds")
READING = """\
All methods with one seed have the same data, stragglers, first weights and mini-batches. Accuracies
are those of the whole model on the test examples, in percent, as means over the last rounds.
Brackets show 95 % intervals of means over the seeds (Student's t). Differences are taken seed by
seed.""".splitlines()
JUDGED = """\
Each claim is the mean difference over the columns of its table, in points of accuracy, seed by
seed. Where some columns have no runs, a claim names the others. A verdict is Student's t-test at
5 %, with Holm's correction for all claims of the page; brackets are the claim's own 95 %
interval. Some small settings got more seeds after a look at their verdicts, so the chance of a
wrong verdict is somewhat above 5 %."""


def made_on(found: Cells) -> list[str]:
    """A sentence on each machine that runs were made on."""
    machines = set()
    for runs in found.values():
        for run in runs.values():
            machines.add(f"{run['machine']}, products in {run['precision']}")
    return [f"The runs were made on {words}." for words in sorted(machines)]


def _missing(about: About, found: Cells) -> list[str]:
    """How many runs are missing, and which seeds and cells the settings have."""
    finished = sum(len(runs) for runs in found.values())
    if finished == about.runs:
        return []
    never = [name for name in about.settings if not any(place[0] == name for place in found)]
    words = f"**{about.runs - finished} of {about.runs} runs are missing.**"
    left = finished - sum(len(runs) for runs in complete(found).values())
    if left:
        words += f" Left out, because other methods have not finished their seeds: {left} runs."
    if never:
        words += f" These settings were not run: {', '.join(never)}."
    begun = [_begun(about, found, name) for name in about.settings if name not in never]
    return [words, "", *begun, ""]


def _begun(about: About, found: Cells, setting: str) -> str:
    """Which seeds the tables have, and which cells have no runs."""
    mine = [place for place in found if place[0] == setting]
    some, number = seeds(found, mine), about.seeds[setting]
    words = f"- {setting} has {len(some)} of {number} seeds"
    if 0 < len(some) < number:
        words += f": {', '.join(map(str, some))}"
    empty = [cell for cell in about.cells if (setting, *cell) not in found]
    names = [title(m) if c == "whole" else f"{title(m)} at {c}" for m, c in empty]
    return words + (f"; no runs of {', '.join(names)}" if names else "")


def complete(found: Cells) -> Cells:
    """The runs with the seeds that all of their setting's cells have, if there are some."""
    out: Cells = {}
    for place, runs in found.items():
        common = seeds(found, [other for other in found if other[0] == place[0]])
        out[place] = {seed: runs[seed] for seed in common} if common else runs
    return out


def seeds(found: Cells, places: list[Place]) -> list[int]:
    """The seeds that all of these cells have finished."""
    return sorted(set.intersection(*(set(found.get(place, {})) for place in places)))


def accuracies(found: Cells, place: Place) -> list[float]:
    """A cell's accuracies in percent, by seed."""
    runs = found.get(place, {})
    return [100 * runs[seed]["accuracy"] for seed in sorted(runs)]


def _means(found: Cells, places: list[Place], some: list[int], of: str = "accuracy") -> Array:
    """The mean accuracy of some cells in percent, or another number, seed by seed."""
    return np.array([np.mean([100 * found[p][seed][of] for p in places]) for seed in some])


def _statements(about: About, found: Cells, setting: str) -> list[Statement]:
    """The claims over the columns whose runs are there; the words name these if some are not."""
    out = []
    for each in about.claims:
        both = list(zip(each.above, each.below, strict=True))
        there = [pair for pair in both if all(found.get((setting, *place)) for place in pair)]
        if not there:
            continue
        above, below = ([(setting, *place) for place in side] for side in zip(*there, strict=True))
        some = seeds(found, above + below)
        if some:
            high, low = (_means(found, side, some, each.of) for side in (above, below))
            names = ", ".join(column for (_, column), _ in there)
            words = each.words if len(there) == len(both) else f"{each.words} at {names}"
            values = high - low
            out.append(Statement(f"{setting}: {words}", values.tolist(), " points"))
    return out


def _table(about: About, found: Cells, setting: str) -> list[str]:
    """Accuracies by method and column, with the source's."""
    whole = accuracies(found, (setting, *WHOLE))
    lines = []
    if whole:
        lines = [f"{TITLES['whole']} reach {_with_interval(whole)}.", ""]
    rows = []
    for method in about.methods:
        cells = [accuracies(found, (setting, method, column)) for column in about.columns]
        if not any(cells):
            continue
        rows.append([title(method), *(_with_interval(values) for values in cells)])
        theirs = [about.paper.get((setting, method, column)) for column in about.columns]
        if any(value is not None for value in theirs):
            numbers = ["–" if value is None else f"{value:.1f}" for value in theirs]
            rows.append([f"{title(method)}, source", *numbers])
    return [*lines, *grid(("", *about.columns), rows)]


def _with_interval(values: list[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1f} (1 seed)"
    between = interval(values)
    return f"{between.mean:.2f} ({between.low:.2f} to {between.high:.2f})"


def _reasons(about: About, found: Cells, setting: str) -> list[str]:
    """What may explain the order: distances from whole models, and what Invariant dropped."""
    lines = []
    gaps = []
    for method in about.methods:
        for column in about.columns:
            places = [(setting, method, column), (setting, *WHOLE)]
            some = seeds(found, places)
            if some:
                gap = _means(found, places[:1], some) - _means(found, places[1:], some)
                gaps.append((float(np.mean(gap)), method, column))
    if gaps:
        least, method, column = min(gaps)
        lines.append(
            f"The largest mean distance from whole models is {least:+.2f} points "
            f"({title(method)}, {column})."
        )
    return [*lines, "", *_dropped(about, found, setting), *_costs(about, found, setting), ""]


def _dropped(about: About, found: Cells, setting: str) -> list[str]:
    """How many units were invariant, and how many of those that were dropped."""
    rows: list[list[str]] = []
    for method in about.methods:
        for column in about.columns:
            place = (setting, method, column)
            runs = [run for run in found.get(place, {}).values() if "invariant" in run]
            if runs:
                share = interval([100 * run["invariant"] for run in runs])
                filled = 100 * float(np.mean([run["filled"] for run in runs]))
                theirs = about.invariant.get(place)
                early = [100 * run["invariant_curve"][_early(run)] for run in runs]
                row = [title(method), column, _short(interval(early)), _short(share)]
                row.append(f"{filled:.1f}")
                rows.append([*row, "–" if theirs is None else f"{theirs:.0f}"])
    if not rows:
        return []
    head = ["", "column", "after 30 % of the rounds", "in the second half"]
    head += ["of the dropped units", "source"]
    if not about.invariant:
        head.pop()
        rows = [row[:-1] for row in rows]
    words = "Invariant units, in percent: of all units, and of those that parts dropped."
    numbers = tuple(range(2, len(head)))
    return [words, "", *grid(tuple(head), rows, numbers=numbers), "", FILLED, ""]


def _worth(about: About, found: Cells, setting: str) -> list[str]:
    """Methods against Random, by what the stragglers' data are worth: a line through the seeds."""
    column = about.columns[-1]
    random, without = (setting, "random", column), (setting, "exclude", column)
    places = [(setting, *WHOLE), without, random]
    some = seeds(found, places)
    others = [m for m in about.methods if m not in ("random", "exclude")]
    others = [m for m in others if len(seeds(found, [*places, (setting, m, column)])) == len(some)]
    if about.exclude or len(some) < 3 or not others:
        return []
    whole, excluded, drawn = (_means(found, [place], some) for place in (places[0], *places[1:]))
    worth = whole - excluded
    lines = {m: fitted(worth, _means(found, [(setting, m, column)], some) - drawn) for m in others}
    rows = [[title(m), _signed(start), _signed(slope)] for m, (start, slope) in lines.items()]
    head = ("minus Random", "where the data are worth nothing", "per point that they are worth")
    words = (
        f"{setting}, {column}: the straggler's data are worth {_signed(interval(worth))} points, "
        f"by the seed from {worth.min():+.2f} to {worth.max():+.2f}. The lines through the "
        f"{len(some)} seeds, in points with 95 % intervals:"
    )
    below = filter(None, map(_crossing, lines, lines.values()))
    return [words, "", *grid(head, rows), "", *below, ""]


def _crossing(method: str, line: tuple[Interval, Interval]) -> str:
    """Where a method falls below Random, if its line certainly falls."""
    start, slope = line
    if not (start.low > 0 and slope.high < 0):
        return ""
    return (
        f"{title(method)} is above Random where the straggler's data are worth less than "
        f"{-start.mean / slope.mean:.2f} points, and below it where they are worth more."
    )


def _signed(between: Interval) -> str:
    return f"{between.mean:+.2f} ({between.low:+.2f} to {between.high:+.2f})"


def _early(run: Found) -> int:
    """The place of the round after 30 % of the rounds."""
    return round(0.3 * (len(run["invariant_curve"]) - 1))


def _short(between: Interval) -> str:
    if not np.isfinite(between.low):
        return f"{between.mean:.1f}"
    return f"{between.mean:.1f} ({between.low:.1f} to {between.high:.1f})"


def title(method: str) -> str:
    """A method's name on the page."""
    return TITLES.get(method, method)


FILLED = """\
Where fewer units are invariant than a part must drop, the rest is dropped at random, as Random
does."""


def _costs(about: About, found: Cells, setting: str) -> list[str]:
    """What the clients compute and send in a run; methods that cost the same share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column in ["whole", *about.columns]:
        for method in ["whole"] if column == "whole" else about.methods:
            runs = list(found.get((setting, method, column), {}).values())
            if runs:
                seconds, sent = (three_digits(float(np.mean(_cost(runs, k)))) for k in COSTS)
                rows.setdefault((column, seconds, sent), []).append(title(method))
    head = ("column", "methods", "client seconds per run", "MiB per run")
    several = Counter(column for column, *_ in rows)
    body = [
        [column, ", ".join(names) if several[column] > 1 or len(names) < 2 else "all", *costs]
        for (column, *costs), names in rows.items()
    ]
    words = f"Costs, on equal devices of {Devices().gflops:g} GFLOP/s:"
    return [words, "", *grid(head, body, numbers=(2, 3))]


COSTS = {"client_seconds": "client seconds", "bytes": "MiB"}


def _cost(runs: list[Found], kind: str) -> list[float]:
    return [run[kind] / (2**20 if kind == "bytes" else 1) for run in runs]


def _rows(about: About, found: Cells) -> list[Row]:
    out = []
    for place, runs in found.items():
        setting, method, column = place
        values = [100 * run["accuracy"] for run in runs.values()]
        which = title(method) if column == "whole" else f"{title(method)}, {column}"
        out.append(over_seeds(f"{setting}: {which}: accuracy, %", about.paper.get(place), values))
    return out


def _charts(about: About, found: Cells, setting: str) -> list[Chart]:
    out = [*_by_column(about, found, setting), *_over_rounds(about, found, setting)]
    over = [_over_costs(about, found, setting, kind) for kind in COSTS if about.over_costs]
    return out + [chart for chart in over if chart.lines]


def _over_costs(about: About, found: Cells, setting: str, kind: str) -> Chart:
    """Accuracy against what clients have computed or sent by then, in the mean over the seeds."""
    lines: list[Line] = []
    for method in ["whole", *about.methods]:
        column = "whole" if method == "whole" else about.columns[0]
        runs = list(found.get((setting, method, column), {}).values())
        if runs and runs[0]["curve"]["rounds"]:
            rounds = np.array(runs[0]["curve"]["rounds"])
            x = np.mean(_cost(runs, kind)) * rounds / about.rounds[setting]
            y = 100 * np.mean([run["curve"]["accuracy"] for run in runs], axis=0)
            number = len(lines)
            dashed = number // (len(COLOURS) - 1)
            at = number % (len(COLOURS) - 1)
            lines.append(Line(title(method), x.tolist(), y.tolist(), at, dashed))
    words = f"{setting}: accuracy against {COSTS[kind]}"
    return Chart(f"{setting}-{kind.replace('_', '-')}", words, COSTS[kind], "accuracy, %", lines)


def _over_rounds(about: About, found: Cells, setting: str) -> list[Chart]:
    """The share of invariant units over the rounds, for studies of several thresholds."""
    lines: list[Line] = []
    for method in about.methods:
        runs = [*found.get((setting, method, about.columns[0]), {}).values()]
        runs = [run for run in runs if "invariant_curve" in run]
        if runs:
            mean = 100 * np.mean([run["invariant_curve"] for run in runs], axis=0)
            number = len(lines)
            x = list(range(1, len(mean) + 1))
            dashed = number // (len(COLOURS) - 1)
            lines.append(Line(title(method), x, mean.tolist(), number % (len(COLOURS) - 1), dashed))
    if len(lines) < 2:
        return []
    words = f"{setting}: invariant units"
    return [Chart(f"{setting}-invariant", words, "round", "invariant units, %", lines)]


def _by_column(about: About, found: Cells, setting: str) -> list[Chart]:
    """Accuracy minus whole models' with the same seed, by column, where columns are numbers."""
    try:
        x = [float(column.rstrip("%")) for column in about.columns]
    except ValueError:
        return []
    lines: list[Line] = []
    for number, method in enumerate(about.methods):
        cells = [_below_whole(found, (setting, method, column)) for column in about.columns]
        if all(len(values) > 1 for values in cells):
            between = [interval(values) for values in cells]
            band = ([each.low for each in between], [each.high for each in between])
            mean = [each.mean for each in between]
            lines.append(Line(title(method), x, mean, number, band=band))
    if len(x) < 2 or not lines:
        return []
    lines.append(Line(title("whole"), x, [0.0] * len(x), len(COLOURS) - 1, 1))
    label = "share of stragglers, %" if about.columns[0].endswith("%") else "width of the parts"
    words = f"{setting}: accuracy minus whole models', 95 % intervals"
    return [Chart(setting, words, label, "points", lines)]


def _below_whole(found: Cells, place: Place) -> list[float]:
    """A cell's accuracies minus whole models', seed by seed."""
    whole = (place[0], *WHOLE)
    some = seeds(found, [place, whole])
    difference = _means(found, [place], some) - _means(found, [whole], some)
    return [float(each) for each in difference]
