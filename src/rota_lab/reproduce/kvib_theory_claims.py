"""The claims of the page on K-Vib's theory: the source's, and those on rota's own sampler.

They are statements that one number exceeds another, with the same seed. Variances and relative
regrets are compared by log-ratios. Regrets of eq. 6 may be negative for draws with replacement, so
they are compared by differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from rota_lab.reproduce.interval import Statement
from rota_lab.reproduce.kvib_parts import BOUNDS, BUDGET, BUDGETS, LARGEST, SETTINGS, named
from rota_lab.reproduce.kvib_theory_view import (
    KVIB,
    LEARNER_TITLES,
    MEASURES,
    OURS,
    OURS_COINS,
    SETTING_TITLES,
    SOURCE,
    WHERES,
    View,
    slope,
    title,
)

ALL_BUDGETS = tuple(sorted((BUDGET, *BUDGETS)))


def statements(view: View) -> list[Statement]:
    """All claims whose parts are finished."""
    some = [
        *rivals(view),
        *feedback(view),
        *procedures(view),
        *budgets(view),
        *starts(view),
        *bounds(view),
        *theorems(view),
        *ours(view),
        *elsewhere(view),
    ]
    return [each for each in some if len(each.values) > 1]


def rivals(view: View) -> Iterator[Statement]:
    """Figure 4: K-Vib against its rivals; other settings by variance alone."""
    for setting in SETTINGS:
        for where, words in WHERES.items():
            for key, measure in MEASURES.items():
                if setting != "logits" and key not in ("variance", "late"):
                    continue
                for name, lane in SOURCE.items():
                    place = f"Figure 4, {SETTING_TITLES[setting]}, {words}"
                    claim = f"{place}: K-Vib's {measure} is below that of {LEARNER_TITLES[name]}"
                    if key == "regret":
                        pairs = view.paired(setting, where, lane, KVIB, key)
                        yield Statement(claim, [one - other for one, other in pairs])
                    else:
                        logs = view.ratios(setting, where, lane, KVIB, key)
                        yield Statement(claim, logs, log=True)


def feedback(view: View) -> Iterator[Statement]:
    """Figure 3: optimal, full feedback and partial feedback; gaps that vanish."""
    for where, words in WHERES.items():
        for smaller, larger in (("optimal", "kvib-full"), ("kvib-full", KVIB)):
            logs = view.ratios("logits", where, larger, smaller, "variance")
            claim = f"Figure 3, logits, {words}: the cumulative variance of {title(smaller)}"
            yield Statement(f"{claim} is below that of {title(larger)}", logs, log=True)
    for lower, upper in (("least", "kvib-full"), ("kvib-full", KVIB)):
        names = [title(name) if name != "least" else "the least l" for name in (upper, lower)]
        claim = f"Figure 3, logits, shared updates: the gap from {names[0]} to {names[1]}, in parts"
        early = "of the least l, is larger in the first half of the rounds than in the second"
        yield Statement(f"{claim} {early}", vanishing(view, upper, lower), log=True)


def vanishing(view: View, upper: str, lower: str) -> list[float]:
    """log(gap of the first half / gap of the second half) by seed, as parts of the least l."""
    out = []
    for part in view.study("logits"):
        over = part["over time"]
        if len(over["ends"]) < 2:
            continue
        halves = []
        for start, end in ((None, -2), (-2, -1)):
            least, high, low = (
                over[name][end] - (0.0 if start is None else over[name][start])
                for name in ("least", upper, lower)
            )
            halves.append((high - low) / least)
        if min(halves) > 0:
            out.append(math.log(halves[0] / halves[1]))
    return out


def procedures(view: View) -> Iterator[Statement]:
    """Whose is the gain: the learner's or the procedure's?"""
    for where, words in WHERES.items():
        for learner in ("vrb", "avare", "kvib"):
            pair = [f"{learner}-{procedure}" for procedure in ("multinomial", "independent")]
            logs = view.ratios("logits", where, pair[0], pair[1], "variance")
            claim = f"Procedure, logits, {words}: with {LEARNER_TITLES[learner]}'s rule"
            yield Statement(f"{claim}, coins have less variance than replacement", logs, log=True)
        for learner in ("vrb", "avare"):
            for procedure, by in (("independent", "on coins"), ("multinomial", "with replacement")):
                lanes = [f"{name}-{procedure}" for name in (learner, "kvib")]
                logs = view.ratios("logits", where, lanes[0], lanes[1], "variance")
                claim = f"Learner, logits, {words}: {by}, K-Vib's rule has less variance than"
                yield Statement(f"{claim} {LEARNER_TITLES[learner]}'s", logs, log=True)
        logs = view.ratios("logits", where, KVIB, "proportional-independent", "variance")
        claim = f"Learner, logits, {words}: coins in proportion to the data, which learn nothing,"
        yield Statement(f"{claim} have less variance than K-Vib", logs, log=True)
    for learner in ("osmd", "osmd-adaptive"):
        pair = [f"{learner}-{procedure}" for procedure in ("multinomial", "independent")]
        logs = view.ratios("logits", "shared", pair[0], pair[1], "variance")
        claim = f"Appendix E.3, logits, shared updates: {LEARNER_TITLES[learner]} on coins has less"
        yield Statement(f"{claim} variance than with replacement", logs, log=True)
    parts = [part["lemma 2"] for part in view.study("logits")]
    logs = [math.log(part["fixed"] / part["coins"]) for part in parts]
    claim = "Lemma 2, shared updates: with uniform probabilities, coins have less variance than"
    yield Statement(f"{claim} cohorts of a fixed size", logs, log=True)


def budgets(view: View) -> Iterator[Statement]:
    """Figures 3 and 7: K-Vib's regret falls with K, and that of its rivals does not."""
    for where, words in WHERES.items():
        low, high = ALL_BUDGETS[0], ALL_BUDGETS[-1]
        for small, large in pairwise(ALL_BUDGETS):
            lanes = [named(KVIB, budget) for budget in (small, large)]
            claim = f"Figure 3, logits, {words}: K-Vib's regret (eq. 6) falls from K = {small}"
            logs = view.ratios("logits", where, lanes[0], lanes[1], "regret")
            yield Statement(f"{claim} to {large}", logs, log=True)
        for name, lane in SOURCE.items():
            for key, how in (("regret", ""), ("unscaled", " with q = p / K in l")):
                if key == "unscaled" and name == "uniform":
                    continue
                first, last = (by_reading(view, where, lane, key, at) for at in (low, high))
                rise = [last[seed] - first[seed] for seed in first if seed in last]
                claim = f"Figure 7, logits, {words}: the regret of {LEARNER_TITLES[name]}{how}"
                yield Statement(f"{claim} rises from K = {low} to {high}", rise)


