"""The sections of the page on K-Vib's theory: tables, and sentences that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rota.metrics import variance
from rota_lab.reproduce.interval import interval
from rota_lab.reproduce.kvib_parts import (
    BOUNDS,
    BUDGET,
    LARGEST,
    LEARNERS,
    PROCEDURES,
    ROUNDS,
    SEEDS,
    SETTINGS,
    WIDE,
    named,
)
from rota_lab.reproduce.kvib_stack import DRAWS as SEQUENTIAL
from rota_lab.reproduce.kvib_stack import SYSTEMATIC
from rota_lab.reproduce.kvib_studies import (
    DRAWS,
    MADE_ROUNDS,
    OTHER_ROUNDS,
    RATES,
    SWEEP_BUDGET,
    SWEPT,
)
from rota_lab.reproduce.kvib_studies import LARGEST as HELD
from rota_lab.reproduce.kvib_theory_claims import (
    ALL_BUDGETS,
    by_reading,
    exponents,
    growth,
)
from rota_lab.reproduce.kvib_theory_ours import ours
from rota_lab.reproduce.kvib_theory_text import (
    AVARE,
    BOUND,
    DIFFERENCES,
    FIGURE_6,
    INTRODUCTION,
    MEASURED,
    PROCEDURE,
    READINGS,
    SWEEP,
    TERMS_TEXT,
    THEOREMS,
    WARNING,
)
from rota_lab.reproduce.kvib_theory_view import (
    KVIB,
    LEARNER_TITLES,
    MEASURES,
    OURS,
    PROCEDURE_TITLES,
    SETTING_TITLES,
    SOURCE,
    WHERES,
    View,
    middle,
    plain,
    positive,
    table,
    times,
    title,
)
from rota_lab.reproduce.parts import Found

__all__ = ["ALL", "INTRODUCTION", "MEASURED", "WARNING", "not_run", "numbers"]

FIRST = (*SOURCE.values(), KVIB, "kvib-full", "optimal", OURS)
"""The lanes that a table begins with; the others follow."""


def numbers(view: View) -> dict[str, str]:
    """What the introduction says of the parts."""
    parts = list(view.found.values())
    rounds = {"logits": ROUNDS, "other": OTHER_ROUNDS, "made": MADE_ROUNDS}
    for part in parts:
        if part["study"] in rounds:
            rounds[part["study"]] = part["rounds"]
    seeds = {name: view.seeds(name) for name in (*SETTINGS, "sweep")}
    for name in ("budgets", "systematic"):
        for setting, tail in (("logits", ""), ("twice", "_twice")):
            some = [part for part in view.more(setting) if part["study"] == name]
            seeds[f"{name}{tail}"] = len(some)
    return {
        **{f"{study}_rounds": str(count) for study, count in rounds.items()},
        **{f"{name}_seeds": str(count) for name, count in seeds.items()},
        "budget": str(BUDGET),
        "draws": str(DRAWS),
        "sequential": str(SEQUENTIAL),
        "systematic": str(SYSTEMATIC),
        "many": str(variance.DRAWS),
        "planned": str(len(SEEDS)),
        "wide": str(len(WIDE)),
        "minutes": f"{sum(part['seconds'] for part in parts) / 60:.0f}",
        "logits_rate": f"{SETTINGS['logits'][0]:g}",
        "twice_rate": f"{SETTINGS['twice'][0]:g}",
    }


def primary(view: View) -> str:
    """All samplers at K = 10, in both settings."""
    out = []
    for setting, name in SETTING_TITLES.items():
        out.append(f"## {name.capitalize()}, K = {BUDGET}: {view.seeds(setting)} seeds")
        for where, words in WHERES.items():
            out += [f"### {words.capitalize()}", _lanes(view, setting, where), ""]
    return "\n".join(out)


def _lanes(view: View, setting: str, where: str) -> str:
    """A row for every lane at K = 10."""
    names = [f"{learner}-{by}" for learner in ("uniform", *LEARNERS) for by in PROCEDURE_TITLES]
    lanes = [*FIRST, *(name for name in (*names, "clustered-size") if name not in FIRST)]
    tests = ("loss", "accuracy") if where == "own" else ()
    heads = ["sampler", *MEASURES.values(), *(f"last {test}" for test in tests)]
    heads.append("variance / K-Vib's")
    rows = []
    for lane in lanes:
        if not view.numbers(setting, where, lane, "variance"):
            continue
        cells = [title(lane)]
        for key in MEASURES:
            values = list(view.numbers(setting, where, lane, key).values())
            cells.append(plain(values) if key == "regret" else positive(values))
        for key in tests:
            values = list(view.numbers(setting, where, lane, key).values())
            cells.append(f"{sum(values) / len(values):.3f}" if values else "–")
        cells.append(times(view.ratios(setting, where, lane, KVIB, "variance")))
        rows.append(cells)
    return table(heads, rows)


def procedure(view: View) -> str:
    """The table of learners by procedures."""
    out = ["## Learner by procedure"]
    for where, words in WHERES.items():
        rows = []
        for learner in ("uniform", *LEARNERS):
            cells = [LEARNER_TITLES[learner]]
            for by in PROCEDURE_TITLES:
                values = view.numbers("logits", where, f"{learner}-{by}", "variance").values()
                cells.append(positive(list(values)))
            if set(cells[1:]) != {"–"}:
                rows.append(cells)
        heads = [f"cumulative variance, {words}", *PROCEDURE_TITLES.values()]
        out += [table(heads, rows), ""]
    return "\n".join([*out, PROCEDURE, _whose(view)])


def _whose(view: View) -> str:
    """Sentences on whose gain it is, from the ratios."""
    out = []
    for where, words in WHERES.items():
        pairs = {
            "K-Vib's rule by the change from replacement to coins": ("kvib-multinomial", KVIB),
            "Avare's rule by the same change": ("avare-multinomial", "avare-independent"),
            "Avare with replacement by K-Vib": ("avare-multinomial", KVIB),
            "Avare on coins by K-Vib": ("avare-independent", KVIB),
            "Vrb with replacement by K-Vib": ("vrb-multinomial", KVIB),
            "Vrb on coins by K-Vib": ("vrb-independent", KVIB),
            "K-Vib by coins in proportion to the data": (KVIB, "proportional-independent"),
        }
        for name, lanes in pairs.items():
            logs = view.ratios("logits", where, *lanes, "variance")
            if logs:
                out.append([name, words, times(logs)])
    heads = ["the variance is divided by this factor, from", "on", "factor"]
    return table(heads, out) + "\n" + _verdict(view)


def _verdict(view: View) -> str:
    """Is K-Vib's distance to Avare the procedure's? Only where the intervals say so."""
    out = []
    for where, words in WHERES.items():
        coins = view.ratios("logits", where, "avare-independent", KVIB, "variance")
        draws = view.ratios("logits", where, "avare-multinomial", "kvib-multinomial", "variance")
        if len(coins) > 1 and len(draws) > 1:
            ends = [interval(coins), interval(draws)]
            if all(each.high < 0 for each in ends):
                tail = "K-Vib's learner gains nothing over Avare's by the same procedure"
            elif all(each.low > 0 for each in ends):
                tail = "K-Vib's learner is better than Avare's by the same procedure"
            else:
                tail = "the comparison of K-Vib's learner with Avare's depends on the procedure"
            out.append(f"- On {words}, {tail}.")
    return "\n".join(["", *out, ""]) if out else ""


def budgets(view: View) -> str:
    """Variances and regrets against the budget."""
    out = ["## Against the budget", READINGS]
    heads = [f"K = {budget}" for budget in ALL_BUDGETS]
    names = (*FIRST, "avare-independent", "proportional-independent", "clustered-size")
    for where, words in WHERES.items():
        rows = []
        for lane in names:
            columns = [
                list(view.numbers("logits", where, named(lane, budget), "variance").values())
                for budget in ALL_BUDGETS
            ]
            if sum(map(bool, columns)) > 1:
                rows.append([title(lane), *(positive(each) for each in columns)])
        out += [table([f"cumulative variance, {words}", *heads], rows), ""]
    for key, how in (("regret", "regret (eq. 6)"), ("unscaled", "regret with q = p / K in l")):
        for where, words in WHERES.items():
            rows = []
            for lane in (*SOURCE.values(), *((KVIB,) if key == "regret" else ())):
                columns = [
                    list(by_reading(view, where, lane, key, budget).values())
                    for budget in ALL_BUDGETS
                ]
                if sum(map(bool, columns)) > 1:
                    rows.append([title(lane), *(plain(each) for each in columns)])
            out += [table([f"{how}, {words}", *heads], rows), ""]
    return "\n".join(out)


def sweep(view: View) -> str:
    """The learning rates that were tried on logits."""
    parts, rows, best = view.study("sweep"), [], ["least mean loss at"]
    means: dict[str, dict[float, float]] = {lane: {} for lane in SWEPT}
    for rate in RATES if parts else ():
        cells = [f"{rate:g}"]
        for lane in SWEPT:
            each = [part["own"][f"{lane}-{rate:g}"]["loss"] for part in parts]
            loss = [one for one in each if one is not None]
            means[lane][rate] = middle(loss) if loss else math.inf
            ends = f" ({min(loss):.3g} to {max(loss):.3g})" if loss else ""
            cells.append(f"{means[lane][rate]:.3g}{ends}")
        rows.append(cells)
    if rows:
        best += [f"{min(by, key=lambda rate: by[rate]):g}" for by in means.values()]
        rows.append(best)
    heads = ["learning rate", *(title(lane) for lane in SWEPT)]
    swept = parts[0]["rounds"] if parts else 0
    text = SWEEP.format(**{**numbers(view), "budget": SWEEP_BUDGET, "sweep_rounds": swept})
    return "\n".join(["## The learning rate on logits", text, table(heads, rows), ""])


def avare(view: View) -> str:
    """Avare's three starts."""
    rows = []
    for start, name in (
        ("-zero", "an unseen client has a norm of 0"),
        ("", "an unseen client counts as the largest seen (rota's default)"),
        ("-pass", "all norms are known before the first round"),
    ):
        cells = [name]
        for by in ("multinomial", "independent"):
            lane = f"avare{start}-{by}"
            values = list(view.numbers("logits", "shared", lane, "variance").values())
            cells.append(positive(values))
            cells.append(times(view.ratios("logits", "shared", lane, KVIB, "variance")))
        rows.append(cells)
    heads = ["Avare's start", "with replacement", "/ K-Vib's", "coins", "/ K-Vib's"]
    return "\n".join(["## Avare's start", AVARE, table(heads, rows), ""])


