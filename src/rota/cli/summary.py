"""What `rota run` and `rota compare` print: summaries of runs in words and in tables."""

from __future__ import annotations

import itertools

from rota.cli.progress import loss, score
from rota.report import numbers
from rota.running.summary import Summary, diverged, failed
from rota.scores import of_all, title

Setting = list[Summary]
"""The summaries of the runs that differ only in their seed."""

MODELS = 12
"""The most models that have a column each."""
COSTS: dict[str, tuple[str, numbers.Format]] = {
    "sent up": ("bytes_up", numbers.size),
    "sent down": ("bytes_down", numbers.size),
    "client computing": ("client_seconds", numbers.duration),
    "server memory": ("server_bytes", numbers.size),
}


def sentences(summary: Summary) -> list[str]:
    """One run's results: the accuracies, the target, and what went wrong."""
    models = summary["models"]
    several = len(models) > 1
    where = f" on average over {len(models)} models" if several else ""
    words = {name: each.get("score", "accuracy") for name, each in models.items()}
    alike = common(summary)
    result = f"{title(alike)} {score(summary['accuracy'], alike)}, loss {loss(summary['loss'])}"
    lines = [f"{result}{where} after {rounds(summary)}"]
    if several:
        some = list(models.items())[:MODELS]
        each = ", ".join(f"{name} {score(model['accuracy'], words[name])}" for name, model in some)
        each += " ..." if len(models) > MODELS else ""
        worst, spread = (
            score(summary[key], alike) for key in ("worst_accuracy", "accuracy_spread")
        )
        lines.append(f"{each}; worst {worst}, spread {spread}")
    if summary.get("own_mean") is not None:
        of = ("own_mean", "own_worst", "own_p10", "own_spread")
        mean, least, low, apart = (score(summary[key], alike) for key in of)
        lines.append(
            f"clients on their own test sets: mean {mean}, worst {least}, 10th percentile {low}, "
            f"spread {apart}"
        )
    lines += [reached(summary), diverged(summary), failed(summary)]
    return [line for line in lines if line]


def table(results: list[Summary]) -> list[str]:
    """The lines of a comparison: means over the seeds, with half their 95 % intervals.

    One model: one line per setting. Several models: a table of accuracies (mean, each model, worst,
    standard deviation), one of the rounds to the target, and one of the costs with multiples of the
    least. The last lines say what went wrong in which setting.
    """
    by_setting = itertools.groupby(results, key=lambda result: _without_seed(result["run"]))
    settings = [list(runs) for _, runs in by_setting]
    models = list(dict.fromkeys(name for result in results for name in result["models"]))
    if len(models) == 1:
        lines = _one_model(settings)
    else:
        tables = [
            _accuracies(settings, models),
            _rounds_to_target(settings, models),
            _costs(settings),
        ]
        lines = [line for each in tables if each for line in ["", *each]][1:]
    said = [*_paired(settings), *_wrong(settings)]
    if any("±" in line for line in lines):
        said.insert(0, "± is half the 95 % interval of the mean over the seeds")
    return [*lines, *([""] if said and len(models) > 1 else []), *said]


def _paired(settings: list[Setting]) -> list[str]:
    """The settings' scores minus the first one's, seed by seed; and their clients' own."""
    found = {"": _scores(settings, "accuracy"), "mean client ": _scores(settings, "own_mean")}
    share = common(*itertools.chain(*settings)) == "accuracy"
    lines = []
    for k, setting in enumerate(settings[1:], start=1):
        said = [
            words + numbers.paired(scores[0], scores[k], share).replace(numbers.SPACE, " ")
            for words, scores in found.items()
            if len(scores[0].keys() & scores[k]) > 1
        ]
        if said:
            names = [_without_seed(some[0]["run"]) for some in (setting, settings[0])]
            lines.append(f"{names[0]} minus {names[1]}, paired by seed: {'; '.join(said)}")
    return lines


def _scores(settings: list[Setting], key: str) -> list[dict[str, float]]:
    """A number of each setting's runs, by seed."""
    return [
        {r["run"].rpartition("-seed")[2]: r[key] for r in runs if r.get(key) is not None}
        for runs in settings
    ]


def _one_model(settings: list[Setting]) -> list[str]:
    names = [_name(setting) for setting in settings]
    width = max(map(len, names))
    lines = []
    for name, setting in zip(names, settings, strict=True):
        word = common(*setting)
        found = f"{title(word)} {_percent([result['accuracy'] for result in setting], word)}"
        for who, key in (("mean", "own_mean"), ("worst", "own_worst")):
            own = [result.get(key) for result in setting]
            if None not in own:
                found += f"  {who} client {_percent(own, word)}"
        losses = [result["loss"] for result in setting]
        lost = loss(None if None in losses else sum(losses) / len(losses))
        if len(setting) == 1:
            played = rounds(setting[0])
        else:
            played = f"{_count([result['rounds'] for result in setting])} rounds"
        lines.append(f"{name:{width}}  {found}  loss {lost}  {played}")
    return lines