def by_reading(view: View, where: str, lane: str, key: str, budget: int) -> dict[str, float]:
    """The regret of eq. 6 by seed, with p or with q = p / K in l(p)."""
    name = named(lane, budget)
    regret = view.numbers("logits", where, name, "regret")
    if key == "regret":
        return regret
    cost = view.numbers("logits", where, name, "cost")
    return {seed: regret[seed] + (budget - 1) * cost[seed] for seed in regret}


def starts(view: View) -> Iterator[Statement]:
    """Avare's start decides whether K-Vib is below it."""
    for start, words in (
        ("", "unseen = largest"),
        ("-zero", "unseen = 0"),
        ("-pass", "a first pass"),
    ):
        for procedure, by in (("multinomial", "with replacement"), ("independent", "on coins")):
            logs = view.ratios("logits", "shared", f"avare{start}-{procedure}", KVIB, "variance")
            claim = f"Avare's start, logits, shared updates: K-Vib's variance is below Avare's {by}"
            yield Statement(f"{claim} ({words})", logs, log=True)


def bounds(view: View) -> Iterator[Statement]:
    """One rule for G, and the sensitivity to G."""
    for part in LARGEST:
        lanes = [f"{name}-largest-{part:g}" for name in ("vrb", "kvib")]
        logs = view.ratios("logits", "shared", lanes[0], lanes[1], "variance")
        claim = f"One rule for G, shared updates: with G = {part:g} times the largest score, K-Vib"
        yield Statement(f"{claim} has less variance than Vrb", logs, log=True)
    by_bound = [view.numbers("logits", "shared", f"kvib-G{g:g}", "variance") for g in BOUNDS]
    spread = []
    for seed in by_bound[0]:
        values = [each[seed] for each in by_bound]
        spread.append(math.log(2 * min(values) / max(values)))
    claim = "Figure 3, theta = 0.3, shared updates: K-Vib is not sensitive to gamma. Its largest"
    words = "variance over G is less than twice its least"
    yield Statement(f"{claim} {words}", spread, log=True)


