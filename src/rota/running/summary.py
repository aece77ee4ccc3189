"""A run's summary, and when to end a run whose models no longer learn."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rota import scores
from rota.admission import NOT_FINITE
from rota.engine.local import TOO_FEW
from rota.errors import BadInput
from rota.experiment import Experiment
from rota.metrics import SUMMED
from rota.running.record import ASKED, Record, at, finite, tested

Summary = dict[str, Any]
"""A run's summary.json; in a comparison it also has the name of its `run`."""
FAIR = (
    *("worst_accuracy", "accuracy_spread"),
    *("own_mean", "own_worst", "own_p10", "own_spread", "shared_mean"),
)
"""What a round's record may say about models, and about what each client gets."""
PATIENCE = 5
"""A run ends after this many consecutive rounds with failed clients and no usable update."""


class Stuck(RuntimeError):
    """No model of the run learns any more, and more rounds would not change that."""


def refuse_stuck(experiment: Experiment, records: list[Record]) -> None:
    """End a run in which no model learns any more; one failed client, round or model does not."""
    wrong: dict[str, str] = {}
    number = 0
    for line in reversed(records):
        if any(model["trained"] for model in line["models"].values()):
            return
        reasons = {each["model"]: each["reason"] for each in line["failures"]}
        failed = {m: why for m, why in reasons.items() if why.removesuffix(ASKED) != TOO_FEW}
        largest = max(task.roster.sizes.max() for task in experiment.tasks)
        if not failed and line["failures"] and largest < 2:
            raise BadInput(
                f"no client can train ({TOO_FEW}): give clients two examples or more, or choose a "
                "model without BatchNorm"
            )
        wrong |= failed
        number += bool(failed)
        if number == min(PATIENCE, experiment.rounds):
            break
    else:
        return
    why = next(iter(wrong.values())).removesuffix(ASKED)
    whose = " and ".join(f"'{name}'" for name in wrong)
    rounds = f"{number} round{'s' * (number > 1)}"
    fix = f"fix the model, the loss or the data of {whose}"
    if why == NOT_FINITE:
        fix = f"a lower lr for {whose} may help"
    now = records[-1]["round"]
    raise Stuck(f"round {now}: no client's update could be used in {rounds} ({why}): {fix}")


def refuse_fewer(experiment: Experiment, records: list[Record]) -> None:
    """Refuse to resume a run with fewer rounds than it has, or with a last round without a test."""
    played = len(records)
    least = played + (played > 0 and not tested(records[-1]))
    if played >= experiment.rounds < least:
        raise BadInput(
            f"rounds is {experiment.rounds}, but the run has already played {played}: set rounds "
            f"to at least {least}"
        )


def summarise(experiment: Experiment, records: list[Record], wall_seconds: float) -> dict[str, Any]:
    """A run in a few numbers; its accuracies are those of the last test."""
    tests = [line for line in records if tested(line)]
    last = tests[-1]
    models: dict[str, Any] = {}
    for name, found in last["models"].items():
        mine = [(line["round"], line["models"][name]) for line in tests if name in line["models"]]
        names = experiment.names  # of a task's models: task.0, task.1 ...
        task = experiment.tasks[names.index(name if name in names else name.rpartition(".")[0])]
        known = [value for _, each in mine if (value := finite(each["accuracy"])) is not None]
        models[name] = {
            "loss": found["loss"],
            "score": scores.name(task.score, scores.SCORES),
            "accuracy": found["accuracy"],
            "best_accuracy": (min if task.better == "lower" else max)(known, default=None),
        }
        if experiment.target is not None:
            hits = [number for number, each in mine if at(each, experiment.target, task.better)]
            models[name]["rounds_to_target"] = hits[0] if hits else None
        failures = [each for line in records for each in line["failures"]]
        models[name]["failures"] = sum(each["model"] == name for each in failures)
    measured = [f"{name}_total" for name in SUMMED if name in experiment.metrics]
    totals = {key: records[-1][key] for key in ("seconds", "bytes_up", "bytes_down", *measured)}
    return {
        "rounds": len(records),
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        **{key: last[key] for key in FAIR if key in last},
        "models": models,
        **totals,
        "server_bytes": max(line["server_bytes"] for line in records),
        "client_seconds": sum(line["client_seconds"] for line in records),
        "failures": sum(len(line["failures"]) for line in records),
        "wall_seconds": round(wall_seconds, 3),
    }


def failed(*summaries: Summary, told: str = "the report says why") -> str:
    """How many rows failed, and for which of several models; empty where none did."""
    counts: Counter[str] = Counter()
    for summary in summaries:
        for name, model in summary["models"].items():
            counts[name] += model["failures"]
    n = sum(summary["failures"] for summary in summaries)
    if not n:
        return ""
    each = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    where = f" ({each})" if len(counts) > 1 else ""
    return f"{n} training{'s' * (n != 1)} could not be used{where}: {told}"


def diverged(*summaries: Summary) -> str:
    """Which models' losses are no longer finite; empty where all are."""
    lost: dict[str, None] = {}
    for summary in summaries:
        for name, model in summary["models"].items():
            if model["loss"] is None or not math.isfinite(model["loss"]):
                lost[f"'{name}'"] = None
    return f"the loss of {' and '.join(lost)} is not finite: a lower lr may help" if lost else ""
