"""rota.compare: the same tasks, or a recipe, with every combination of some settings and seeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rota.errors import BadInput, did_you_mean
from rota.experiment import Experiment
from rota.hints import called
from rota.notebook import show
from rota.plan import Task
from rota.policies import KINDS
from rota.recipe.compare import slug
from rota.running.run import Run, execute, run

COLUMNS = ("accuracy", "loss", "rounds", "seconds", "bytes_up", "bytes_down", "client_seconds")
"""What a comparison's table says of each run."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison by name; `settings` says what was varied in each."""

    runs: dict[str, Run]
    settings: dict[str, dict[str, Any]]
    folder: Path | None = None

    @property
    def table(self) -> dict[str, list[Any]]:
        """A dict of columns, one row per run: its setting, its seed and its numbers."""
        rows = [
            {**self.settings[name], **{key: each.summary[key] for key in COLUMNS}}
            for name, each in self.runs.items()
        ]
        return {key: [row[key] for row in rows] for key in rows[0]}

    def to_pandas(self) -> Any:
        """The table as a pandas data frame."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.table)

    def report(self, target: str | Path | None = None) -> Path:
        """Write one report about all runs, by default into the comparison's folder."""
        from rota.report import write

        if self.folder is None:
            raise BadInput("this comparison has no folder to report on: give rota.compare an `out`")
        folders = [self.folder / name for name in self.runs]
        return write(folders, Path(target or self.folder / "report.html"))

    def __str__(self) -> str:
        """The lines that `rota compare` prints."""
        from rota.cli.summary import table

        return "\n".join(table([{"run": name, **each.summary} for name, each in self.runs.items()]))

    def _repr_html_(self) -> str:
        columns = self.table
        from html import escape

        words = f"<pre>{escape(str(self))}</pre>"
        return words + show.table(list(columns), list(zip(*columns.values(), strict=True)))


def compare(
    what: list[Task] | str | Path,
    vary: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    watch: Callable[[str, dict[str, Any]], object] | None = None,
    **common: Any,
) -> Comparison:
    """Run the tasks, or a recipe, for every combination of the varied values and some seeds.

    `vary` has lists of values by key: arguments of `rota.run`, such as "sampler", and fields of all
    tasks, such as "task.lr"; for a recipe, its keys. Policies may be names. `common` is given to
    all runs. The seeds count up from `seed` and are the same for all values, so differences are
    paired. With `out` the runs are kept in folders there; `resume` finishes those that were not.
    `watch` is called with a run's name and each of its records.
    """
    if seeds < 1:
        raise BadInput(f"seeds is {seeds}: it must be at least 1")
    for key, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise BadInput(f"vary has {values!r:.60} for '{key}': give a list of values")
    made = _of_recipe if isinstance(what, str | Path) else _of_tasks
    first = int(common.pop("seed", 0))
    how = {"engine": engine, "device": device, "precision": precision}
    runs: dict[str, Run] = {}
    settings: dict[str, dict[str, Any]] = {}
    todo: dict[str, Callable[..., Run]] = {}
    for combination in itertools.product(*vary.values()):
        setting = dict(zip(vary, combination, strict=True))
        words = {key: _word(key, value) for key, value in setting.items()}
        for seed in range(first, first + seeds):
            name = "-".join([*(slug(word) for word in words.values()), f"seed{seed}"])
            if name in todo:
                raise BadInput(f"vary gives the run '{name}' twice: leave one of the values out")
            settings[name] = {**words, "seed": seed}
            todo[name] = made(what, setting, {**common, "seed": seed})
    for name, play in todo.items():
        folder = Path(out) / name if out else None
        begun = bool(resume and folder and (folder / "config.toml").exists())
        told = (lambda record, name=name: watch(name, record)) if watch else None
        runs[name] = play(**how, out=folder, resume=begun, watch=told)
    return Comparison(runs, settings, Path(out) if out else None)


def _of_tasks(tasks: Any, setting: dict[str, Any], common: dict[str, Any]) -> Callable[..., Run]:
    """A function that plays these tasks with one setting."""
    given = dict(common)
    known = {each.name for each in fields(Task)}
    for key, value in setting.items():
        if key.startswith("task."):
            field = key.removeprefix("task.")
            if field not in known:
                raise BadInput(f"vary names '{key}': {did_you_mean(field, known)}")
            tasks = [replace(task, **_changed(task, field, value)) for task in tasks]
        else:
            given[key] = value
    options = {"rounds", "seed", "evaluate", "target", "metrics", *KINDS}
    for key in given:
        if key not in options:
            raise BadInput(f"rota.compare has '{key}': {did_you_mean(key, options)}")
    return lambda **how: run(tasks, **given, **how)


def _changed(task: Task, field: str, value: Any) -> dict[str, Any]:
    """A field's new value; another score has its own direction."""
    return {field: value, **({"better": None} if field == "score" else {})}


def _of_recipe(what: Any, setting: dict[str, Any], common: dict[str, Any]) -> Callable[..., Run]:
    """A function that plays a recipe with one setting."""
    from rota import recipe

    config = recipe.read(str(what))
    for key, value in {**common, **setting}.items():
        config = recipe.assign(config, key, value)
    config = recipe.resolve(config)

    def play(**how: Any) -> Run:
        experiment: Experiment = recipe.build(config)
        return execute(experiment, config=config, **how)

    return play


def _word(key: str, value: Any) -> Any:
    """A value as a table and a folder's name show it: a policy's name and the options it was given.

    Options that have their defaults are left out.
    """
    if isinstance(value, dict):
        return " ".join(map(str, value.values()))
    if isinstance(value, str | int | float | None):
        return value
    kind = KINDS.get(key)
    if not kind:
        return getattr(value, "__name__", f"{value!r:.40}")
    options = fields(value) if is_dataclass(value) else ()
    given = [(getattr(value, each.name), each.default) for each in options]
    changed = [str(now) for now, usual in given if repr(now) != repr(usual)]
    return " ".join([called(value, kind.members), *changed])
