"""The page's numbers: the tiles at the top, and the tables of runs, failures and configurations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from html import escape
from typing import Any

from rota.report import numbers
from rota.report.charts import models_of
from rota.report.groups import Group, differing
from rota.report.history import History, averaged, measured, shares
from rota.running.record import ASKED

Tile = tuple[str, str, str]
"""A label, its value, a remark."""
Cell = Callable[[History], float | None]
Column = tuple[str, Cell, numbers.Format]
"""A number of a run: its name, its value, its format."""

TIME: Column = ("Virtual time", lambda run: run.total("seconds"), numbers.duration)
SENT: list[Column] = [
    ("Sent up", lambda run: run.total("bytes_up"), numbers.size),
    ("Sent down", lambda run: run.total("bytes_down"), numbers.size),
]
COMPUTING: Column = ("Client computing", lambda run: run.client_seconds, numbers.duration)
MEMORY: Column = ("Server memory", lambda run: run.server_bytes, numbers.size)
ROUNDS: Column = ("Rounds", lambda run: len(run.rounds), numbers.count)
FAILURES: Column = ("Failures", lambda run: run.failures.total(), numbers.count)
WALL: Column = ("Wall time", lambda run: run.wall_seconds, numbers.duration)


def several(groups: list[Group]) -> bool:
    """Whether some run has more than one model."""
    return any(len(run.models) > 1 for group in groups for run in group.runs)


def accuracies(runs: list[History]) -> list[Column]:
    """The final and the best accuracy as means over the models, if a run has such means."""
    if not averaged(runs):
        return []
    form, word = _form(runs), _word(runs)
    return [
        (f"Final {word}", lambda run: run.accuracy, form),
        (f"Best {word}", lambda run: run.best, form),
    ]


def fairness(runs: list[History]) -> list[Column]:
    """The worst of a run's models and their spread, if they can be compared."""
    if not averaged(runs) or all(len(run.models) < 2 for run in runs):
        return []
    form = _form(runs)
    return [
        ("Worst model", lambda run: run.last("worst_accuracy"), form),
        ("Spread of models", lambda run: run.last("accuracy_spread"), form),
    ]


def clients(runs: list[History]) -> list[Column]:
    """What clients get on their own test sets, if a run has some."""
    if all(run.last("own_mean") is None for run in runs):
        return []
    return [
        ("Mean client", lambda run: run.last("own_mean"), _form(runs)),
        ("Worst client", lambda run: run.last("own_worst"), _form(runs)),
    ]


def tiles(groups: list[Group]) -> list[Tile]:
    """The key numbers of one setting, or which setting is best at what."""
    return _own(groups[0]) if len(groups) == 1 else _best(groups)


def _own(group: Group) -> list[Tile]:
    runs, many = group.runs, several([group])
    over = f"mean of {len(runs)} seeds" if len(runs) > 1 else ""

    def own(columns: list[Column]) -> list[Tile]:
        return [(name, _mean(runs, cell, form), over) for name, cell, form in columns]

    scores = accuracies(runs) or _each(runs, runs[0].models)
    out = own([*scores, *fairness(runs), *clients(runs)])
    if runs[0].target is not None:
        label = f"Rounds to {_form(runs)(runs[0].target)}{', all at once' * many}"
        out.append((label, *_to_target(runs, runs[0].models)))
    out += own([TIME, *SENT, *([COMPUTING, MEMORY] if many else [])])
    return [*out, ("Wall time", _wall(runs), "all runs" if len(runs) > 1 else "")]


def _best(groups: list[Group]) -> list[Tile]:
    runs = _all(groups)
    reached: list[tuple[str, Column, bool]] = []
    if averaged(runs):
        (final, peak), word, high = accuracies(runs), _word(runs), _high(runs)
        reached += [
            (f"{_most(high)} final {word}", final, high),
            (f"{_most(high)} {'peak ' * high}{word}", peak, high),
        ]
    else:
        for name, column in zip(models_of(groups), _each(runs, models_of(groups)), strict=True):
            high = _high(runs, name)
            reached.append((f"{_most(high)} {column[0].removeprefix('Final ')}", column, high))
    if fairness(runs):
        worst, spread = fairness(runs)
        high = _high(runs)
        reached += [("Best worst model", worst, high), ("Least spread of models", spread, False)]
    for column in clients(runs):
        reached.append((f"Best {column[0].lower()}", column, _high(runs)))
    to_target: Column = ("", lambda run: run.rounds_to_target, numbers.count)
    reached.append(("Fewest rounds to target", to_target, False))
    paid: list[tuple[str, Column, bool]] = [
        ("Least virtual time", TIME, False),
        ("Least data sent", ("", _sent, numbers.size), False),
    ]
    if several(groups):
        paid += [
            ("Least client computing", COMPUTING, False),
            ("Least server memory", MEMORY, False),
        ]
    # a setting that missed the target with some seed is not cheaper than one that reached it
    there = _full(groups, lambda run: run.rounds_to_target) or groups
    remark = ", of the settings at the target" if len(there) < len(groups) else ""
    out = []
    for label, column, highest in reached:
        if _full(groups, column[1]):
            out.append((label, *_winner(groups, column, highest)))
    for label, column, highest in paid:
        if _full(there, column[1]):
            value, who = _winner(there, column, highest)
            out.append((label, value, who + remark))
    return [*out, ("Wall time", _wall(runs), "all runs")]


