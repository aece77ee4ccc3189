"""FLuID's accuracy studies: Tables 2, 3, 4 and 5, Figures 5, 6 and 8, and fixed capacities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from rota import data, models
from rota.data.partition import dirichlet
from rota.submodel import Fixed, Fjord, HeteroFl, Importance, Invariant, Ordered, Rolling
from rota_lab.reproduce.fluid import METHODS, Frozen, Study, estimate_study, run_study
from rota_lab.reproduce.fluid_page import Compared
from rota_lab.reproduce.fluid_settings import (
    CIFAR,
    CIFAR100,
    CIFAR_BATCH,
    CONVOLUTIONS,
    DIGITS,
    DIGITS100,
    FEW,
    LEAF,
    MANY,
    RESNET,
    SHAKESPEARE,
    SHAKESPEARE50,
    SMALL,
    first_batch,
    grouped,
    halved,
    writers,
)
from rota_lab.reproduce.result import Result

WIDTHS = ("0.95", "0.85", "0.75", "0.65", "0.5")


def stragglers(width: float, share: float) -> Fixed:
    """A share of the clients holds parts of one width."""
    return Fixed(sizes=(1.0, width), parts=(1 - share, share))


def _paper(
    settings: Sequence[str],
    numbers: Mapping[str, tuple[float, ...]],
    columns: Sequence[str] = WIDTHS,
) -> dict[tuple[str, str, str], float]:
    """FLuID's numbers on one data set, for the settings that stand for it."""
    out = {}
    for setting, (method, values) in product(settings, numbers.items()):
        for column, value in zip(columns, values, strict=True):
            out[setting, method, column] = value
    return out


FEMNIST = {
    "random": (80.6, 80.5, 80.3, 79.3, 79.2),
    "ordered": (80.6, 80.5, 80.4, 80.3, 79.7),
    "invariant": (81.1, 80.9, 80.8, 80.3, 80.1),
}
"""FLuID's accuracies on FEMNIST in Table 2."""

TABLE2 = Study(
    name="fluid-table2",
    summary="Five clients, one straggler: Random, Ordered and Invariant by width (FLuID, Table 2).",
    title="FLuID, Table 2: five clients with one straggler",
    first="FLuID's Table 2: one of five clients is a straggler and trains a part of width r, whose "
    "units are chosen at random, in order, or by Invariant dropout. FEMNIST is not at hand: digits "
    "by writer and LEAF's sample of FEMNIST stand for it. Their rows have FLuID's numbers on "
    "FEMNIST beside them. *Same random units* and *Exclude stragglers* are not in FLuID: the first "
    "leaves out units that are chosen at random once for the whole run, and the second leaves out "
    "the straggler.",
    why="Ordered leaves out the same units in every round, so the straggler's data never train "
    "what these own. *Same random units* has that in common with Ordered, and the chance with "
    "Random, which trains all units with the straggler's data. So fixed units should lose the more "
    "the more these data are worth. Whole models minus *Exclude stragglers* measure what they are "
    "worth: how much less accurate whole models are without them. This experiment was planned "
    "after a look at Ordered minus Random with the seeds 0 to 13, and before any run of *Exclude "
    "stragglers*. Invariant dropout differs from Random only in the units that were invariant when "
    "they were dropped: the tables above tell "
    "how many.",
    settings=(SMALL, CONVOLUTIONS, LEAF, CIFAR_BATCH, DIGITS, CIFAR, SHAKESPEARE),
    columns={width: stragglers(float(width), 0.2) for width in WIDTHS},
    extra={"frozen": Frozen(), "exclude": Ordered()},
    compared=(
        Compared(
            f"Whole models are above Ordered at {WIDTHS[-1]}",
            (("whole", "whole"),),
            (("ordered", WIDTHS[-1]),),
        ),
        Compared(
            f"Whole models are above Invariant at {WIDTHS[-1]}",
            (("whole", "whole"),),
            (("invariant", WIDTHS[-1]),),
        ),
        Compared(
            f"at {WIDTHS[-1]}, Random is above Same random units",
            (("random", WIDTHS[-1]),),
            (("frozen", WIDTHS[-1]),),
        ),
        Compared(
            f"at {WIDTHS[-1]}, Same random units is above Ordered",
            (("frozen", WIDTHS[-1]),),
            (("ordered", WIDTHS[-1]),),
        ),
    ),
    paper={
        **_paper(("small", "small-cnn", "writers", "leaf"), FEMNIST),
        **_paper(
            ("cifar10", "cifar10-batch"),
            {
                "random": (57.5, 56.8, 57.0, 57.2, 57.2),
                "ordered": (57.7, 57.0, 57.6, 57.3, 57.1),
                "invariant": (58.2, 58.4, 57.1, 57.5, 57.4),
            },
        ),
        **_paper(
            ("shakespeare",),
            {
                "random": (43.3, 42.5, 42.4, 41.8, 41.3),
                "ordered": (42.9, 42.3, 42.2, 41.9, 41.4),
                "invariant": (43.6, 42.5, 42.6, 42.2, 41.7),
            },
        ),
    },
)

