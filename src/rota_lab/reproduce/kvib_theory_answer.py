"""The first screen of the page on K-Vib's theory: which claims hold, and which sampler to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rota_lab.reproduce.interval import CANNOT_TELL, FAILS, HOLDS, Claim
from rota_lab.reproduce.kvib_parts import named
from rota_lab.reproduce.kvib_theory_claims import ALL_BUDGETS
from rota_lab.reproduce.kvib_theory_view import (
    KVIB,
    LEARNER_TITLES,
    OURS,
    SETTING_TITLES,
    SOURCE,
    WHERES,
    View,
    table,
    times,
    title,
)

SHORT = (*SOURCE.values(), KVIB, "avare-independent", "proportional-independent", OURS)
"""The lanes of the first table."""
ANSWER = """\
## In short
The first table has the cumulative variance of each sampler at K = 10, divided by that of the oracle
`optimal`, which knows all norms: 1 is the best that coins can do. The second has the verdicts on
K-Vib's main claim, that its variance is below its rivals', with its rivals' variance divided by
K-Vib's. [All claims](#claims) are at the end of this page.
"""


def answer(view: View, claims: Sequence[Claim]) -> str:
    """The answer to both questions, by the verdicts."""
    parts = [ANSWER, _oracle(view), "", _figure_4(view, claims), "", *_ours(view, claims), ""]
    return "\n".join(parts)


def _oracle(view: View) -> str:
    """Every sampler's variance at K = 10 against the oracle's."""
    places = [(setting, where) for setting in SETTING_TITLES for where in WHERES]
    rows = []
    for lane in SHORT:
        cells = [times(view.ratios(*place, lane, "optimal", "variance")) for place in places]
        if set(cells) != {"–"}:
            rows.append([title(lane), *cells])
    heads = [f"{SETTING_TITLES[setting]}, {WHERES[where]}" for setting, where in places]
    return table(["variance / optimal's", *heads], rows)


def _figure_4(view: View, claims: Sequence[Claim]) -> str:
    """The verdicts on K-Vib's cumulative variance, by rival."""
    rows = []
    for setting, name in SETTING_TITLES.items():
        for where, words in WHERES.items():
            cells = []
            for rival, lane in SOURCE.items():
                claim = f"Figure 4, {name}, {words}: K-Vib's cumulative variance is below that of"
                claim += f" {LEARNER_TITLES[rival]}:"
                found = [each.verdict for each in claims if each.words.startswith(claim)]
                logs = view.ratios(setting, where, lane, KVIB, "variance")
                cells.append(f"{found[0]}: {times(logs)}" if found else "–")
            if set(cells) != {"–"}:
                rows.append([f"{name}, {words}", *cells])
    return table(["K-Vib is below", *(LEARNER_TITLES[rival] for rival in SOURCE)], rows)


def _ours(view: View, claims: Sequence[Claim]) -> list[str]:
    """How often rota's sampler is the best, and against uniform sampling."""
    best = Counter[str]()
    for setting in SETTING_TITLES:
        for where in WHERES:
            for budget in ALL_BUDGETS:
                lanes = [*view.rivals(setting, where, budget), named(OURS, budget)]
                means = {}
                for lane in lanes:
                    logs = view.ratios(setting, where, lane, named(OURS, budget), "variance")
                    if logs:
                        means[lane] = sum(logs) / len(logs)
                if len(means) > 1:
                    best[title(min(means, key=lambda lane: means[lane]).partition("-K")[0])] += 1
    out = []
    if best:
        (name, count), *_ = best.most_common()
        out.append(
            "**Which sampler to use.** Of the unbiased samplers that know no more than the shares "
            f"of the clients and the norms of those drawn, **{name}** has the least cumulative "
            f"variance in {count} of {sum(best.values())} comparisons on Synthetic (logits or "
            "softmax twice, own or shared updates, K = 5, 10 or 20)."
        )
    counts = Counter(
        each.verdict for each in claims if "is below that of uniform sampling" in each.words
    )
    if counts:
        out.append(
            "Against uniform sampling on other federations and on made-up updates, rota's own "
            f"sampler has less variance in {counts[HOLDS]} of {sum(counts.values())} comparisons "
            f"and more in {counts[FAILS]}; {counts[CANNOT_TELL]} cannot be told. [Where it "
            "fails](#rotas-own-sampler)."
        )
    return out
