"""Who trains: samplers. A new one is a file with a frozen dataclass, and a line in SAMPLERS."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw
from rota.sampling.adaptive.succession import Succession
from rota.sampling.bandits import Avare, Mabs, Vrb
from rota.sampling.choice import CpowD, PowD, RpowD
from rota.sampling.clustered import ClusteredSimilarity, ClusteredSize
from rota.sampling.divfl import DivFl
from rota.sampling.kvib import KVib, KVibFull
from rota.sampling.mmfl import Gvr, KVibPairs, Lvr, Vre
from rota.sampling.mmfl_baselines import FedFair, Random, RoundRobin, RoundRobinServer
from rota.sampling.ocs import Aocs, Ocs, Optimal
from rota.sampling.osmd import Osmd, OsmdAdaptive
from rota.sampling.uniform import Full, Proportional, ProportionalMean, Uniform
from rota.sampling.waterfill import waterfill

__all__ = ["SAMPLERS", "Aocs", "Asking", "Avare", "ClusteredSimilarity", "ClusteredSize", "CpowD"]
__all__ += ["DivFl", "FedFair", "Full", "Gvr", "KVib", "KVibFull", "KVibPairs", "Lvr", "Mabs"]
__all__ += ["Ocs", "Optimal", "Osmd", "OsmdAdaptive", "PowD", "Proportional", "ProportionalMean"]
__all__ += ["Random", "RoundRobin", "RoundRobinServer", "RpowD", "Sampler", "Succession"]
__all__ += ["Uniform", "Vrb", "Vre", "asks", "draw", "waterfill"]


class Sampler(Protocol):
    """Decides which pairs (model, client) train.

    A sampler is a value: everything it learns is in the state that it takes and returns. `shares`
    is d[s, i], client i's share of model s's data; it is 0 where the client has no data for the
    model, or cannot be reached in this round. A sampler that learns from rounds has a method
    `observe` (rota.policies.Observing).

    Class attributes of rota's own samplers say whether they are `unbiased`, and in words for people
    what they need (`needs`) and what that `costs`. `sees` says it for machines: what the sampler
    learns of single rows, a set of "norm", "loss", "examples", "seconds" and "update". A sampler
    without `sees` sees everything. "update" means that it watches the updates as they pass, with
    the methods `watch`, `see` and `learn` (rota.policies.Watching). A sampler that draws by a
    matrix of rates has a method `rates(state, shares)`, and if every model draws by itself,
    `procedure` names how.
    """

    def init(self, shares: Array, rounds: int) -> State:
        """The state before the first of `rounds` rounds; BadInput if the clients do not fit."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        """This round's plan."""


@runtime_checkable
class Asking(Protocol):
    """A sampler that asks some clients before it draws; the run pays for their answers."""

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        """The question, and the rows that it is put to."""

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        """The state with the answers, for `draw` and `observe`; `plan` are the asked rows."""


def asks(sampler: Sampler, shares: Array, rounds: int) -> str | None:
    """What a sampler asks before its first draw, if it asks all clients of some models, or None."""
    if not isinstance(sampler, Asking):
        return None
    question = sampler.ask(sampler.init(shares, rounds), shares, np.random.default_rng(0))
    models = np.unique(question.rows.model)
    return question.what if 0 < len(question.rows) == np.count_nonzero(shares[models]) else None


SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": Uniform,
    "full": Full,
    "proportional": Proportional,
    "proportional-mean": ProportionalMean,
    "succession": Succession,
    "kvib": KVib,
    "kvib-full": KVibFull,
    "optimal": Optimal,
    "vrb": Vrb,
    "mabs": Mabs,
    "avare": Avare,
    "osmd": Osmd,
    "osmd-adaptive": OsmdAdaptive,
    "ocs": Ocs,
    "aocs": Aocs,
    "pow-d": PowD,
    "cpow-d": CpowD,
    "rpow-d": RpowD,
    "divfl": DivFl,
    "clustered-size": ClusteredSize,
    "clustered-similarity": ClusteredSimilarity,
    "mmfl-random": Random,
    "mmfl-gvr": Gvr,
    "mmfl-lvr": Lvr,
    "mmfl-vre": Vre,
    "mmfl-kvib": KVibPairs,
    "round-robin": RoundRobin,
    "round-robin-server": RoundRobinServer,
    "fedfair": FedFair,
}
