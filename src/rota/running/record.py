"""What is written about a round: one line of rounds.jsonl."""

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
"""Suffix of the failure reason of a client that failed during the probe, before the draw."""
NEIGHBOURS = 64
"""A record counts the units that parts leave out in at most this many groups per layer."""


def same_score(tasks: Sequence[Task]) -> bool:
    """Whether all tasks have the same score, so that a mean over them has a meaning."""
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
    """The round as plain values: the same seed on the same machine gives the same record.

    With several models, `worst_accuracy` is the lowest of their accuracies, and `accuracy_spread`
    the standard deviation among them. If their scores are not `alike`, there are no means over
    them.
    """
    models = {}
    for s, name in enumerate(names):
        rows = (plan.model == s) & seen.ok
        loss = _or_none(np.mean, seen.loss[rows])
        models[name] = {"trained": int(rows.sum()), "train_loss": loss}
        if scores:
            models[name] |= _scores(scores[s])
    known = plan.probability[~np.isnan(plan.probability)]
    together = scores if scores and alike else []
    accuracies = np.array([score.accuracy for score in together])
    losses = np.array([score.loss for score in together])
    fair: Record = {}
    if len(names) > 1:
        fair["worst_accuracy"] = _or_none(np.min, accuracies)
        fair["accuracy_spread"] = _or_none(np.std, accuracies)
    return {
        "round": now,
        "accuracy": _or_none(np.mean, accuracies),
        "loss": _or_none(np.mean, losses),
        **fair,
        "models": models,
        "cohort": {name: plan.client[plan.model == s].tolist() for s, name in enumerate(names)},
        "probability": {"min": _or_none(np.min, known), "max": _or_none(np.max, known)},
        **_parts(names, plan, seen),
        **totals,
        "failures": _failures(names, plan, seen, asked),
    }


def _scores(score: Score) -> Record:
    """A model's test scores, and their spread over clients if these have test sets."""
    out: Record = {"loss": score.loss, "accuracy": score.accuracy}
    if score.by_client is not None:
        low, middle, high = np.nanquantile(score.by_client, [0.1, 0.5, 0.9]).tolist()
        out["client_accuracy"] = {"p10": low, "p50": middle, "p90": high}
    return out


def _parts(names: list[str], plan: Plan, seen: Seen) -> Record:
    """Who held only a part of a model, how long that took, and which units were left out.

    `slowest` is the client that the round waited for; it trains its models one after the other.
    """
    if plan.cut is None:
        return {}
    width = np.array([1.0, *(part.width for part in plan.cuts)])[plan.cut]
    rows = np.flatnonzero(width < 1)
    held = {}
    for s, name in enumerate(names):
        mine = rows[plan.model[rows] == s]
        held[name] = {
            "client": plan.client[mine].tolist(),
            "width": width[mine].tolist(),
            "seconds": seen.seconds[mine].tolist(),
        }
    slowest = None
    if np.isfinite(seen.seconds).any():
        by_client = np.bincount(plan.client, np.nan_to_num(seen.seconds))
        client = int(by_client.argmax())
        narrow = float(width[plan.client == client].min())
        slowest = {"client": client, "seconds": float(by_client[client]), "width": narrow}
    return {
        "parts": len(rows),
        "narrowest": float(width[rows].min(initial=1.0)),
        "slowest": slowest,
        "held": held,
        "dropped": _dropped(names, plan),
    }


def _dropped(names: list[str], plan: Plan) -> Record:
    """For each model and layer, how many rows left out each unit; means over neighbours."""
    out: Record = {}
    for k, part in enumerate(plan.cuts, start=1):
        rows, model = int(np.sum(plan.cut == k)), out.setdefault(names[part.model], {})
        for layer, kept in zip(part.cut.units.layers, part.cut.kept, strict=True):
            times = np.full(layer.size, rows)
            times[kept] = 0
            groups = np.array_split(times, min(layer.size, NEIGHBOURS))
            before = model.get(layer.name, [0.0] * len(groups))
            each = zip(groups, before, strict=True)
            model[layer.name] = [round(float(some.mean()) + old, 3) for some, old in each]
    return out


def _failures(names: list[str], plan: Plan, seen: Seen, asked: Asked | None) -> list[Record]:
    """The rows that failed while they were probed, and the rows of the plan that failed.

    A client that failed both times is listed once, with the second reason.
    """
    found: dict[tuple[int, int], str] = {}
    if asked is not None:
        rows, answers = asked.question.rows, asked.answers
        for i in np.flatnonzero(~answers.ok).tolist():
            found[int(rows.client[i]), int(rows.model[i])] = answers.reason[i] + ASKED
    for i in np.flatnonzero(~seen.ok).tolist():
        found[int(plan.client[i]), int(plan.model[i])] = seen.reason[i]
    return [
        {"client": client, "model": names[model], "reason": reason}
        for (client, model), reason in found.items()
    ]


def finite(value: Any) -> Any:
    """A value for JSON, in which null stands for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_record(line: Any, number: int) -> bool:
    """Whether a line that was read from a file has what later rounds and summaries read of it."""
    if not isinstance(line, dict) or line.get("round") != number:
        return False
    numbers = ("seconds", "client_seconds", "bytes_up", "bytes_down", "server_bytes")
    models, failures = line.get("models"), line.get("failures")
    if not isinstance(models, dict) or not models or not isinstance(failures, list):
        return False
    if any(
        not isinstance(each, dict) or not _whole(each.get("trained")) for each in models.values()
    ):
        return False
    scores = [each.get(key) for each in (line, *models.values()) for key in ("accuracy", "loss")]
    if not all(value is None or _number(value) for value in scores):
        return False
    if any("accuracy" in each and "loss" not in each for each in models.values()):
        return False
    for each in failures:
        if not isinstance(each, dict) or each.get("model") not in list(models):
            return False
        if not isinstance(each.get("reason"), str):
            return False
    return {"accuracy", "loss"} <= line.keys() and all(_number(line.get(key)) for key in numbers)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def tested(entry: Record) -> bool:
    """Whether the round's models were tested."""
    return any("accuracy" in model for model in entry["models"].values())


def reached(entry: Record, target: float | None) -> bool:
    """Whether all models of the round reached the target."""
    return all(at(model, target) for model in entry["models"].values())


def at(model: Record, target: float | None) -> bool:
    """Whether a model was tested and reached the target; null is a score that was not finite."""
    return target is not None and model.get("accuracy") is not None and model["accuracy"] >= target


def columns(records: list[Record]) -> dict[str, list[Any]]:
    """The rounds as a table: one column per plain value, and one per model and value."""
    table: dict[str, list[Any]] = {}
    for line in records:
        flat = {name: value for name, value in line.items() if not isinstance(value, dict | list)}
        for model, entry in line["models"].items():
            flat |= {f"{model}.{name}": value for name, value in entry.items()}
        for name, value in flat.items():
            table.setdefault(name, [None] * (line["round"] - 1)).append(value)
        for name in table.keys() - flat.keys():
            table[name].append(None)
    return table


def _or_none(statistic: Callable[[Array], Any], values: Array) -> float | None:
    return float(statistic(values)) if len(values) else None
