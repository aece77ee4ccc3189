"""The page's numbers: the tiles on top, and the tables of runs, failures and configurations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from html import escape

from rota.report import numbers
from rota.report.charts import models_of
from rota.report.groups import Group, differing
from rota.report.runs import Run, averaged, shares
from rota.running.record import ASKED

Tile = tuple[str, str, str]
"""What, its value, a remark."""
Cell = Callable[[Run], float | None]
Column = tuple[str, Cell, numbers.Format]
"""A number of a run: its name, its value, how it is written."""

TIME: Column = ("Virtual time", lambda run: run.total("seconds"), numbers.duration)
SENT: list[Column] = [
    ("Sent up", lambda run: run.total("bytes_up"), numbers.size),
    ("Sent down", lambda run: run.total("bytes_down"), numbers.size),
]
WORK: list[Column] = [
    ("Client computing", lambda run: run.client_seconds, numbers.duration),
    ("Server memory", lambda run: run.server_bytes, numbers.size),
]


def several(groups: list[Group]) -> bool:
    """Whether some run has more than one model."""
    return any(len(run.models) > 1 for group in groups for run in group.runs)


def accuracies(runs: list[Run]) -> list[Column]:
    """The final and the best accuracy, means over the models; nothing where no run has any."""
    form, word = _form(runs), _word(runs)
    columns: list[Column] = [
        (f"Final {word}", lambda run: run.accuracy, form),
        (f"Best {word}", lambda run: run.best, form),
    ]
    return columns if averaged(runs) else []


def fairness(runs: list[Run]) -> list[Column]:
    """The worst of a run's models and how far they are apart; nothing where there are no several, or their scores are not alike."""
    form = _form(runs)
    columns: list[Column] = [
        ("Worst model", lambda run: run.last("worst_accuracy"), form),
        ("Spread of models", lambda run: run.last("accuracy_spread"), form),
    ]
    return columns if averaged(runs) and any(len(run.models) > 1 for run in runs) else []


def tiles(groups: list[Group]) -> list[Tile]:
    """The key numbers of one setting, or which setting is best at what."""
    return _own(groups[0]) if len(groups) == 1 else _best(groups)


def _own(group: Group) -> list[Tile]:
    runs, many = group.runs, several([group])
    over = f"mean of {len(runs)} seeds" if len(runs) > 1 else ""
    target = []
    if runs[0].target is not None:
        target = [
            (
                f"Rounds to {_form(runs)(runs[0].target)}{', all at once' * many}",
                *_to_target(runs, runs[0].models),
            )
        ]

    def own(columns: list[Column]) -> list[Tile]:
        return [(name, _mean(runs, cell, form), over) for name, cell, form in columns]

    return [
        *own([*(accuracies(runs) or _each(runs, runs[0].models)), *fairness(runs)]),
        *target,
        *own([TIME, *SENT, *(WORK if many else [])]),
        ("Wall time", _wall(runs), "all runs" if len(runs) > 1 else ""),
    ]


def _best(groups: list[Group]) -> list[Tile]:
    many, runs = several(groups), _all(groups)
    best = [
        *zip(
            (f"Highest final {_word(runs)}", f"Highest peak {_word(runs)}"),
            accuracies(runs),
            strict=False,
        )
    ]
    best = best or [
        (f"Highest {column[0].removeprefix('Final ')}", column)
        for column in _each(runs, models_of(groups))
    ]
    reached: list[tuple[str, Column, bool]] = [
        *((label, column, True) for label, column in best),
        *zip(
            ("Highest worst model", "Least spread of models"),
            fairness(runs),
            (True, False),
            strict=False,
        ),
        ("Fewest rounds to target", ("", lambda run: run.rounds_to_target, numbers.count), False),
    ]
    paid: list[tuple[str, Column, bool]] = [
        ("Least virtual time", TIME, False),
        ("Least data sent", ("", _sent, numbers.size), False),
        *(
            [("Least client computing", WORK[0], False), ("Least server memory", WORK[1], False)]
            if many
            else []
        ),
    ]
    # what did not reach the target in every seed is not cheaper than what did
    there = _full(groups, lambda run: run.rounds_to_target) or groups
    of = ", of those at the target" if len(there) < len(groups) else ""
    out = []
    for among, remark, wanted in ((groups, "", reached), (there, of, paid)):
        for label, column, highest in wanted:
            if _full(among, column[1]):
                value, who = _winner(among, column, highest)
                out.append((label, value, who + remark))
    return [*out, ("Wall time", _wall(runs), "all runs")]