SCALE = Study(
    name="fluid-scale",
    summary="50 to 100 clients, 20 % of them stragglers, by width (FLuID, Figure 5).",
    title="FLuID, Figure 5: 50 to 100 clients, a fifth of them stragglers",
    first="FLuID's Figure 5, whose numbers are in a picture only: 50 to 100 clients, of which 20 % "
    "are stragglers and train parts of width r, or no part at all.",
    settings=(MANY, DIGITS100, CIFAR100, RESNET, SHAKESPEARE50),
    columns={width: stragglers(float(width), 0.2) for width in WIDTHS},
    compared=(
        Compared(
            "Invariant is above Exclude stragglers",
            tuple(("invariant", width) for width in WIDTHS),
            tuple(("exclude", width) for width in WIDTHS),
        ),
    ),
    exclude=True,
)

CLUSTERED = "clusters"
CLUSTERS = Study(
    name="fluid-clusters",
    summary="Stragglers in four clusters of widths (FLuID, Table 4).",
    title="FLuID, Table 4: stragglers in four clusters of widths",
    first="FLuID's Table 4: a fifth of the clients are stragglers. They are in four clusters of "
    "equal sizes with parts of width 0.65, 0.75, 0.85 and 0.95. Beside it: all stragglers with one "
    "width.",
    settings=(MANY, DIGITS100, CIFAR100, SHAKESPEARE50),
    columns={
        CLUSTERED: Fixed(sizes=(1.0, 0.65, 0.75, 0.85, 0.95), parts=(0.8, 0.05, 0.05, 0.05, 0.05)),
        "0.75": stragglers(0.75, 0.2),
        "0.85": stragglers(0.85, 0.2),
    },
    paper=_paper(
        ("small", "writers"),
        {"random": (77.5,), "ordered": (77.4,), "invariant": (78.2,)},
        (CLUSTERED,),
    )
    | _paper(
        ("cifar10",),
        {"random": (71.7,), "ordered": (72.3,), "invariant": (72.7,)},
        (CLUSTERED,),
    )
    | _paper(
        ("shakespeare",),
        {"random": (53.8,), "ordered": (53.9,), "invariant": (54.1,)},
        (CLUSTERED,),
    ),
    compared=(
        Compared(
            "clusters are above 0.75",
            tuple((method, CLUSTERED) for method in METHODS),
            tuple((method, "0.75") for method in METHODS),
        ),
        Compared(
            "0.85 is above clusters",
            tuple((method, "0.85") for method in METHODS),
            tuple((method, CLUSTERED) for method in METHODS),
        ),
    ),
)

