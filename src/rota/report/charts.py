"""The nouns of the page's charts.

A Series has a colour and can be hidden. A Chart is plotly's values with words around them. The
`meta` of a trace says what page.js needs to finish it: the `series` that it belongs to, what it is
drawn as (`role`), and, where the reader chooses the x axis, which entry of the page's x table it
runs `along`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rota.report.groups import Group
from rota.report.history import averaged, measured, shares

Trace = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One model of one group of runs; None is the mean of all models."""

    key: str
    label: str
    group: Group
    along: str
    """The group's entry in the x table."""
    model: str | None

    @property
    def share(self) -> bool:
        """Whether its accuracies are from 0 to 1."""
        return shares(self.group.runs, self.model)

    @property
    def measured(self) -> tuple[str, str]:
        """What its score is called, and whether "higher" or "lower" is better."""
        return measured(self.group.runs, self.model)


@dataclass
class Chart:
    """A chart. If it has no traces, the page shows `empty` instead."""

    key: str
    title: str
    note: str = ""
    traces: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    progress: bool = False
    """Whether the reader chooses its x axis."""
    empty: str = ""


def series_of(groups: list[Group]) -> list[Series]:
    """What has a colour of its own: the groups, or the models of a single group and their mean."""
    models = models_of(groups)
    if len(groups) == 1 and len(models) > 1:
        own = [Series(f"model {model}", model, groups[0], "0", model) for model in models]
        if averaged(groups[0].runs):
            own.insert(0, Series("mean", "mean of the models", groups[0], "0", None))
        return own
    only = models[0] if len(models) == 1 else None
    return [
        Series(f"run {number}", group.label, group, f"{number}", only)
        for number, group in enumerate(groups)
    ]


def worst_of(groups: list[Group]) -> list[Series]:
    """For a single group with several models, the worst model of each round."""
    if len(groups) > 1 or not any(_compared(group) for group in groups):
        return []
    return [Series("worst", "worst of the models", groups[0], "0", None)]


def _compared(group: Group) -> bool:
    return any(run.last("worst_accuracy") is not None for run in group.runs)


def models_of(groups: list[Group]) -> list[str]:
    """The models of all groups."""
    names = (model for group in groups for run in group.runs for model in run.models)
    return list(dict.fromkeys(names))


def axis(text: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text}, **more}


def safe(text: str) -> str:
    """Text for plotly, which would read tags in it."""
    return html.escape(text, quote=False)


def rounded(values: ArrayLike) -> list[float | None]:
    """Numbers in few digits, and None for those that are not finite, which JSON does not have."""
    return [
        float(f"{value:.6g}") if np.isfinite(value) else None
        for value in np.asarray(values, np.float64).tolist()
    ]