def _accuracies(settings: list[Setting], models: list[str]) -> list[str]:
    """One column each for the mean, the models, the worst model and the spread.

    The columns over all models are empty, and left out, where the models' scores are not alike.
    """
    columns: list[list[str]] = []

    word = common(*itertools.chain(*settings))

    def add(head: str, values: list[list[float | None]], of: str = word) -> None:
        if any(value is not None for each in values for value in each):
            columns.append([head, *(_percent(each, of) for each in values)])

    def over_models(key: str) -> list[list[float | None]]:
        return [[result.get(key) for result in setting] for setting in settings]

    add("mean", over_models("accuracy"))
    for model in models if len(models) <= MODELS else []:
        values = [[_model(each, model).get("accuracy") for each in runs] for runs in settings]
        add(model, values, _model(settings[0][0], model).get("score", "accuracy"))
    add("worst", over_models("worst_accuracy"))
    add("spread", over_models("accuracy_spread"))
    for head, key in (("clients", "own_mean"), ("worst", "own_worst"), ("p10", "own_p10")):
        add(head if head == "clients" else f"{head} client", over_models(key))
    columns.append(["rounds", *(_count([each["rounds"] for each in runs]) for runs in settings)])
    return _lines(["run", *map(_name, settings)], columns)


def _rounds_to_target(settings: list[Setting], models: list[str]) -> list[str]:
    """One column for each model; nothing without a target."""
    aimed = False
    for setting in settings:
        for result in setting:
            aimed |= any("rounds_to_target" in model for model in result["models"].values())
    if not aimed:
        return []
    columns = [[model, *(_hits(setting, model) for setting in settings)] for model in models]
    return _lines(["rounds to target", *map(_name, settings)], columns)


def _costs(settings: list[Setting]) -> list[str]:
    columns = []
    for head, (key, form) in COSTS.items():
        means = [sum(result[key] for result in runs) / len(runs) for runs in settings]
        columns.append([head, *(_cost(value, form, min(means)) for value in means)])
    return _lines(["cost of", *map(_name, settings)], columns)


def _wrong(settings: list[Setting]) -> list[str]:
    """In which settings models diverged, or updates could not be used."""
    lines = []
    for setting in settings:
        for say in (diverged, failed):
            some = [result for result in setting if say(result)]
            if not some:
                continue
            name = setting[0]["run"] if len(setting) == 1 else _without_seed(setting[0]["run"])
            if len(some) < len(setting):
                name += f" ({len(some)} of {len(setting)} seeds)"
            lines.append(f"{name}: {say(*some)}")
    return lines


def _name(setting: Setting) -> str:
    name: str = setting[0]["run"]
    return name if len(setting) == 1 else f"{_without_seed(name)} ({len(setting)} seeds)"


def _without_seed(run: str) -> str:
    return run.rpartition("-seed")[0]


def _model(result: Summary, name: str) -> Summary:
    model: Summary = result["models"].get(name, {})
    return model


def _lines(names: list[str], columns: list[list[str]]) -> list[str]:
    """Columns side by side, to the right of the runs' names."""
    first, *others = (max(map(len, column)) for column in (names, *columns))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, row, others)])
        for name, *row in zip(names, *columns, strict=True)
    ]


def _hits(setting: Setting, model: str) -> str:
    """A model's mean rounds to the target, and how many of the seeds reached it if not all did."""
    hits = [_model(result, model).get("rounds_to_target") for result in setting]
    known = [hit for hit in hits if hit is not None]
    if not known:
        return "-"
    mean = numbers.mean(known, numbers.count).replace(numbers.SPACE, " ")
    return mean if len(known) == len(setting) else f"{mean} ({len(known)} of {len(setting)})"


def _count(values: list[int]) -> str:
    return f"{sum(values) / len(values):.4g}"


def common(*summaries: Summary) -> str:
    """The name of the score of all models; "score" if they have several."""
    each = [model for summary in summaries for model in summary["models"].values()]
    return of_all(model.get("score", "accuracy") for model in each)


def _percent(values: list[float | None], word: str) -> str:
    """41.23%, or 41.2 ± 1.5 % for several seeds; scores other than accuracies are numbers."""
    if len(values) == 1:
        return "-" if values[0] is None else score(values[0], word)
    share = all(0 <= value <= 1 for value in values if value is not None)
    form = numbers.score(word == "accuracy" and share)
    return numbers.mean(values, form).replace(numbers.SPACE, " ")


def _cost(value: float, form: numbers.Format, least: float) -> str:
    text = form(value).replace(numbers.SPACE, " ")
    return f"{text} {value / least:.1f}x" if least > 0 else text


def rounds(summary: Summary) -> str:
    """2 rounds."""
    return f"{summary['rounds']} round{'s' * (summary['rounds'] != 1)}"


def reached(summary: Summary) -> str:
    """Which of several models reached the target, and when; empty without a target."""
    done, missed = [], []
    for name, model in summary["models"].items():
        if "rounds_to_target" not in model:
            continue
        n = model["rounds_to_target"]
        if n is None:
            missed.append(name)
        else:
            done.append(f"{name} after {n} round{'s' * (n != 1)}")
    if len(done) + len(missed) < 2:
        return ""
    words = []
    if done:
        words.append(f"reached by {', '.join(done)}")
    if missed:
        words.append(f"not reached by {', '.join(missed)}")
    return f"target {'; '.join(words)}"
