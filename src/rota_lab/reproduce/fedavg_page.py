"""FedAvg's Table 1 as a page: our rounds beside the source's, how each cell was tuned, and what holds."""

from __future__ import annotations

import math

import numpy as np

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.fedavg_cells import CELLS, COLUMNS, FRACTIONS, LIMIT, NETWORKS, Cell, Column
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.race import FAR, LAG, SELDOM
from rota_lab.reproduce.result import Result, Row, over_seeds

LOW, HIGH = 0.7, 1.3
"""The median of our rounds / the source's is to be between these."""


def reached(found: Found) -> bool:
    """Whether all seeds of the best rate reached the target."""
    return None not in found["rounds"]


def ratio(found: Found) -> float:
    """Our rounds / the source's."""
    return float(np.mean(found["rounds"])) / float(found["paper"])


def summary(found: Found) -> str:
    """A finished cell in words."""
    if not reached(found):
        return f"not reached in {LIMIT * found['paper']} rounds, {found['accuracy']:.2%} at best"
    return (
        f"{np.mean(found['rounds']):.1f} rounds (source {found['paper']}) at lr {found['lr']:.3g}"
    )


def report(found: dict[str, Found], cells: list[Cell], quick: bool) -> Result:
    """Paper against measured, from those of the cells that are finished."""
    found = {cell.name: found[cell.name] for cell in cells if cell.name in found}
    rows = [
        over_seeds(f"{CELLS[name].title}: rounds to {_target(name)}", each["paper"], each["rounds"])
        for name, each in found.items()
        if reached(each)
    ]
    wanted = [cell.name for cell in cells if not cell.column.raw]
    done = [found[name] for name in wanted if name in found]
    there = [each for each in done if reached(each)]
    rows.append(over_seeds("cells that reach the target", len(wanted), [len(there)]))
    standing = f"{len(there)} reached, {len(done) - len(there)} not reached, {len(wanted) - len(done)} not run"
    checks = {
        f"all cells that the source reached are reached (of {len(wanted)}: {standing})": len(there)
        == len(wanted)
    }
    if there:
        ratios = [ratio(each) for each in there]
        middle = float(np.median(ratios))
        what = "our rounds / the source's: median, least and most of these cells"
        seeds = min(len(each["rounds"]) for each in there)
        rows.append(
            Row(
                quantity=what,
                paper=None,
                measured=middle,
                low=min(ratios),
                high=max(ratios),
                seeds=seeds,
            )
        )
        claim = f"the median of our rounds / the source's, {middle:.2f} over {len(ratios)} cells, is within {LOW} to {HIGH}"
        checks[claim] = LOW <= middle <= HIGH
    return Result(
        "fedavg-table1",
        "FedAvg: rounds to a target accuracy",
        _text(found, quick),
        rows,
        _charts(found),
        checks,
        quick,
    )


def _target(name: str) -> str:
    return f"{NETWORKS[CELLS[name].column.model].target:.0%}".replace("%", " %")


def _charts(found: dict[str, Found]) -> list[Chart]:
    """For each network the rounds against the clients a round, where a column has two cells or more."""
    charts = []
    for model, network in NETWORKS.items():
        lines = []
        for colour, (split, batch) in enumerate(COLUMNS):
            cells = [
                CELLS[f"{Column(model, split, batch).name}-C{fraction:g}"] for fraction in FRACTIONS
            ]
            ours = [cell for cell in cells if cell.name in found and reached(found[cell.name])]
            if len(ours) > 1:
                x = [math.log10(cell.cohort) for cell in ours]
                name = f"{split}, B = {batch or '∞'}"
                lines.append(
                    Line(
                        name,
                        x,
                        [math.log10(np.mean(found[cell.name]["rounds"])) for cell in ours],
                        colour,
                    )
                )
                lines.append(
                    Line("", x, [math.log10(cell.paper or 1) for cell in ours], colour, dashed=True)
                )
        if lines:
            title = f"{network.title}: rounds to {network.target:.0%}, measured (solid) and the source's (dashed)"
            charts.append(Chart(model, title, "log10 clients a round", "log10 rounds", lines))
    return charts


