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
from rota.submodel.told import told

Record = dict[str, Any]
TOTALS = ("seconds", "client_seconds", "bytes_up", "bytes_down", "server_bytes")
ASKED = ", asked before the draw"
"""Suffix of the failure reason of a client that failed during the probe, before the draw."""


def same_score(tasks: Sequence[Task]) -> str:
    """What is "better" in all tasks; empty if their scores differ, and means have no meaning."""
    first = tasks[0].score, tasks[0].better
    return str(first[1]) if all((task.score, task.better) == first for task in tasks) else ""


def record(
    now: int,
    names: list[str],
    plan: Plan,
    seen: Seen,
    scores: list[Score] | None,
    totals: Record,
    asked: Asked | None = None,
    alike: str = "higher",
) -> Record:
    """The round as plain values: the same seed on the same machine gives the same record.

    With several models, `worst_accuracy` is the worst of their scores, and `accuracy_spread` their
    standard deviation. `alike` says what is better; if it is empty, there are no means over models.
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
        fair["worst_accuracy"] = _or_none(np.max if alike == "lower" else np.min, accuracies)
        fair["accuracy_spread"] = _or_none(np.std, accuracies)
    return {
        "round": now,
        "accuracy": _or_none(np.mean, accuracies),
        "loss": _or_none(np.mean, losses),
        **fair,
        "models": models,
        "cohort": {name: plan.client[plan.model == s].tolist() for s, name in enumerate(names)},
        "probability": {"min": _or_none(np.min, known), "max": _or_none(np.max, known)},
        **told(names, plan, seen),
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


def _failures(names: list[str], plan: Plan, seen: Seen, asked: Asked | None) -> list[Record]:
    """Rows that failed, before the draw or after it; a client that failed twice is listed once."""
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
    """Whether a line of a file is this round's record, with all that resuming a run reads."""
    try:
        models, failures = line["models"], line["failures"]
        scores = [line["accuracy"], line["loss"]]
        scores += [each.get(key) for each in models.values() for key in ("accuracy", "loss")]
        return (
            line["round"] == number
            and len(models) > 0
            and all(type(each["trained"]) is int for each in models.values())
            and all("loss" in each for each in models.values() if "accuracy" in each)
            and all(value is None or type(value) in (int, float) for value in scores)
            and all(type(line[key]) in (int, float) for key in TOTALS)
            and isinstance(failures, list)
            and all(each["model"] in models for each in failures)
            and all(isinstance(each["reason"], str) for each in failures)
        )
    except (AttributeError, KeyError, TypeError):
        return False


def tested(entry: Record) -> bool:
    """Whether the round's models were tested."""
    return any("accuracy" in model for model in entry["models"].values())


def reached(entry: Record, target: float | None, better: str | None = "higher") -> bool:
    """Whether all models of the round reached the target."""
    return all(at(model, target, better) for model in entry["models"].values())


def at(model: Record, target: float | None, better: str | None = "higher") -> bool:
    """Whether a model was tested and reached the target; null is a score that was not finite."""
    score = model.get("accuracy")
    if target is None or score is None:
        return False
    return bool(score <= target if better == "lower" else score >= target)


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