SHARES = ("10%", "20%", "30%", "40%")
RATIOS = Study(
    name="fluid-ratios",
    summary="From 10 % to 40 % of stragglers with parts of width 0.75 (FLuID, Figure 8).",
    title="FLuID, Figure 8: from 10 % to 40 % of the clients are stragglers",
    first="FLuID's Figure 8, whose numbers are in a picture only: 10 to 40 % of the clients are "
    "stragglers and train parts of width 0.75.",
    settings=(MANY, DIGITS100, CIFAR100, SHAKESPEARE50),
    columns={share: stragglers(0.75, float(share.rstrip("%")) / 100) for share in SHARES},
    compared=(
        Compared(
            "accuracy is higher with 10 % of stragglers than with 40 %",
            tuple((method, SHARES[0]) for method in METHODS),
            tuple((method, SHARES[-1]) for method in METHODS),
        ),
    ),
)

WIDTHS1000 = ("0.95", "0.85", "0.75", "0.65", "0.4")
THOUSAND = Study(
    name="fluid-1000",
    summary="1,000 clients, a tenth of whom train in each round (FLuID, Table 5).",
    title="FLuID, Table 5: 1,000 clients, of which a tenth train in each round",
    first="FLuID's Table 5: 1,000 clients, of which 100 are drawn in each round; a fifth of the "
    "clients are stragglers. Digits by writer stand for FEMNIST: a client has half of a writer's "
    "digits.",
    settings=(
        replace(
            SMALL,
            words="digits of 100 writers, each a client, and 2,000 test digits",
            load=writers(grouped(100, 1), FEW),
            rounds=100,
            seeds=10,
            cohort=10,
        ),
        replace(
            DIGITS,
            words="digits of 500 writers on 1,000 clients",
            load=writers(halved(1000)),
            rounds=500,
            cohort=100,
            joint=False,
        ),
    ),
    columns={width: stragglers(float(width), 0.2) for width in WIDTHS1000},
    paper=_paper(
        ("small", "writers"),
        {
            "random": (87.9, 87.5, 87.5, 86.9, 85.7),
            "ordered": (87.8, 88.0, 87.5, 87.3, 87.0),
            "invariant": (88.1, 88.2, 88.0, 87.7, 87.2),
        },
        WIDTHS1000,
    ),
)

EVEN = "mixed"
CAPACITIES = Study(
    name="fluid-capacities",
    summary="All choices of units at fixed capacities 1/64, 1/16, 1/4 and 1.",
    title="All choices of units at fixed capacities 1/64, 1/16, 1/4 and 1",
    first="Beyond FLuID: a quarter of the clients can hold 1/64 of the model's parameters, "
    "a quarter 1/16, a quarter 1/4, and a quarter the whole model, as in FIARSE's experiments. The "
    "widths are the square roots: 1/8, 1/4, 1/2 and 1. The source's numbers are those of "
    "FIARSE's paper for HeteroFL, for FedRolex beside Rolling, and for FIARSE itself beside "
    "Importance, which keeps the units with the largest weights. FIARSE keeps single parameters.",
    settings=(
        replace(
            MANY,
            words="digits of 40 writers, each a client, and 2,000 test digits",
            load=writers(grouped(40, 1), FEW),
            rounds=60,
        ),
        replace(
            CIFAR_BATCH,
            words="8,000 images of CIFAR-10's first batch, Dirichlet 0.3, 40 clients; 2,000 test",
            load=first_batch(dirichlet(40, alpha=0.3)),
            model=models.pfl_cnn,
            rounds=200,
            lr=0.05,
            optimizer="sgd",
            cohort=10,
            joint=False,
        ),
        replace(
            CIFAR,
            words="CIFAR-10, Dirichlet 0.3, 100 clients",
            load=lambda seed: data.cifar10(dirichlet(100, alpha=0.3), seed=seed),
            model=models.resnet18,
            rounds=800,
            cohort=10,
            joint=False,
        ),
    ),
    columns={EVEN: Fixed(sizes=(1.0, 0.5, 0.25, 0.125))},
    methods={
        **METHODS,
        "fjord": Fjord(),
        "heterofl": HeteroFl(),
        "rolling": Rolling(),
        "importance": Importance(),
    },
    paper={
        ("cifar10", "heterofl", EVEN): 66.05,
        ("cifar10", "rolling", EVEN): 65.98,
        ("cifar10", "importance", EVEN): 73.75,
    },
    compared=tuple(
        Compared(words, ((better, EVEN),), ((worse, EVEN),))
        for words, better, worse in (
            ("Importance is above HeteroFL", "importance", "heterofl"),
            ("Importance is above Rolling", "importance", "rolling"),
            ("HeteroFL is above Ordered", "heterofl", "ordered"),
            ("Ordered is above Exclude stragglers", "ordered", "exclude"),
        )
    ),
    exclude=True,
    over_costs=True,
)