def _winner(groups: list[Group], column: Column, highest: bool) -> tuple[str, str]:
    """The best mean among those settings of which all seeds have the number (the others' would flatter), and whose it is."""
    _, cell, form = column
    full = _full(groups, cell)
    means = _averages(full, cell)
    top = max(means) if highest else min(means)
    best = [
        group
        for group, mean in zip(full, means, strict=True)
        if math.isclose(mean, top, rel_tol=1e-9)
    ]
    who = (
        best[0].label
        if len(best) == 1
        else f"{'all' if len(best) == len(groups) else len(best)} settings"
    )
    return _mean(best[0].runs, cell, form), who


def _full(groups: list[Group], cell: Cell) -> list[Group]:
    """The settings of which all seeds have a number."""
    return [group for group in groups if len(_known(group.runs, cell)) == len(group.runs)]


def runs(groups: list[Group], paid: bool = True) -> str:
    """A row for each group, with what it costs unless that is said elsewhere."""
    before: list[Column] = [
        *accuracies(_all(groups)),
        ("Rounds", lambda run: len(run.rounds), numbers.count),
    ]
    after: list[Column] = [
        *([*SENT, TIME, *WORK] if paid else [TIME]),
        ("Failures", lambda run: run.failures.total(), numbers.count),
        ("Wall time", lambda run: run.wall_seconds, numbers.duration),
    ]
    target = any(run.target is not None for group in groups for run in group.runs)
    seeds = any(len(group.runs) > 1 for group in groups)
    reach = "Rounds to target, all at once" if several(groups) else "Rounds to target"
    head = ["Run", *["Seeds"] * seeds, *_names(before), *[reach] * target, *_names(after)]
    rows = []
    for group in groups:
        reached = " ".join(_to_target(group.runs, group.runs[0].models)).strip()
        first, last = (
            [_mean(group.runs, cell, form) for _, cell, form in columns]
            for columns in (before, after)
        )
        rows.append(
            [group.label, *[f"{len(group.runs)}"] * seeds, *first, *[reached] * target, *last]
        )
    return table(head, rows)


def costs(groups: list[Group]) -> str:
    """What the groups cost, beside what they reach: means over the seeds, with their multiples of the least."""
    reached, paid = [*accuracies(_all(groups))[:1], *fairness(_all(groups))[:1]], [*SENT, *WORK]
    least = [min(_averages(groups, cell), default=0.0) for _, cell, _ in paid]
    rows = []
    for group in groups:
        score = [_mean(group.runs, cell, form) for _, cell, form in reached]
        multiples = [
            _multiple(group.runs, cell, form, low)
            for (_, cell, form), low in zip(paid, least, strict=True)
        ]
        rows.append([group.label, *score, *multiples])
    return table(["Run", *_names(reached), *_names(paid)], rows)


def models(groups: list[Group], names: list[str]) -> str:
    """Each model's final accuracy, and how they compare."""
    runs = _all(groups)
    mean = [("Mean", cell, form) for _, cell, form in accuracies(runs)[:1]]
    columns: list[Column] = [
        *mean,
        *((name, _accuracy_of(name), _form(runs, name)) for name in names),
        *fairness(runs),
    ]
    rows = [
        [group.label, *(_mean(group.runs, cell, form) for _, cell, form in columns)]
        for group in groups
    ]
    return table(["Run", *_names(columns)], rows)