def theorems(view: View) -> Iterator[Statement]:
    """Exponents that the theorems bound."""
    gaps, last, statics, full = list[float](), list[float](), list[float](), list[float]()
    for part in view.study("logits"):
        over = part["over time"]
        if len(over["ends"]) > 1:
            pairs = zip(over["fixed"], over["least"], strict=True)
            gap = [fixed - least for fixed, least in pairs]
            gaps.append(1 - slope(over["ends"], gap))
            last.append(1 - slope(over["ends"][-2:], gap[-2:]))
            regret = [a - b for a, b in zip(over[KVIB], over["fixed"], strict=True)]
            if min(regret) > 0:
                statics.append(2 / 3 - slope(over["ends"], regret))
            regret = [a - b for a, b in zip(over["kvib-full"], over["fixed"], strict=True)]
            if min(regret) > 0:
                full.append(1 / 2 - slope(over["ends"], regret))
    claim = "the hindsight gap of eq. 7 grows more slowly than T (1 - its exponent), over"
    yield Statement(f"Theorem 6, logits, shared updates: {claim} all T", gaps)
    yield Statement(f"Theorem 6, logits, shared updates: {claim} the last doubling of T", last)
    claim = "with full feedback and without a G, the static regret grows no faster than T^(1/2)"
    yield Statement(f"Theorem 23, logits, shared updates: {claim} (1/2 - its exponent)", full)
    claim = "without a G, the static regret grows no faster than T^(2/3) (2/3 - its exponent)"
    yield Statement(f"Theorem 8, logits, shared updates: {claim}", statics)
    for letter, bound, words in (
        ("T", 2 / 3, "grows no faster than T^(2/3) (2/3"),
        ("N", 1 / 3, "grows no faster than N^(1/3) (1/3"),
        ("K", -4 / 3, "falls at least as K^(-4/3) (-4/3"),
    ):
        values = [bound - each for each in exponents(view, letter)]
        claim = f"Theorem 8, G = the largest score: the static regret / G^2 {words} - its exponent)"
        yield Statement(claim, values, each="draw")


def growth(view: View, letter: str) -> dict[int, list[float]]:
    """The static regret in units of G^2 by T, K or N, each by draw."""
    parts = {int(part["which"].removeprefix("N")): part for part in view.study("growth")}
    if letter == "N":
        return {n: parts[n]["T"][str(parts[n]["rounds"])] for n in sorted(parts)}
    if 100 not in parts:
        return {}
    return {int(key): values for key, values in parts[100][letter].items()}


def exponents(view: View, letter: str) -> list[float]:
    """The exponent of the growth by draw."""
    by = growth(view, letter)
    if len(by) < 2:
        return []
    rows = zip(*by.values(), strict=True)
    return [slope(list(by), row) for row in rows if min(row) > 0]


def ours(view: View) -> Iterator[Statement]:
    """rota's sampler against the best of its rivals in each seed, which is the hardest rival."""
    for setting, name in SETTING_TITLES.items():
        for where, words in WHERES.items():
            for budget in ALL_BUDGETS:
                mine, lanes = named(OURS, budget), view.rivals(setting, where, budget)
                counts = [len(view.numbers(setting, where, lane, "variance")) for lane in lanes]
                most = max(counts, default=0)
                always = [lane for lane, count in zip(lanes, counts, strict=True) if count == most]
                for key in ("variance", "late"):
                    for some in [always, lanes] if len(always) < len(lanes) else [lanes]:
                        logs = view.against_all(setting, where, some, mine, key)
                        claim = f"rota's sampler, {name}, {words}, K = {budget}: its"
                        best = f"is below that of the best of {len(some)} rivals in each seed"
                        yield Statement(f"{claim} {MEASURES[key]} {best}", logs, log=True)


def elsewhere(view: View) -> Iterator[Statement]:
    """rota's sampler against uniform sampling on other federations and on made-up updates."""
    for part in [*view.study("other"), *view.study("made")]:
        for budget, lanes in part["budgets"].items():
            uniform = [name for name in lanes if name.startswith("uniform")]
            best = [min(values) for values in zip(*(lanes[name] for name in uniform), strict=True)]
            logs = against(best, lanes[ours_of(lanes)])
            claim = f"rota's sampler, {part['which']}, K = {budget}: its cumulative variance"
            words = "is below that of uniform sampling by each procedure"
            yield Statement(f"{claim} {words}", logs, each="draw", log=True)


def ours_of(lanes: Collection[str]) -> str:
    """rota's sampler among some lanes: on coins where updates have no angles."""
    return OURS if OURS in lanes else OURS_COINS


def against(larger: Sequence[float], smaller: Sequence[float]) -> list[float]:
    """log(larger / smaller) of pairs that are both above 0."""
    pairs = zip(larger, smaller, strict=True)
    return [math.log(one / other) for one, other in pairs if min(one, other) > 0]