def _text(found: dict[str, Found], quick: bool) -> str:
    """What was run, in words, and the table in the source's form."""
    warning = (
        "**A quick version: one cell of the table, one learning rate, one seed. It shows the way, not the result.**\n\n"
        * quick
    )
    machines = list(
        dict.fromkeys(f"{each['machine']}, {each['precision']}" for each in found.values())
    )
    places = "\n".join(
        f"- machine {number}: {words}" for number, words in enumerate(machines, start=1)
    )
    return f"""{warning}Table 1 of McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data" (AISTATS 2017), as source S0 has it: the rounds that FedAvg needs to a test accuracy on MNIST. 100 clients
hold 600 images each, IID or as two shards of the images sorted by label. C of them train in a round (C = 0: one), in mini-batches of
B images (∞: all 600 at once). The 2NN does one local epoch, to 97 %; the CNN five, to 99 %.

As in the source, a curve is made monotonic (the best accuracy so far) and crosses the target on the line between two tests, and the
learning rate is tuned for each cell, here on the grid 10^(k/6). Models are tested after every round; while their best error is above
{FAR:g} times the target's, after every {SELDOM} rounds.

The source says neither how it scales the pixels nor how it draws the initial weights. Here pixels are from -1/2 to 1/2, as in TensorFlow's
own MNIST example of that time, and weights are drawn as torch does by default. The scale was chosen on one cell, 2NN, IID, B = 10,
C = 0.1, by trying both before any other cell was run{_scales(found)}.

{_tables(found)}

Measured rounds / the source's, and in brackets their ratio. A dash: the source did not reach the target in its time, and the cell is
not run here.

## How each cell was tuned
All models of a cell train together, one for each rate and seed, each with its own start, cohorts and mini-batches. The best rate is that
with the fewest rounds in the mean over its seeds, and that mean is what is measured. A model is out of the race when it has reached the
target; when its updates are not finite; when its rate can no longer have the fewest rounds; and, in a cell's first race, from a
quarter of the source's rounds on, when another rate was more accurate after {LAG:g} times fewer rounds. A cell is given up after
{LIMIT} times the source's rounds.

A first race is laid around the best rate of a neighbouring C, where one was done before. "To both sides" means that more races followed
until both neighbours of the best rate on the grid had been tried. The dearer a cell, the fewer its rates and seeds: one with a single rate
was not tuned itself, but took over its neighbour's.

{_tuned(found, machines)}

{places}
"""


def _scales(found: dict[str, Found]) -> str:
    """What the pixels' scale makes of the cells that were run with both."""
    words = []
    for name, each in found.items():
        other = found.get(name.replace("-raw", ""))
        if CELLS[name].column.raw and other and reached(each) and reached(other):
            title = CELLS[other["part"]].title
            words.append(
                f"{title} takes {np.mean(each['rounds']):.0f} rounds from 0 to 1, and {np.mean(other['rounds']):.0f} from -1/2 to 1/2"
            )
    return ": " * bool(words) + "; ".join(words)


def _tables(found: dict[str, Found]) -> str:
    """The source's two tables, with our numbers before its own."""
    lines = []
    for model, network in NETWORKS.items():
        heads = " | ".join(
            f"{split.replace('iid', 'IID')}, B = {batch or '∞'}" for split, batch in COLUMNS
        )
        lines += ["", f"| {network.title}, C | {heads} |", "|---|" + "---:|" * len(COLUMNS)]
        for fraction in FRACTIONS:
            cells = (
                CELLS[f"{Column(model, split, batch).name}-C{fraction:g}"]
                for split, batch in COLUMNS
            )
            lines.append(
                f"| {fraction:g} | {' | '.join(_entry(cell, found.get(cell.name)) for cell in cells)} |"
            )
    return "\n".join(lines[1:])


def _entry(cell: Cell, found: Found | None) -> str:
    if cell.paper is None:
        return "–"
    if found is None:
        return f"not run / {cell.paper}"
    if not reached(found):
        return f"not in {LIMIT * cell.paper} / {cell.paper}"
    return f"{np.mean(found['rounds']):.0f} / {cell.paper} ({ratio(found):.2f})"


def _tuned(found: dict[str, Found], machines: list[str]) -> str:
    lines = [
        "| cell | rates tried | best | to both sides | seeds | accuracy | seconds | machine |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for name in CELLS:
        if name in found:
            each = found[name]
            rates = ", ".join(
                f"{rate:.3g}" for rate in dict.fromkeys(lane["lr"] for lane in each["lanes"])
            )
            place = machines.index(f"{each['machine']}, {each['precision']}") + 1
            lines.append(
                f"| {CELLS[name].title} | {rates} | {each['lr']:.3g} | {'yes' if each['further'] else 'no'} | {len(each['rounds'])}"
                f" | {each['accuracy']:.2%} | {each['seconds']:.0f} | {place} |"
            )
    return "\n".join(lines)
