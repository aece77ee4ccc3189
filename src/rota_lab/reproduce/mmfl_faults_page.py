"""What the faults of S0's published code do to its Table I, as a page."""

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
    "repeated": "the sum of the remembered updates is added once for every drawn client, not once a round",
    "uncounted": "weights take every client for one with one processor and all models",
    "misplaced": "weights have the shares of other clients: a model's k-th drawn client has the k-th's of those drawn for any model",
    "unshared": "clients are drawn by their loss alone, not by their share times their loss",
}
"""The faults, in words."""
SOURCE = PAPER["3"]
Faults = dict[str, list[str]]
"""The methods that have each fault."""


def report(found: Cells, faults: Faults, number: int, quick: bool) -> Result:
    """Tables, from the runs that are finished."""
    rows, finished = [], sum(len(runs) for runs in found.values())
    for fault, methods in faults.items():
        for method in methods:
            if values := relative(found, "3", f"{method}-{fault}"):
                name = f"{TITLES[method]}, {fault}: accuracy relative to full participation"
                rows.append(over_seeds(name, None if quick else SOURCE[method], values))
    for method, source in SOURCE.items():
        values = relative(found, "published", method)
        if values and method != "full":
            rows.append(
                over_seeds(
                    f"{TITLES[method]}, all faults: accuracy relative to full participation",
                    source,
                    values,
                )
            )
    checks = (
        {} if finished == number else {f"all runs are finished ({finished} of {number})": False}
    )
    lines = [SHORT if quick else FIRST, "", *_alone(found, faults)]
    if not quick:
        lines += [*_turned(found, faults), *_all(found), *made_on(found)]
    text = "\n".join(lines)
    return Result(
        "mmfl-faults", "The faults of the source's code, put back", text, rows, [], checks, quick
    )


SHORT = "**This is the short version, which shows the way and nothing else.**"
FIRST = """`rota reproduce mmfl-table1` measures S0's Table I ([results](mmfl-table1.md)), and finds some methods in another order. The
published code of S0's methods had faults at that time, though which version of it made the table is not known. Here they are put back
into the setting with 3 tasks, where all else is as on that page: accuracies are relative to full participation with the same seed, and in
brackets are 95 % intervals of means over the seeds (Student's t; of differences, seed by seed)."""


def _alone(found: Cells, faults: Faults) -> list[str]:
    """Every fault in every method that has it."""
    lines = [
        "## One fault at a time",
        "",
        *(f"- **{fault}**: {WORDS[fault]}" for fault in faults),
        "",
    ]
    rows = []
    for fault, methods in faults.items():
        for method in methods:
            name = f"{method}-{fault}"
            if with_it := relative(found, "3", name, method):
                without = np.mean(relative(found, "3", method, name))
                rows.append(
                    [
                        fault,
                        TITLES[method],
                        f"{without:.3f}",
                        f"{np.mean(with_it):.3f}",
                        _signed(lead(found, "3", name, method)),
                    ]
                )
    return [
        *lines,
        *grid(("fault", "method", "without it", "with it", "difference"), rows, numbers=(2, 3, 4)),
        "",
    ]


def _signed(values: list[float]) -> str:
    return ("+" if np.mean(values) > 0 else "") + difference(values)


def _turned(found: Cells, faults: Faults) -> list[str]:
    """The pairs whose order is not the source's, with each fault in those of the two methods that have it."""
    rows, right = [], dict.fromkeys(faults, 0)
    for better, worse in permutations(
        [method for method in SOURCE if relative(found, "3", method)], 2
    ):
        if SOURCE[better] <= SOURCE[worse] or np.mean(lead(found, "3", better, worse)) >= 0:
            continue
        cells = []
        for fault, methods in faults.items():
            pair = [
                f"{method}-{fault}" if method in methods else method for method in (better, worse)
            ]
            leads = (
                lead(found, "3", *pair)
                if pair != [better, worse] and all(relative(found, "3", each) for each in pair)
                else []
            )
            right[fault] += bool(leads) and float(np.mean(leads)) > 0
            cells.append(_bold(leads) if leads else "")
        theirs = f"+{SOURCE[better] - SOURCE[worse]:.3f}"
        rows.append(
            [
                f"{TITLES[better]} above {TITLES[worse]}",
                theirs,
                _signed(lead(found, "3", better, worse)),
                *cells,
            ]
        )
    if not rows:
        return []
    counts = (
        ", ".join(f"{number} by *{fault}*" for fault, number in right.items() if number) or "none"
    )
    return [
        "## Pairs that are in another order than the source's",
        "",
        "By how much the first is above the second: in the source, here, and with a fault in those of the two that have it. Of the",
        f"{len(rows)} pairs a single fault puts so many into the source's order: {counts}. Bold are those whose interval says so, too.",
        "",
        *grid(("pair", "source", "without faults", *faults), rows),
        "",
    ]


def _bold(leads: list[float]) -> str:
    sure = len(leads) > 1 and interval(leads).low > 0
    return f"**{_signed(leads)}**" if sure else _signed(leads)


def _all(found: Cells) -> list[str]:
    """All faults together, and the network of the code."""
    both = [
        method
        for method in SOURCE
        if all(relative(found, setting, method) for setting in ("3", "published"))
    ]
    if not both:
        return []
    ranked = sorted(both, key=lambda method: -SOURCE[method])
    mean = {
        setting: {m: float(np.mean(relative(found, setting, m))) for m in ranked}
        for setting in ("3", "published")
    }
    rows = [
        [TITLES[m], f"{SOURCE[m]:.3f}", *(f"{values[m]:.3f}" for values in mean.values())]
        for m in ranked
    ]
    reached = {
        setting: np.mean([run["accuracy"] for run in found[f"{setting}-full"].values()])
        for setting in mean
    }
    above = [TITLES[method] for method in ranked if mean["published"][method] > 1]
    kept = {
        setting: sum(values[a] > values[b] for a, b in _ordered(ranked))
        for setting, values in mean.items()
    }
    pairs = _ordered(ranked)
    verdict = f"Of {len(pairs)} pairs {kept['3']} are in the source's order without faults, {kept['published']} with all of them."
    if above:
        verdict += f" Above full participation are then {' and '.join(above)}: learning is slow, and these faults make steps larger."
    return [
        "## All faults, and the network of the code",
        "",
        "The network of the code ends in ReLU and softmax, before a loss that takes a softmax again. With it full participation reaches an",
        f"accuracy of {reached['published']:.1%}, without it {reached['3']:.1%}. Two differences are not put back: that logits of labels",
        "which a client does not have were set to 0 in training, and that full participation had all data of all models.",
        "",
        *grid(("method", "source", "without faults", "all faults"), rows),
        "",
        verdict,
        "",
    ]


def _ordered(ranked: list[str]) -> list[tuple[str, str]]:
    """All pairs, the one that is above the other in the source first."""
    return [(a, b) for a, b in permutations(ranked, 2) if SOURCE[a] > SOURCE[b]]
