"""What the faults of MMFL's published code do to its Table I, as a page."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.mmfl_cells import (
    PAPER,
    TITLES,
    Cells,
    difference,
    grid,
    lead,
    made_on,
    relative,
)
from rota_lab.reproduce.result import Result, over_seeds

WORDS = {
    "repeated": "the sum of the remembered updates is added once for every drawn client, instead "
    "of once per round",
    "uncounted": "the weights treat every client as one with one processor and all models",
    "misplaced": "the weights have the shares of other clients: a model's k-th drawn client has "
    "the share of the k-th client that was drawn for any model",
    "unshared": "clients are drawn by their loss alone, instead of by their share times their loss",
}
"""The faults, in words."""
SOURCE = PAPER["3"]
Faults = dict[str, list[str]]
"""The methods that have each fault."""


def report(found: Cells, faults: Faults, number: int, quick: bool) -> Result:
    """Tables, from the runs that are finished."""
    rows, finished = [], sum(len(runs) for runs in found.values())
    what = "accuracy relative to full participation"
    for fault, methods in faults.items():
        for method in methods:
            values = relative(found, "3", f"{method}-{fault}")
            if values:
                paper = None if quick else SOURCE[method]
                rows.append(over_seeds(f"{TITLES[method]}, {fault}: {what}", paper, values))
    for method, source in SOURCE.items():
        values = relative(found, "published", method)
        if values and method != "full":
            rows.append(over_seeds(f"{TITLES[method]}, all faults: {what}", source, values))
    checks = {}
    if finished < number:
        checks[f"all runs are finished ({finished} of {number})"] = False
    lines = [SHORT if quick else FIRST, "", *_alone(found, faults)]
    if not quick:
        lines += [*_turned(found, faults), *_all(found), *made_on(found)]
    title = "The faults of the source's code, put back"
    return Result("mmfl-faults", title, "\n".join(lines), rows, [], checks, quick)


SHORT = """\
**This is the short version. It shows that the reproduction runs, and is not the result.**"""
FIRST = """\
`rota reproduce mmfl-table1` measures MMFL's Table I ([results](mmfl-table1.md)), and finds some
methods in another order. The published code of MMFL's methods had faults at that time, though it is
not known which version of the code made the table. Here the faults are put back into the setting
with 3 tasks. Everything else is as on that page: accuracies are relative to full participation with
the same seed, and brackets show 95 % intervals of means over the seeds (Student's t); differences
are taken seed by seed."""


def _alone(found: Cells, faults: Faults) -> list[str]:
    """Every fault, in every method that has it."""
    lines = ["## One fault at a time", ""]
    lines += [f"- **{fault}**: {WORDS[fault]}" for fault in faults]
    rows = []
    for fault, methods in faults.items():
        for method in methods:
            name = f"{method}-{fault}"
            with_it, without = (
                relative(found, "3", name, method),
                relative(found, "3", method, name),
            )
            if with_it:
                change = _signed(lead(found, "3", name, method))
                numbers = [f"{np.mean(without):.3f}", f"{np.mean(with_it):.3f}", change]
                rows.append([fault, TITLES[method], *numbers])
    head = ("fault", "method", "without it", "with it", "difference")
    return [*lines, "", *grid(head, rows, numbers=(2, 3, 4)), ""]


def _signed(values: list[float]) -> str:
    return ("+" if np.mean(values) > 0 else "") + difference(values)


def _turned(found: Cells, faults: Faults) -> list[str]:
    """The pairs in another order than the source's, with each fault in the methods that have it."""
    rows, right = [], dict.fromkeys(faults, 0)
    known = [method for method in SOURCE if relative(found, "3", method)]
    for better, worse in permutations(known, 2):
        theirs, ours = SOURCE[better] - SOURCE[worse], lead(found, "3", better, worse)
        if theirs <= 0 or np.mean(ours) >= 0:
            continue
        row = [f"{TITLES[better]} above {TITLES[worse]}", f"+{theirs:.3f}", _signed(ours)]
        for fault, methods in faults.items():
            pair = [better, worse]
            for place, method in enumerate((better, worse)):
                if method in methods:
                    pair[place] = f"{method}-{fault}"
            leads = []
            if pair != [better, worse] and all(relative(found, "3", each) for each in pair):
                leads = lead(found, "3", *pair)
            right[fault] += bool(leads) and float(np.mean(leads)) > 0
            row.append(_bold(leads) if leads else "")
        rows.append(row)
    if not rows:
        return []
    counts = [f"{number} by *{fault}*" for fault, number in right.items() if number]
    return [
        "## Pairs in another order than the source's",
        "",
        "The table shows by how much the first method is above the second: in the source, here,",
        "and with a fault in those of the two methods that have it. Single faults put this many of",
        f"the {len(rows)} pairs into the source's order: {', '.join(counts) or 'none'}. In bold",
        "entries the interval says so, too.",
        "",
        *grid(("pair", "source", "without faults", *faults), rows),
        "",
    ]


def _bold(leads: list[float]) -> str:
    sure = len(leads) > 1 and interval(leads).low > 0
    return f"**{_signed(leads)}**" if sure else _signed(leads)


def _all(found: Cells) -> list[str]:
    """All faults together, and the network of the code."""
    both = []
    for method in SOURCE:
        if relative(found, "3", method) and relative(found, "published", method):
            both.append(method)
    if not both:
        return []
    ranked = sorted(both, key=lambda method: -SOURCE[method])
    pairs = [(a, b) for a, b in permutations(ranked, 2) if SOURCE[a] > SOURCE[b]]
    mean: dict[str, dict[str, float]] = {}
    reached, kept = {}, {}
    for setting in ("3", "published"):
        values = {method: float(np.mean(relative(found, setting, method))) for method in ranked}
        accuracies = [run["accuracy"] for run in found[f"{setting}-full"].values()]
        mean[setting], reached[setting] = values, np.mean(accuracies)
        kept[setting] = sum(values[a] > values[b] for a, b in pairs)
    rows = []
    for method in ranked:
        numbers = [SOURCE[method], mean["3"][method], mean["published"][method]]
        rows.append([TITLES[method], *(f"{number:.3f}" for number in numbers)])
    order = f"Of {len(pairs)} pairs, {kept['3']} are in the source's order without faults"
    verdict = f"{order}, {kept['published']} with all of them."
    above = [TITLES[method] for method in ranked if mean["published"][method] > 1]
    if above:
        names = " and ".join(above)
        verdict += (
            f" With the faults, these methods are above full participation: {names}. Learning is "
            "slow, and these faults make the steps larger."
        )
    return [
        "## All faults, and the network of the code",
        "",
        "The network of the code ends in ReLU and softmax, before a loss that takes a softmax",
        f"again. With it full participation reaches an accuracy of {reached['published']:.1%},",
        f"without it {reached['3']:.1%}. Two differences are not put back: the logits of labels",
        "that a client does not have were set to 0 in training, and full participation had all",
        "data of all models.",
        "",
        *grid(("method", "source", "without faults", "all faults"), rows),
        "",
        verdict,
        "",
    ]
