"""The page's numbers: the tiles on top, and the tables of runs, failures and configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape

from rota.report import numbers
from rota.report.groups import Group, differing
from rota.report.runs import Run

Tile = tuple[str, str, str]
"""What, its value, a remark."""
Cell = Callable[[Run], float | None]


def tiles(groups: list[Group]) -> list[Tile]:
    """The key numbers of one setting, or which setting is best at what."""
    return _own(groups[0].runs) if len(groups) == 1 else _best(groups)


def _own(runs: list[Run]) -> list[Tile]:
    over = f"mean of {len(runs)} seeds" if len(runs) > 1 else ""
    target = [(f"Rounds to {numbers.percent(runs[0].target)}", *_to_target(runs))] if runs[0].target is not None else []
    return [
        ("Final accuracy", numbers.mean([run.accuracy for run in runs], numbers.percent), over),
        ("Best accuracy", numbers.mean([run.best for run in runs], numbers.percent), over),
        *target,
        ("Virtual time", numbers.mean([run.total("seconds") for run in runs], numbers.duration), over),
        ("Sent up", numbers.mean([run.total("bytes_up") for run in runs], numbers.size), over),
        ("Sent down", numbers.mean([run.total("bytes_down") for run in runs], numbers.size), over),
        ("Wall time", _wall(runs), "all runs" if len(runs) > 1 else ""),
    ]


def _best(groups: list[Group]) -> list[Tile]:
    wanted: list[tuple[str, Cell, numbers.Format, bool]] = [
        ("Highest final accuracy", lambda run: run.accuracy, numbers.percent, True),
        ("Highest peak accuracy", lambda run: run.best, numbers.percent, True),
        ("Fewest rounds to target", lambda run: run.rounds_to_target, numbers.count, False),
        ("Least virtual time", lambda run: run.total("seconds"), numbers.duration, False),
        ("Least data sent", _sent, numbers.size, False),
    ]
    out = []
    for label, cell, form, highest in wanted:
        # a setting counts when all its seeds have the number: those that missed the target would flatter the rest
        full = [group for group in groups if len(_known(group.runs, cell)) == len(group.runs)]
        means = [sum(known) / len(known) for known in (_known(group.runs, cell) for group in full)]
        if full:
            top = max(means) if highest else min(means)
            winners = [group for group, mean in zip(full, means, strict=True) if form(mean) == form(top)]
            who = winners[0].label if len(winners) == 1 else f"{'all' if len(winners) == len(groups) else len(winners)} settings"
            out.append((label, numbers.mean([cell(run) for run in full[means.index(top)].runs], form), who))
    return [*out, ("Wall time", _wall([run for group in groups for run in group.runs]), "all runs")]


def runs(groups: list[Group]) -> str:
    """A row for each group."""
    columns: list[tuple[str, Callable[[list[Run]], str]]] = [
        ("Final accuracy", lambda runs: numbers.mean([run.accuracy for run in runs], numbers.percent)),
        ("Best accuracy", lambda runs: numbers.mean([run.best for run in runs], numbers.percent)),
        ("Rounds", lambda runs: numbers.mean([len(run.rounds) for run in runs], numbers.count)),
        ("Rounds to target", lambda runs: " ".join(_to_target(runs)).strip()),
        ("Sent up", lambda runs: numbers.mean([run.total("bytes_up") for run in runs], numbers.size)),
        ("Sent down", lambda runs: numbers.mean([run.total("bytes_down") for run in runs], numbers.size)),
        ("Virtual time", lambda runs: numbers.mean([run.total("seconds") for run in runs], numbers.duration)),
        ("Client time", lambda runs: numbers.mean([run.client_seconds for run in runs], numbers.duration)),
        ("Server memory", lambda runs: numbers.mean([run.total("server_bytes") for run in runs], numbers.size)),
        ("Failures", lambda runs: numbers.mean([run.failures.total() for run in runs], numbers.count)),
        ("Wall time", lambda runs: numbers.mean([run.wall_seconds for run in runs], numbers.duration)),
    ]
    if all(run.target is None for group in groups for run in group.runs):
        columns = [column for column in columns if column[0] != "Rounds to target"]
    head = ["Run", *(["Seeds"] if any(len(group.runs) > 1 for group in groups) else []), *(name for name, _ in columns)]
    rows = []
    for group in groups:
        seeds = [f"{len(group.runs)}"] if "Seeds" in head else []
        rows.append([group.label, *seeds, *(cell(group.runs) for _, cell in columns)])
    return table(head, rows)


def failures(groups: list[Group]) -> str:
    """How often a client's work could not be used, by reason, over all seeds; nothing where it always could."""
    rows = []
    for group in groups:
        asked = sum(run.rows for run in group.runs)
        for reason, times in sum((run.failures for run in group.runs), Counter[str]()).most_common():
            rows.append([group.label, reason, numbers.count(times), numbers.percent(times / asked)])
    head = ["Run", "Reason", "Times", "Of all trainings"]
    if len(groups) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    return table(head, rows) if rows else ""


def differences(groups: list[Group]) -> str:
    """The configuration keys that are not the same in all groups; nothing where all are."""
    keys = differing([group.runs for group in groups])
    rows = [[group.label, *(values[number] or numbers.NONE for values in keys.values())] for number, group in enumerate(groups)]
    return table(["Run", *keys], rows) if keys else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = ""
    for first, *rest in rows:
        body += f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
    return f'<div class="table" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _to_target(runs: list[Run]) -> tuple[str, str]:
    known = _known(runs, lambda run: run.rounds_to_target)
    if not known:
        return ("not reached" if any(run.target is not None for run in runs) else numbers.NONE), ""
    return numbers.mean(known, numbers.count), "" if len(known) == len(runs) else f"({len(known)} of {len(runs)} seeds)"


def _wall(runs: list[Run]) -> str:
    known = _known(runs, lambda run: run.wall_seconds)
    return numbers.duration(sum(known)) if known else numbers.NONE


def _sent(run: Run) -> float | None:
    up, down = run.total("bytes_up"), run.total("bytes_down")
    return None if up is None or down is None else up + down


def _known(runs: list[Run], cell: Cell) -> list[float]:
    return [value for run in runs if (value := cell(run)) is not None]