def bound(view: View) -> str:
    """G by one rule, and theta = 0.3 with G varied."""
    rows = []
    pairs = [(f"{part:g} times the largest score", f"largest-{part:g}") for part in LARGEST]
    for name, tail in [("learnt, no G (rota's default)", ""), *pairs]:
        lanes = [f"vrb-{tail}" if tail else "vrb-multinomial", f"kvib-{tail}" if tail else KVIB]
        cells = [name]
        for lane in lanes:
            values = view.numbers("logits", "shared", lane, "variance").values()
            cells.append(positive(list(values)))
        cells.append(times(view.ratios("logits", "shared", lanes[0], lanes[1], "variance")))
        rows.append(cells)
    first = table(["G", "Vrb, with replacement", "K-Vib, coins", "Vrb / K-Vib"], rows)
    rows = []
    for name, lane in [("learnt", "kvib-theta"), *((f"{g:g}", f"kvib-G{g:g}") for g in BOUNDS)]:
        cells = [name]
        for key in MEASURES:
            cells.append(positive(list(view.numbers("logits", "shared", lane, key).values())))
        rows.append(cells)
    second = table(["G, with theta = 0.3", *MEASURES.values()], rows)
    return "\n".join(["## One rule for G", BOUND, first, "", second, ""])


def theorems(view: View) -> str:
    """Eq. 7 over T, the exponents, and Lemma 2."""
    parts = view.study("logits")
    out, rows = ["## The theorems as measurements", THEOREMS], []
    for place, end in enumerate(parts[0]["over time"]["ends"] if parts else ()):
        cells = [str(end)]
        over = [part["over time"] for part in parts]
        gap = [each["fixed"][place] - each["least"][place] for each in over]
        cells += [positive(gap), f"{sum(gap) / len(gap) / end:.3g}"]
        for lane in ("kvib-full", KVIB, *SOURCE.values()):
            cells.append(plain([each[lane][place] - each["fixed"][place] for each in over]))
        rows.append(cells)
    heads = ["T", "hindsight gap", "gap / T", *(f"static, {title(lane)}" for lane in _STATIC)]
    out += [table(heads, rows), ""]
    rows = []
    for letter, power in (("T", "2/3"), ("N", "1/3"), ("K", "-4/3")):
        by = growth(view, letter)
        if len(by) > 1:
            points = ", ".join(
                f"{plain(values).partition(' ')[0]} at {key}" for key, values in by.items()
            )
            rows.append([letter, power, plain(exponents(view, letter)), points])
    heads = ["of", "Theorem 8's exponent", "measured", "static regret / G^2"]
    out += [table(heads, rows), "", _lemma_2(view), "", TERMS_TEXT, _terms(view), ""]
    return "\n".join(out)