THRESHOLDS = (1, 3, 5, 7, 8, 10, 100, 180, 500, 1000, 3000)
"""Relative changes in percent: those of Table 3 and Figure 6, and larger ones."""
QUARTER = "0.75"
TABLE3 = {1: (3, 80.1), 3: (6, 80.3), 5: (13, 80.5), 7: (18, 80.7), 8: (22, 80.7), 10: (31, 80.5)}
"""FLuID's thresholds on FEMNIST: the percentage of invariant units, and the accuracy."""


def _at(threshold: int) -> str:
    return f"threshold {threshold} %"


THRESHOLD = Study(
    name="fluid-threshold",
    summary="Invariant units and accuracy by threshold (FLuID, Table 3 and Figure 6).",
    title="FLuID, Table 3 and Figure 6: thresholds of Invariant dropout",
    first="FLuID's Table 3 and Figure 6: one of five clients trains a part of width 0.75. The "
    "threshold of Invariant dropout is fixed for the whole run, instead of growing until enough "
    "units are invariant. The settings with digits and LEAF's sample of FEMNIST have the paper's "
    "numbers on FEMNIST beside them.",
    why="A unit is invariant only if all scalars that it owns are, so a single small weight can "
    "make its relative change large. What a threshold means therefore depends on the network and "
    "on the size of the local steps: the paper itself has 10 % for FEMNIST, 180 % for CIFAR-10 and "
    "500 % for Shakespeare.",
    settings=(replace(SMALL, seeds=10), DIGITS, LEAF, CIFAR, SHAKESPEARE),
    columns={QUARTER: stragglers(0.75, 0.2)},
    methods={_at(each): Invariant(threshold=each / 100, growth=0.0) for each in THRESHOLDS},
    paper=_paper(
        ("small", "writers", "leaf"),
        {_at(each): (value,) for each, (_, value) in TABLE3.items()},
        (QUARTER,),
    ),
    invariant=_paper(
        ("small", "writers", "leaf"),
        {_at(each): (value,) for each, (value, _) in TABLE3.items()},
        (QUARTER,),
    ),
    compared=(
        Compared(
            "more units are invariant at a threshold of 10 % than at 1 %",
            ((_at(10), QUARTER),),
            ((_at(1), QUARTER),),
            "invariant",
        ),
        Compared(
            "more units are invariant at a threshold of 3000 % than at 100 %",
            ((_at(3000), QUARTER),),
            ((_at(100), QUARTER),),
            "invariant",
        ),
        Compared(
            "the accuracy at a threshold of 10 % is above that at 1 %",
            ((_at(10), QUARTER),),
            ((_at(1), QUARTER),),
        ),
    ),
)

STUDIES = {
    study.name: study
    for study in (TABLE2, THRESHOLD, SCALE, CLUSTERS, RATIOS, THOUSAND, CAPACITIES)
}


def reproductions() -> dict[str, Callable[..., Result]]:
    """The studies as functions, with their summaries."""
    out: dict[str, Callable[..., Result]] = {}
    for name, study in STUDIES.items():
        out[name] = partial(run_study, study)
        out[name].__doc__ = study.summary
    return out


def estimates() -> dict[str, Callable[..., list[str]]]:
    """How much work the studies are, as functions."""
    return {name: partial(estimate_study, study) for name, study in STUDIES.items()}