def to_target(groups: list[Group], names: list[str]) -> str:
    """The rounds that each model took to the target, and until all were there in one round; nothing where there is none."""
    targets = sorted(
        {run.target for group in groups for run in group.runs if run.target is not None}
    )
    if not targets:
        return ""
    head = [f"Rounds to {' or '.join(map(_form(_all(groups)), targets))}", "All at once", *names]
    rows = []
    for group in groups:
        each = [group.runs[0].models, *([name] for name in names)]
        rows.append(
            [group.label, *(" ".join(_to_target(group.runs, some)).strip() for some in each)]
        )
    return table(head, rows)


def failures(groups: list[Group]) -> str:
    """How often a client's work could not be used, by reason, over all seeds; nothing where it always could."""
    rows = []
    for group in groups:
        asked = sum(run.rows for run in group.runs)
        for reason, times in sum(
            (run.failures for run in group.runs), Counter[str]()
        ).most_common():
            part = numbers.NONE if reason.endswith(ASKED) else numbers.percent(times / asked)
            rows.append([group.label, reason, numbers.count(times), part])
    head = ["Run", "Reason", "Times", "Of all trainings"]
    if len(groups) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    return table(head, rows) if rows else ""


def differences(groups: list[Group]) -> str:
    """The configuration keys that are not the same in all groups; nothing where all are."""
    keys = differing([group.runs for group in groups])
    rows = [
        [group.label, *(values[number] or numbers.NONE for values in keys.values())]
        for number, group in enumerate(groups)
    ]
    return table(["Run", *keys], rows) if keys else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = ""
    for first, *rest in rows:
        body += f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
    return f'<div class="table" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _all(groups: list[Group]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def _form(runs: list[Run], model: str | None = None) -> numbers.Format:
    return numbers.score(shares(runs, model))


def _word(runs: list[Run], model: str | None = None) -> str:
    """What is tested, in a word."""
    return "accuracy" if shares(runs, model) else "score"


def _each(runs: list[Run], models: list[str]) -> list[Column]:
    """Each model's final accuracy, for runs that have no means over them."""
    return [
        (f"Final {_word(runs, name)} of {name}", _accuracy_of(name), _form(runs, name))
        for name in models
    ]


def _accuracy_of(model: str) -> Cell:
    return lambda run: run.last("accuracy", model)


def _mean(runs: list[Run], cell: Cell, form: numbers.Format) -> str:
    return numbers.mean([cell(run) for run in runs], form)


def _averages(groups: list[Group], cell: Cell) -> list[float]:
    return [sum(known) / len(known) for group in groups if (known := _known(group.runs, cell))]


def _multiple(runs: list[Run], cell: Cell, form: numbers.Format, least: float) -> str:
    """12.3 MB (1.5×): the mean, and how many times the least it is, where that is not 0."""
    known = _known(runs, cell)
    if not known:
        return numbers.NONE
    mean = sum(known) / len(known)
    return form(mean) + (f" ({mean / least:.1f}×)" if least > 0 else "")


def _names(columns: list[Column]) -> list[str]:
    return [name for name, _, _ in columns]


def _to_target(runs: list[Run], models: list[str]) -> tuple[str, str]:
    """The rounds until all of these models were at the target, and how many of the seeds came there."""
    known = _known(runs, lambda run: run.rounds_to(models))
    if not known:
        could = any(run.target is not None and set(models) <= set(run.models) for run in runs)
        return ("not reached" if could else numbers.NONE), ""
    return numbers.mean(known, numbers.count), "" if len(known) == len(
        runs
    ) else f"({len(known)} of {len(runs)} seeds)"


def _wall(runs: list[Run]) -> str:
    known = _known(runs, lambda run: run.wall_seconds)
    return numbers.duration(sum(known)) if known else numbers.NONE


def _sent(run: Run) -> float | None:
    up, down = run.total("bytes_up"), run.total("bytes_down")
    return None if up is None or down is None else up + down


def _known(runs: list[Run], cell: Cell) -> list[float]:
    return [value for run in runs if (value := cell(run)) is not None]