_STATIC = ("kvib-full", KVIB, *SOURCE.values())


def _lemma_2(view: View) -> str:
    """Eq. 3's bound against the exact variances, for uniform probabilities."""
    rows = []
    for setting, name in SETTING_TITLES.items():
        parts = [part["lemma 2"] for part in view.study(setting)]
        for late, words in (("", "all rounds"), ("late ", "second half")):
            if parts:
                cells = [f"{name}, {words}"]
                for key in ("bound", "fixed", "coins"):
                    cells.append(positive([part[late + key] for part in parts]))
                logs = [math.log(part[f"{late}bound"] / part[f"{late}fixed"]) for part in parts]
                rows.append([*cells, times(logs)])
    heads = ["uniform p", "bound (eq. 3)", "exact, fixed size", "exact, coins (eq. 4)"]
    return table([*heads, "bound / exact, fixed size"], rows)


def _terms(view: View) -> str:
    """Theorem 13's terms, means over the rounds that were looked at."""
    parts = [part["terms"] for part in view.study("logits") if part.get("terms")]
    names = {
        "gradient": "square of the gradient",
        "between clients": "variance between clients",
        "progress": "progress",
        "step": "loss by the step's length",
        "variance": "loss by the variance",
        "fall": "fall of the loss",
    }
    rows = []
    for lane in parts[0] if parts else ():
        cells = [title(lane)]
        cells += [positive([part[lane][key] for part in parts]) for key in names]
        rows.append(cells)
    return table(["sampler, own updates", *names.values()], rows)