def _winner(groups: list[Group], column: Column, highest: bool) -> tuple[str, str]:
    """The best mean, and which setting has it.

    Only settings with the number for all seeds count: a mean over some of them would flatter.
    """
    _, cell, form = column
    full = _full(groups, cell)
    means = _averages(full, cell)
    top = max(means) if highest else min(means)
    best = [
        group
        for group, mean in zip(full, means, strict=True)
        if math.isclose(mean, top, rel_tol=1e-9)
    ]
    who = f"{'all' if len(best) == len(groups) else len(best)} settings"
    return _mean(best[0].runs, cell, form), best[0].label if len(best) == 1 else who


def _full(groups: list[Group], cell: Cell) -> list[Group]:
    """The settings that have a number for all seeds."""
    return [group for group in groups if len(_known(group.runs, cell)) == len(group.runs)]


def paired(groups: list[Group]) -> str:
    """Each setting's final scores minus the first one's, by seed; empty without common seeds."""
    if len(groups) < 2:
        return ""
    runs = _all(groups)
    columns = accuracies(runs)[:1]
    if not columns:
        columns = [(m, _accuracy_of(m), _form(runs, m)) for m in models_of(groups)]
    columns += clients(runs)[:1]

    def by_seed(group: Group, cell: Cell) -> dict[Any, float]:
        found = {run.config.get("seed"): cell(run) for run in group.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    rows = []
    for group in groups[1:]:
        common = len(by_seed(group, columns[0][1]).keys() & by_seed(groups[0], columns[0][1]))
        if common < 2:
            continue
        told = [
            numbers.paired(by_seed(groups[0], cell), by_seed(group, cell), form is numbers.percent)
            for _, cell, form in columns
        ]
        rows.append([group.label, f"{common}", *told])
    return table(["Setting", "Seeds", *_names(columns)], rows) if rows else ""


def runs(groups: list[Group], paid: bool = True) -> str:
    """A row for each group, with its costs unless another table has them."""
    before = [*accuracies(_all(groups)), ROUNDS]
    after = [*SENT, TIME, COMPUTING, MEMORY] if paid else [TIME]
    after += [FAILURES, WALL]
    target = any(run.target is not None for run in _all(groups))
    seeds = any(len(group.runs) > 1 for group in groups)
    reach = "Rounds to target, all at once" if several(groups) else "Rounds to target"
    head = ["Run", *["Seeds"] * seeds, *_names(before), *[reach] * target, *_names(after)]
    rows = []
    for group in groups:
        row = [group.label, *[f"{len(group.runs)}"] * seeds, *_means(group, before)]
        if target:
            row.append(" ".join(_to_target(group.runs, group.runs[0].models)).strip())
        rows.append([*row, *_means(group, after)])
    return table(head, rows)


def costs(groups: list[Group]) -> str:
    """The groups' costs and scores: means over the seeds, with multiples of the least cost."""
    reached = [*accuracies(_all(groups))[:1], *fairness(_all(groups))[:1]]
    paid = [*SENT, COMPUTING, MEMORY]
    least = [min(_averages(groups, cell), default=0.0) for _, cell, _ in paid]
    rows = []
    for group in groups:
        row = [group.label, *_means(group, reached)]
        for (_, cell, form), low in zip(paid, least, strict=True):
            row.append(_multiple(group.runs, cell, form, low))
        rows.append(row)
    return table(["Run", *_names(reached), *_names(paid)], rows)


def models(groups: list[Group], names: list[str]) -> str:
    """Each model's final accuracy, and how they compare."""
    runs = _all(groups)
    columns = [("Mean", cell, form) for _, cell, form in accuracies(runs)[:1]]
    columns += [(name, _accuracy_of(name), _form(runs, name)) for name in names]
    columns += fairness(runs)
    rows = [[group.label, *_means(group, columns)] for group in groups]
    return table(["Run", *_names(columns)], rows)


def to_target(groups: list[Group], names: list[str]) -> str:
    """Each model's rounds to the target, and the first round with all at it; empty without one."""
    runs = _all(groups)
    targets = sorted({run.target for run in runs if run.target is not None})
    if not targets:
        return ""
    aims = " or ".join(map(_form(runs), targets))
    rows = []
    for group in groups:
        row = [group.label]
        for some in (group.runs[0].models, *([name] for name in names)):
            row.append(" ".join(_to_target(group.runs, some)).strip())
        rows.append(row)
    return table([f"Rounds to {aims}", "All at once", *names], rows)


def failures(groups: list[Group]) -> str:
    """How often rows failed, by reason, over all seeds; empty if none did."""
    rows = []
    for group in groups:
        trainings = sum(run.rows for run in group.runs)
        counts = sum((run.failures for run in group.runs), Counter[str]())
        for reason, times in counts.most_common():
            share = numbers.NONE if reason.endswith(ASKED) else numbers.percent(times / trainings)
            rows.append([group.label, reason, numbers.count(times), share])
    head = ["Run", "Reason", "Times", "Of all trainings"]
    if len(groups) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    return table(head, rows) if rows else ""


def differences(groups: list[Group]) -> str:
    """The configuration keys that differ between the groups; empty if none does."""
    keys = differing([group.runs for group in groups])
    rows = []
    for number, group in enumerate(groups):
        rows.append([group.label, *(values[number] or numbers.NONE for values in keys.values())])
    return table(["Run", *keys], rows) if keys else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    inside = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table" tabindex="0">{inside}</div>'


def _all(groups: list[Group]) -> list[History]:
    return [run for group in groups for run in group.runs]


def _form(runs: list[History], model: str | None = None) -> numbers.Format:
    return numbers.score(shares(runs, model))


def _word(runs: list[History], model: str | None = None) -> str:
    """What a test measures."""
    return measured(runs, model)[0]


def _high(runs: list[History], model: str | None = None) -> bool:
    """Whether a higher score is better."""
    return measured(runs, model)[1] != "lower"


def _most(high: bool) -> str:
    return "Highest" if high else "Lowest"


def _each(runs: list[History], models: list[str]) -> list[Column]:
    """Each model's final accuracy, for runs without means over the models."""
    columns = []
    for name in models:
        title = f"Final {_word(runs, name)} of {name}"
        columns.append((title, _accuracy_of(name), _form(runs, name)))
    return columns


def _accuracy_of(model: str) -> Cell:
    return lambda run: run.last("accuracy", model)


def _mean(runs: list[History], cell: Cell, form: numbers.Format) -> str:
    return numbers.mean([cell(run) for run in runs], form)


def _means(group: Group, columns: list[Column]) -> list[str]:
    return [_mean(group.runs, cell, form) for _, cell, form in columns]


def _averages(groups: list[Group], cell: Cell) -> list[float]:
    return [sum(known) / len(known) for group in groups if (known := _known(group.runs, cell))]


def _multiple(runs: list[History], cell: Cell, form: numbers.Format, least: float) -> str:
    """12.3 MB (1.5×): the mean, and how many times the least it is, unless that is 0."""
    known = _known(runs, cell)
    if not known:
        return numbers.NONE
    mean = sum(known) / len(known)
    return form(mean) + (f" ({mean / least:.1f}×)" if least > 0 else "")


def _names(columns: list[Column]) -> list[str]:
    return [name for name, _, _ in columns]


def _to_target(runs: list[History], models: list[str]) -> tuple[str, str]:
    """The rounds until all of these models were at the target, and how many seeds reached it."""
    known = _known(runs, lambda run: run.rounds_to(models))
    if not known:
        could = any(run.target is not None and set(models) <= set(run.models) for run in runs)
        return ("not reached" if could else numbers.NONE), ""
    some = "" if len(known) == len(runs) else f"({len(known)} of {len(runs)} seeds)"
    return numbers.mean(known, numbers.count), some


def _wall(runs: list[History]) -> str:
    known = _known(runs, lambda run: run.wall_seconds)
    return numbers.duration(sum(known)) if known else numbers.NONE


def _sent(run: History) -> float | None:
    up, down = run.total("bytes_up"), run.total("bytes_down")
    return None if up is None or down is None else up + down


def _known(runs: list[History], cell: Cell) -> list[float]:
    return [value for run in runs if (value := cell(run)) is not None]
