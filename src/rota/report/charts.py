"""The nouns of the page's charts: a Series is what has a colour and can be hidden, a Chart is plotly values with words around them.

A trace's `meta` says what page.js needs to finish it: which `series` it belongs to, what it is drawn as (`role`), and, on charts that
follow the reader's choice of x axis, which entry of the page's x table it runs `along`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rota.report.groups import Group
from rota.report.runs import averaged, shares

Trace = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One model (None: the mean of all) of one group of runs."""

    key: str
    label: str
    group: Group
    along: str
    """The group's entry in the x table."""
    model: str | None

    @property
    def share(self) -> bool:
        """Whether its accuracies are shares."""
        return shares(self.group.runs, self.model)


@dataclass
class Chart:
    """A chart; without traces it says `empty`."""

    key: str
    title: str
    note: str = ""
    traces: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    progress: bool = False
    """Whether its x axis is the reader's choice."""
    empty: str = ""


def series_of(groups: list[Group]) -> list[Series]:
    """What has a colour of its own: the groups; on the page of a single group with several models, the models and, where they have one,
    their mean."""
    models = models_of(groups)
    if len(groups) == 1 and len(models) > 1:
        first = (
            [Series("mean", "mean of the models", groups[0], "0", None)]
            if averaged(groups[0].runs)
            else []
        )
        return [
            *first,
            *(Series(f"model {model}", model, groups[0], "0", model) for model in models),
        ]
    only = models[0] if len(models) == 1 else None
    return [
        Series(f"run {number}", group.label, group, f"{number}", only)
        for number, group in enumerate(groups)
    ]


def worst_of(groups: list[Group]) -> list[Series]:
    """On the page of a single group with several models, the worst of them: a line that goes from one model to another."""
    tested = len(groups) == 1 and any(
        run.last("worst_accuracy") is not None for run in groups[0].runs
    )
    return [Series("worst", "worst of the models", groups[0], "0", None)] if tested else []


def models_of(groups: list[Group]) -> list[str]:
    """The models of all groups."""
    return list(
        dict.fromkeys(model for group in groups for run in group.runs for model in run.models)
    )


def axis(text: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": text}, **more}


def safe(text: str) -> str:
    """Text for plotly, which reads tags in it."""
    return html.escape(text, quote=False)


def plain(values: ArrayLike) -> list[float | None]:
    """Numbers short enough for a page, with gaps for what is not finite (JSON has no word for it)."""
    return [
        float(f"{value:.6g}") if np.isfinite(value) else None
        for value in np.asarray(values, np.float64).tolist()
    ]