def figure_6(view: View) -> str:
    """Who holds how much."""
    rows = []
    for part in view.study("holds"):
        for name, each in part["of"].items():
            cells = [name, f"{each['clients']:,}", f"{each['examples']:,}", f"{each['median']:g}"]
            cells += [f"{share:.1%}" for share in each["shares"]]
            rows.append(cells)
    heads = ["data", "clients", "examples", "median", *(f"top {part:.0%}" for part in HELD)]
    return "\n".join(["## Figure 6: who holds how much", FIGURE_6, table(heads, rows), ""])


def differences(_: View) -> str:
    """What differs from the source."""
    return DIFFERENCES


def not_run(found: dict[str, Found], everything: Sequence[str]) -> str:
    """The parts that are missing, and the machines of the others."""
    left = [name for name in everything if name not in found]
    studies = dict.fromkeys(name.partition("-")[0] for name in left)
    lines = []
    for study in studies:
        names = [name for name in everything if name.partition("-")[0] == study]
        some = [name for name in left if name in names]
        lines.append(f"- {study}: {len(some)} of {len(names)} parts are not finished.")
    machines = dict.fromkeys(f"- {part['machine']}" for part in found.values())
    how = "`rota reproduce kvib-theory --out docs/results` runs them, and keeps what is finished."
    head = ["", "## Not run", *lines, "", how] if lines else []
    return "\n".join([*head, "", "## Machines", *machines])


ALL = (
    primary,
    procedure,
    budgets,
    sweep,
    avare,
    bound,
    theorems,
    figure_6,
    ours,
    differences,
)
assert set(PROCEDURES) < set(PROCEDURE_TITLES)
