"""FedAvg's Table 1 as a page: our rounds and the source's, how each cell was tuned, what holds."""

from __future__ import annotations

import math

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.fedavg_cells import (
    CELLS,
    COLUMNS,
    DASHES,
    FRACTIONS,
    LIMIT,
    NETWORKS,
    Cell,
    Column,
    Network,
    lane_seconds,
    least_seconds,
)
from rota_lab.reproduce.fedavg_claims import (
    SPLITS,
    bracket,
    by_split,
    how_tuned,
    judgements,
    ratio,
    reached,
    rounds,
    speedup,
)
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.race import FAR, LAG, SELDOM
from rota_lab.reproduce.result import Result, Row, over_seeds


def summary(found: Found) -> str:
    """A finished cell in words."""
    if not reached(found):
        limit = LIMIT * CELLS[found["part"]].expected
        return f"not reached in {limit} rounds, {found['accuracy']:.2%} at best"
    source = found["paper"] or "not reached"
    return f"{rounds(found):.1f} rounds (source {source}) at lr {found['lr']:.3g}"


def report(found: dict[str, Found], cells: list[Cell], quick: bool) -> Result:
    """Paper against measured, from those cells that are finished."""
    asked = [cell.name for cell in cells] + [cell.name for cell in DASHES]
    found = {name: found[name] for name in asked if name in found}
    rows = []
    for name, each in found.items():
        if reached(each):
            quantity = f"{CELLS[name].title}: rounds to {_target(name)}"
            rows.append(over_seeds(quantity, each["paper"], each["rounds"]))
    wanted = [cell.name for cell in cells if not cell.column.raw]
    there = [name for name in wanted if name in found and reached(found[name])]
    rows.append(over_seeds("cells that reach the target", len(wanted), [len(there)]))
    for split in SPLITS:
        ratios = [ratio(found[name]) for name in there if CELLS[name].column.split == split]
        if ratios:
            words = f"{SPLITS[split]}: our rounds / the source's: geometric mean, least and most"
            middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
            row = Row(
                quantity=words,
                paper=None,
                measured=middle,
                low=min(ratios),
                high=max(ratios),
                seeds=min(len(found[name]["rounds"]) for name in there),
            )
            rows.append(row)
    claims = [] if quick else judgements(found, wanted)
    checks = {}
    if set(wanted) - set(found):
        missing = len(set(wanted) - set(found))
        checks[f"all cells that the source reached are run ({missing} are not)"] = False
    title = "FedAvg: rounds to a target accuracy"
    text, charts = _text(found, quick), _charts(found)
    return Result("fedavg-table1", title, text, rows, charts, checks, quick, claims=claims)


def _target(name: str) -> str:
    return f"{NETWORKS[CELLS[name].column.model].target:.0%}".replace("%", " %")


def _charts(found: dict[str, Found]) -> list[Chart]:
    """A chart for each network that has a column with two finished cells or more."""
    charts = []
    for model, network in NETWORKS.items():
        lines = []
        for colour in range(len(COLUMNS)):
            lines += _lines(found, model, colour)
        if lines:
            target = f"{network.title}: rounds to {network.target:.0%}"
            title = f"{target}, measured (solid) and the source's (dashed)"
            charts.append(Chart(model, title, "log10 clients per round", "log10 rounds", lines))
    return charts


def _lines(found: dict[str, Found], model: str, place: int) -> list[Line]:
    """A column's rounds against the clients per round: ours, and the source's dashed."""
    split, batch = COLUMNS[place]
    cells = [CELLS[f"{Column(model, split, batch).name}-C{fraction:g}"] for fraction in FRACTIONS]
    ours = [cell for cell in cells if cell.name in found and reached(found[cell.name])]
    if len(ours) < 2:
        return []
    x = [math.log10(cell.cohort) for cell in ours]
    measured = [math.log10(rounds(found[cell.name])) for cell in ours]
    paper = [math.log10(cell.paper or 1) for cell in ours]
    name = f"{split}, B = {batch or '∞'}"
    return [Line(name, x, measured, place), Line("", x, paper, place, dashed=True)]


WARNING = """\
**This is a quick version: one cell of the table, with one learning rate and one seed. It shows that
the reproduction runs, and is not the result.**

"""


