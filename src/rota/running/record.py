"""What is written of a round: one line of rounds.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rota.arrays import Array
from rota.engine import Score
from rota.plan import Plan, Seen, Task
from rota.probe import Asked

Record = dict[str, Any]
ASKED = ", asked before the draw"
"""Behind the reason of a failure of one that was not to train yet."""


def same_score(tasks: Sequence[Task]) -> bool:
    """Whether all tasks have one score: a mean of shares and, say, squared errors would say nothing."""
    return all(task.score == tasks[0].score for task in tasks)


def record(
    now: int,
    names: list[str],
    plan: Plan,
    seen: Seen,
    scores: list[Score] | None,
    totals: Record,
    asked: Asked | None = None,
    alike: bool = True,
) -> Record:
    """The round as plain values, the same for the same seed on the same machine: no wall-clock time in it.

    Where there are several models, `worst_accuracy` is the lowest of theirs and `accuracy_spread` the standard deviation among them.
    Where their scores are not `alike`, nothing is said of them together.
    """
    models = {}
    for s, name in enumerate(names):
        rows = (plan.model == s) & seen.ok
        entry: Record = {
            "trained": int(rows.sum()),
            "train_loss": _or_none(np.mean, seen.loss[rows]),
        }
        if scores:
            entry |= {"loss": scores[s].loss, "accuracy": scores[s].accuracy}
            by_client = scores[s].by_client
            if by_client is not None:
                low, middle, high = np.nanquantile(by_client, [0.1, 0.5, 0.9]).tolist()
                entry["client_accuracy"] = {"p10": low, "p50": middle, "p90": high}
        models[name] = entry
    known = plan.probability[~np.isnan(plan.probability)]
    together = scores if scores and alike else []
    accuracies, losses = (
        np.array([getattr(score, what) for score in together]) for what in ("accuracy", "loss")
    )
    fair = (
        {
            "worst_accuracy": _or_none(np.min, accuracies),
            "accuracy_spread": _or_none(np.std, accuracies),
        }
        if len(names) > 1
        else {}
    )
    return {
        "round": now,
        "accuracy": _or_none(np.mean, accuracies),
        "loss": _or_none(np.mean, losses),
        **fair,
        "models": models,
        "cohort": {name: plan.client[plan.model == s].tolist() for s, name in enumerate(names)},
        "probability": {"min": _or_none(np.min, known), "max": _or_none(np.max, known)},
        **totals,
        "failures": _failures(names, plan, seen, asked),
    }


def _failures(names: list[str], plan: Plan, seen: Seen, asked: Asked | None) -> list[Record]:
    """The rows that failed, and before them those that failed when they were asked, unless they failed again."""
    found: dict[tuple[int, int], str] = {}
    if asked is not None:
        rows, answers = asked.question.rows, asked.answers
        found = {
            (rows.client[i], rows.model[i]): answers.reason[i] + ASKED
            for i in np.flatnonzero(~answers.ok)
        }
    found |= {(plan.client[i], plan.model[i]): seen.reason[i] for i in np.flatnonzero(~seen.ok)}
    return [
        {"client": int(client), "model": names[model], "reason": reason}
        for (client, model), reason in found.items()
    ]


def finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tested(entry: Record) -> bool:
    """Whether the round's models were tested."""
    return any("accuracy" in model for model in entry["models"].values())


def reached(entry: Record, target: float | None) -> bool:
    """Whether the round's models are all at the target."""
    return all(at(model, target) for model in entry["models"].values())


def at(model: Record, target: float | None) -> bool:
    """Whether a model was tested and is at the target; a score that was not finite has been kept as null."""
    return target is not None and model.get("accuracy") is not None and model["accuracy"] >= target


def columns(records: list[Record]) -> dict[str, list[Any]]:
    """The rounds as a table: a column for each plain value of the lines, and MODEL.loss, MODEL.accuracy ... for each model."""
    table: dict[str, list[Any]] = {}
    for line in records:
        flat = {name: value for name, value in line.items() if not isinstance(value, dict | list)}
        flat |= {
            f"{model}.{name}": value
            for model, entry in line["models"].items()
            for name, value in entry.items()
        }
        for name, value in flat.items():
            table.setdefault(name, [None] * (line["round"] - 1)).append(value)
        for name in table.keys() - flat.keys():
            table[name].append(None)
    return table


def _or_none(statistic: Callable[[Array], Any], values: Array) -> float | None:
    return float(statistic(values)) if len(values) else None
