"""The sources' claims in words, where each stands, and which page measures it.

A claim names a page and a pattern: the claims of that page whose words match it are its
measurements. Verdicts and numbers are not here; they are the pages'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Said(NamedTuple):
    """A claim of a source."""

    place: str
    words: str
    page: str = ""
    find: str = "$^"
    """A regular expression; no words match the one of a claim that nothing measures."""
    why: str = ""
    """Why nothing measures it."""


class Source(NamedTuple):
    """A source: its claims, and the pages about it.

    A page comes with the place in the source and a sentence for its other claims.
    """

    name: str
    about: str
    claims: Sequence[Said]
    pages: Mapping[str, tuple[str, str]]


DEFINED, PROVED, ASSUMED = "a definition", "proved in the source", "an assumption of the source"
OUTSIDE = "not about an algorithm that rota has"

LECTURE = (
    Said(
        "Lipschitz smoothness",
        "F(x) = x²/2 is smooth with L = 1",
        "exact",
        "x²/2",
    ),
    Said(
        "condition for L-smoothness",
        "F(x) <= F(y) + grad F(y)'(x - y) + L/2 ‖x - y‖²",
        "gd-bound",
        "smoothness bound",
    ),
    Said(
        "strong convexity, the lower bound",
        "F(x) >= F(y) + grad F(y)'(x - y) + c/2 ‖x - y‖²",
        "gd-bound",
        "strong-convexity bound",
    ),
    Said(
        "strong convexity, the optimality gap",
        "2 c (F(x) - F*) <= ‖grad F(x)‖² (Polyak-Lojasiewicz)",
        "gd-bound",
        "PL inequality",
    ),
    Said("c-strongly convex and L-smooth", "L >= c", "gd-bound", "L is at least c"),
    Said(
        "gradient descent",
        "in a non-convex problem, gradient descent can end in a local minimum",
        "gd-bound",
        "^in a non-convex problem",
    ),
    Said(
        "analysis of gradient descent",
        "F(x_t+1) - F(x_t) <= -lr (1 - L lr / 2) ‖grad F(x_t)‖²",
        "gd-bound",
        "descent lemma",
    ),
    Said(
        "convergence of gradient descent",
        "F(x_t) - F* <= (1 - lr c)^t (F(x_0) - F*) for lr <= 1/L",
        "gd-bound",
        "under the bound|multiplies the gap|diverges",
    ),
    Said(
        "convergence of gradient descent",
        "the proof is only for full-batch gradient descent",
        "gd-bound",
        "above full batches",
    ),
    Said(
        "why distributed?",
        "m nodes with the parts of the data do synchronous distributed SGD: the same steps",
        "gd-bound",
        "same iterates|sorted by label",
    ),
    Said(
        "the data-center setting",
        "a parameter server adds up the gradients of many workers",
        "gd-bound",
        "lower noise floor",
    ),
    Said(
        "the data-center setting",
        "local-update methods",
        "gd-bound",
        "local steps",
    ),
    Said("the data-center setting", "asynchronous methods", why="rota's rounds are synchronous"),
    Said(
        "the data-center setting",
        "gradient compression",
        "gd-bound",
        "^gradient compression",
    ),
    Said("data at edge clients", "privacy concerns and communication costs", why=OUTSIDE),
    Said(
        "effect of data heterogeneity, Table 1",
        "FedAvg reaches 97 % (2NN) and 99 % (CNN)",
        "fedavg-table1",
        "^all .* cells",
    ),
    Said("Table 1, IID", "the rounds to the target", "fedavg-table1", "^IID: our rounds"),
    Said("Table 1, non-IID", "the rounds to the target", "fedavg-table1", "^shards: our rounds"),
    Said("Table 1, IID", "the speed-ups over C = 0", "fedavg-table1", "^IID: our speed-ups"),
    Said("Table 1, non-IID", "the speed-ups over C = 0", "fedavg-table1", "^shards: our speed-ups"),
    Said("Table 1", "more clients per round need fewer rounds", "fedavg-table1", "more clients"),
    Said("Table 1", "non-IID data need more rounds", "fedavg-table1", "^shards take more"),
    Said("Table 1", "large batches need more rounds", "fedavg-table1", "^B = ∞ takes"),
    Said(
        "Table 1, its five dashes",
        "five runs with the large batch size did not reach the target",
        why="[fedavg-table1](fedavg-table1.md) says what these runs would cost",
    ),
    Said(
        "effect of data heterogeneity", "two shards are at most two digits", "exact", "two shards"
    ),
    Said("multi-model FL, key assumptions", "partial participation, one model each", why=ASSUMED),
    Said(
        "MMFL sampling, unbiased training",
        "the expectation of the weighted sum of updates is full participation's",
        "exact",
        "the mean of the estimate",
    ),
    Said(
        "MMFL sampling",
        "the server prefers clients that are more important",
        "exact",
        "larger updates",
    ),
    Said(
        "MMFL sampling, the objective",
        "a high variance of the sum can make training unstable",
        "mmfl-table1",
        "^MMFL-[GL]VR is above Random",
    ),
    Said(
        "MMFL sampling, equation (5)",
        "the closed form has the least variance of all probabilities with this budget",
        "exact",
        "equation \\(5\\)",
    ),
    Said("experiments", "10 % of the clients hold 52.6 % of each task's data", "exact", "52\\.6"),
    Said(
        "Table I",
        "the order of the methods by their accuracy relative to full participation",
        "mmfl-table1",
        "pairs of methods|is above",
    ),
    Said("Table I, cost columns", "communication", "mmfl-table1", "communication is"),
    Said("Table I, cost columns", "computation", "mmfl-table1", "computation is"),
    Said("Table I, cost columns", "memory", "mmfl-table1", "memory is"),
)

KVIB = (
    Said(
        "abstract, section 1",
        "the sampler needs no additional communication and computation of clients",
        "kvib-femnist",
        "bytes",
    ),
    Said("Definition 1, eq. 2", "the variance of an unbiased estimate", "exact", "^eq. 2"),
    Said(
        "Lemma 2, eq. 3",
        "random sampling's variance is at most (N - K)/(N - 1) sum a²/p",
        "exact",
        "^eq. 3",
    ),
    Said("Lemma 2, eq. 4", "independent sampling's is sum (1 - p) a²/p", "exact", "^eq. 4"),
    Said(
        "Lemma 2, Figure 5",
        "independent sampling is the optimal procedure",
        "kvib-theory",
        "^Lemma 2|^Procedure",
    ),
    Said(
        "Lemma 2",
        "independent sampling always minimises the upper bound of the variance",
        "exact",
        "upper bound|Lemma 2",
    ),
    Said(
        "Lemma 3, eq. 5 (Lemma 19)",
        "the closed form of p is optimal",
        "exact",
        "Lemma 3",
    ),
    Said("Lemma 18", "the closed form with a least probability is optimal", "exact", "Lemma 18"),
    Said("Assumptions 4, 5", "bounded feedback, sub-linear convergence", why=ASSUMED),
    Said("Theorem 6", "the hindsight gap of eq. 7 vanishes", "kvib-theory", "^Theorem 6"),
    Said("Lemma 7, eq. 8", "FTRL's closed form", "exact", "Lemma 7"),
    Said(
        "section 3.2, Theorem 23",
        "the static regret with full feedback is bounded by the square root of T",
        "kvib-theory",
        "^Theorem 23",
        PROVED,
    ),
    Said(
        "section 3.2",
        "the feedback of the sampled, divided by p, is an unbiased estimate of all clients'",
        "exact",
        "feedback",
    ),
    Said("eq. 9", "the mixture gives each client at least theta K / N", "exact", "^eq. 9"),
    Said(
        "Theorem 8, section 1",
        "the regret grows as N^(1/3) T^(2/3) / K^(4/3): a linear speed-up in the budget",
        "kvib-theory",
        "^Theorem 8",
    ),
    Said("section 3.2", "the server's cost is that of sorting, N log N", why="no page times it"),
    Said("Assumptions 9 to 11", "smoothness, bounded variances", why=ASSUMED),
    Said("Definition 12, eq. 11", "the improvement factor is from 0 to 1", "exact", "improvement"),
    Said(
        "Theorem 13, eq. 12",
        "FedAvg's convergence with any unbiased sampler, by its sampling quality",
        "kvib-theory",
        "^Theorem 13",
        PROVED,
    ),
    Said(
        "Figure 3, section 4, 1)",
        "optimal, full feedback and partial feedback: the gaps vanish",
        "kvib-theory",
        "^Figure 3.*(gap|variance of|cumulative variance)|optimal <= K-Vib",
    ),
    Said(
        "Figure 3, section 4, 2)",
        "K-Vib's regret falls with the budget",
        "kvib-theory",
        "regret.*falls",
    ),
    Said(
        "Figure 3, section 4, 2)",
        "K-Vib is not sensitive to gamma",
        "kvib-theory",
        "sensitive|without a G|Figure 3, theta",
    ),
    Said(
        "Figure 4, section 4, 3)",
        "K-Vib outperforms the baselines on regret, variance and test loss",
        "kvib-theory",
        "^Figure 4|cumulative regret of K-Vib",
    ),
    Said(
        "Figure 5, section 4",
        "K-Vib converges faster than the baselines on FEMNIST",
        "kvib-femnist",
        "takes more rounds",
    ),
    Said(
        "Figure 5, section 5",
        "K-Vib has the best performance in classic FL tasks",
        "kvib-femnist",
        "last accuracy",
    ),
    Said(
        "section 4, Figure 6",
        "10 %, 20 % and 50 % of the clients hold 82 %, 90 % and 98 % of the images",
        "kvib-femnist",
        "few large clients hold",
    ),
    Said(
        "Figure 7, appendix F",
        "the baselines' regret does not fall with the budget",
        "kvib-theory",
        "^Figure 7|rivals does not fall",
    ),
    Said("appendix E.1", "unavailable clients leave a similar bound", why=PROVED),
    Said(
        "appendix E.2",
        "Power-of-Choice and DivFL are biased",
        why="rota declares them biased, and its suite of samplers tests it; no page measures it",
    ),
    Said(
        "appendix E.3",
        "independent sampling would improve OSMD, too",
        "kvib-theory",
        "OSMD",
    ),
)

SOURCES = (
    Source(
        "The lecture, and MMFL",
        'H. Zhang, "Distributed Machine Learning", recitation of course 18786, 11 April 2025. '
        "Its second part is multi-model federated learning (MMFL). Places are titles of slides.",
        LECTURE,
        {
            "gd-bound": ("gradient descent", "Beyond the lecture's sentences"),
            "fedavg-table1": ("Table 1", "Other measurements of the page"),
            "mmfl-table1": ("Table I", "Other measurements of the page"),
            "mmfl-faults": ("Table I", "With the faults of its published code"),
        },
    ),
    Source(
        "K-Vib",
        'D. Zeng et al., "Exploring Federated Optimization by Reducing Variance of Adaptive '
        'Unbiased Client Sampling". Places are its sections, lemmas, theorems and figures.',
        KVIB,
        {
            "kvib-theory": ("–", "Beyond the paper's claims"),
            "kvib-femnist": ("Figure 5", "Other measurements of the page"),
        },
    ),
    Source(
        "FLuID",
        'I. Wang et al., "FLuID: Mitigating Stragglers in Federated Learning using Invariant '
        'Dropout". The claims are those of the pages that are finished.',
        (),
        {
            "fluid-table2": ("Table 2", "Invariant dropout is at least as accurate"),
            "fluid-threshold": ("Table 3, Figure 6", "The threshold of invariance"),
            "fluid-clusters": ("Table 4", "Clusters of stragglers"),
            "fluid-1000": ("Table 5", "A thousand clients"),
            "fluid-scale": ("Figure 5", "More clients"),
            "fluid-ratios": ("Figure 8", "Ratios of stragglers"),
            "fluid-capacities": ("–", "Beyond FLuID: unequal capacities"),
            "fluid-linear": ("Figure 7", "Training time is linear in the sub-model's size"),
            "fluid-time": ("Figures 2a, 4a, 4b", "Stragglers, and the time to train"),
        },
    ),
    Source(
        "Selective FedAvg",
        'J. Liu, S. Lee, C. Julien, "Federated Learning Model Complexity vs Robustness to non-IID '
        'Data and Selective Federated Learning". The claims are those of the pages that are '
        "finished.",
        (),
        {
            "selective": ("section V", "Selective FedAvg against FedAvg and its rivals"),
            "complexity": ("section IV", "Model complexity and non-IID data"),
            "worst-local-loss": ("its theorem", "One node's loss can end at C times its optimum"),
        },
    ),
    Source(
        "Other comparisons",
        "Claims of the field that no source of rota makes.",
        (),
        {"personal": ("–", "Personal models in PFLlib's two settings")},
    ),
)