def _text(found: dict[str, Found], quick: bool) -> str:
    """What was run, in words, and the table in the source's form."""
    machines = list(dict.fromkeys(_machine(each) for each in found.values()))
    places = [f"- machine {number}: {words}" for number, words in enumerate(machines, start=1)]
    first = f"""\
Table 1 of McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data" (AISTATS 2017), as MMFL's lecture quotes it: the
number of rounds that FedAvg needs to reach a test accuracy on MNIST. 100 clients hold 600 images
each, either IID or as two shards of the images sorted by label. In each round a fraction C of the
clients trains (one client for C = 0), in mini-batches of B images (∞: all 600 at once). The 2NN
does one local epoch and is trained to 97 %, the CNN does five and is trained to 99 %.

As in the source, a curve is made monotonic (the best accuracy so far) and crosses the target on the
line between two tests. The learning rate is tuned for each cell, here on the grid 10^(k/6). A model
is tested after every round; while its best error is above {FAR:g} times the target's, it is tested
every {SELDOM} rounds.

The source does not say how it scales the pixels or how it draws the initial weights. Here pixels
range from -1/2 to 1/2, as in TensorFlow's own MNIST example of that time, and weights are drawn as
torch does by default. The scale was chosen on one cell (2NN, IID, B = 10, C = 0.1): both scales
were tried there before any other cell was run{_scales(found)}.

{_tables(found)}

An entry is the measured rounds / the source's, with their ratio in brackets. A dash means that the
source did not reach the target in its time.
{_dashes(found)}

{chr(10).join(by_split(found))}

## Speed-ups
The source's table also says how many times fewer rounds a cell needs than the cell with one client
per round (C = 0) of its column. An entry is our speed-up / the source's, as its table prints it.

{_speedups(found)}

## How each cell was tuned
All models of a cell train together: one per rate and seed, each with its own start, cohorts and
mini-batches. The best rate is the one whose seeds needed the fewest rounds on average, and that
average is the measured number. A model is out of the race

- when it has reached the target,
- when its updates are not finite,
- when its rate can no longer have the fewest rounds,
- in a cell's first race, from a quarter of the source's rounds on, when another rate was more
  accurate after {LAG:g} times fewer rounds.

A cell is given up after {LIMIT} times the source's rounds.

If a cell with another C in the same column was finished before, the first race is laid around the
best rate of the nearest one. Where a cell is cheap, more races follow until both neighbours of the
best rate on the grid have been tried. The more expensive a cell is, the fewer rates and seeds
it has: a cell with a single rate was not tuned itself and uses the best rate of its neighbour.

{how_tuned(found)} "Bracketed" says which neighbours of the best rate on the grid were tried. Where
one is missing, a better rate may exist, and the rounds are an upper limit.
"""
    parts = [first, _tuned(found, machines), "", *places]
    return WARNING * quick + "\n".join(parts) + "\n"


def _machine(found: Found) -> str:
    return f"{found['machine']}, {found['precision']}"


def _scales(found: dict[str, Found]) -> str:
    """What the pixels' scale changes in the cells that were run with both scales."""
    words = []
    for name, each in found.items():
        other = found.get(name.replace("-raw", ""))
        if CELLS[name].column.raw and other and reached(each) and reached(other):
            raw, centred = rounds(each), rounds(other)
            both = f"{raw:.0f} rounds from 0 to 1, and {centred:.0f} from -1/2 to 1/2"
            words.append(f"{CELLS[other['part']].title} takes {both}")
    return ". " * bool(words) + "; ".join(words)


def _tables(found: dict[str, Found]) -> str:
    """The source's two tables, with our numbers before its own."""
    tables = [_table(found, model, network) for model, network in NETWORKS.items()]
    return "\n\n".join("\n".join(lines) for lines in tables)


def _table(found: dict[str, Found], model: str, network: Network) -> list[str]:
    lines = _heads(network)
    for fraction in FRACTIONS:
        entries = []
        for split, batch in COLUMNS:
            cell = CELLS[f"{Column(model, split, batch).name}-C{fraction:g}"]
            entries.append(_entry(cell, found.get(cell.name)))
        lines.append(f"| {fraction:g} | {' | '.join(entries)} |")
    return lines


def _entry(cell: Cell, found: Found | None) -> str:
    if cell.paper is None:
        if found is None:
            return "not run / –"
        return (
            f"{rounds(found):.0f} / –" if reached(found) else f"not in {LIMIT * cell.expected} / –"
        )
    if found is None:
        return f"not run / {cell.paper}"
    if not reached(found):
        return f"not in {LIMIT * cell.paper} / {cell.paper}"
    return f"{rounds(found):.0f} / {cell.paper} ({ratio(found):.2f})"


def _dashes(found: dict[str, Found]) -> str:
    """Which of these cells are not run here, and what they would cost."""
    left = [cell for cell in DASHES if cell.name not in found]
    if not left:
        return ""
    costs = []
    for cell in left:
        seconds = LIMIT * max(lane_seconds(cell), least_seconds(cell))
        costs.append(f"{cell.title}: {LIMIT * cell.expected:,} rounds, {seconds:,.0f} s")
    return f"""\
Of these {len(DASHES)} cells {len(left)} are not run here; `--only` takes their whole names. They
would be given up after {LIMIT} times the most rounds of their column. The rough costs of one rate
and one seed on one H200 are: {"; ".join(costs)}."""


def _speedups(found: dict[str, Found]) -> str:
    """The source's brackets, with ours before them."""
    tables = []
    for model, network in NETWORKS.items():
        lines = _heads(network)
        for fraction in FRACTIONS[1:]:
            entries = []
            for split, batch in COLUMNS:
                column = Column(model, split, batch).name
                one, cell = CELLS[f"{column}-C0"], CELLS[f"{column}-C{fraction:g}"]
                theirs = f"{(one.paper or 0) / cell.paper:.1f}" if cell.paper else "–"
                ours = speedup(found, cell.name)
                entries.append(f"{'–' if ours is None else f'{ours:.1f}'} / {theirs}")
            lines.append(f"| {fraction:g} | {' | '.join(entries)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _heads(network: Network) -> list[str]:
    heads = [f"{SPLITS[split]}, B = {batch or '∞'}" for split, batch in COLUMNS]
    return [f"| {network.title}, C | {' | '.join(heads)} |", "|---|" + "---:|" * len(COLUMNS)]


def _tuned(found: dict[str, Found], machines: list[str]) -> str:
    lines = [
        "| cell | rates tried | best | bracketed | seeds | accuracy | seconds | machine |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, cell in CELLS.items():
        if name not in found:
            continue
        each = found[name]
        rates = dict.fromkeys(f"{lane['lr']:.3g}" for lane in each["lanes"])
        entries = [
            cell.title,
            ", ".join(rates),
            f"{each['lr']:.3g}",
            bracket(each),
            f"{len(each['rounds'])}",
            f"{each['accuracy']:.2%}",
            f"{each['seconds']:.0f}",
            f"{machines.index(_machine(each)) + 1}",
        ]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)
