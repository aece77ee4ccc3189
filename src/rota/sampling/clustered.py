"""Clustered sampling (Fraboni et al. 2021): unbiased, and no worse than multinomial sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, State
from rota.sampling import draw, memory
from rota.sampling.cohort import Cohort


@dataclass(frozen=True)
class ClusteredSize(Cohort):
    """Clustered sampling by size: one client from each stratum (Fraboni et al. 2021, Alg. 1).

    Clients in order of their data fill `budget` strata. A client's mass is budget * share; a
    stratum has mass 1, and a client may lie in several strata. Every draw counts the same.
    """

    def init(self, shares: Array, rounds: int) -> State:
        super().init(shares, rounds)
        # sorting a million clients takes longer than the whole draw
        return {"order": np.argsort(-shares, axis=1, kind="stable")}

    def strata(self, state: State, model: int, row: Array) -> tuple[Array, Array]:
        """The line that is cut into strata: clients, and masses in proportion to the row."""
        order = state["order"][model]
        order = order[row[order] > 0]  # only clients that can be reached
        if (np.diff(row[order]) > 0).any():  # the shares have changed since the first round
            order = np.argsort(-row, kind="stable")[: np.count_nonzero(row)]
        return order, round(self.budget) * row[order] / row.sum()

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return stratified(self.strata, state, shares, generator)


@dataclass(frozen=True)
class ClusteredSimilarity(memory.Comparing):
    """Clustered sampling by similarity of the last updates (Fraboni et al. 2021, Alg. 2).

    The clusters come from Ward's linkage of the angles between the clients' last updates. The angle
    with an update that is not known yet is 0. The tree is cut so that no cluster's mass exceeds 1.
    Each of the `budget` heaviest clusters begins a stratum, and the clients of the other clusters
    fill the free space. A client with a mass above 1 has strata of its own.
    """

    needs: ClassVar[str] = "updates of the drawn clients"
    costs: ClassVar[str] = (
        "one update per client and all angles on the server; clustering in every round"
    )

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return stratified(self.strata, state, shares, generator)

    def strata(self, state: State, model: int, row: Array) -> tuple[Array, Array]:
        owners = np.flatnonzero(row)
        mass = round(self.budget) * row[owners] / row.sum()
        alone = np.floor(mass)
        angle = memory.angles(state[f"gram.{model}"][np.ix_(owners, owners)])
        client, part = pour(clusters(angle, mass - alone), mass - alone)
        whole = np.flatnonzero(alone)
        return owners[np.concatenate([whole, client])], np.concatenate([alone[whole], part])


def stratified(
    strata: Callable[[State, int, Array], tuple[Array, Array]],
    state: State,
    shares: Array,
    generator: np.random.Generator,
) -> Plan:
    """For every model, one client from each of its strata."""
    plans = []
    for s, row in enumerate(shares):
        if row.any():
            plans.append(one_each(s, *strata(state, s, row), row, generator))
    return draw.concatenate(plans)


def one_each(
    model: int, client: Array, mass: Array, row: Array, generator: np.random.Generator
) -> Plan:
    """One client from each stratum of the line of segments (client, mass), cut at 1, 2, 3 ...

    A client's mass is strata * share / sum of shares, so a client drawn c times counts
    c * sum of shares / strata.
    """
    ends = np.cumsum(mass)
    strata = round(float(ends[-1]))
    place = np.searchsorted(ends, np.arange(strata) + generator.random(strata), side="right")
    drawn, count = np.unique(client[np.minimum(place, len(client) - 1)], return_counts=True)
    # the segments of the drawn clients: how likely was it to miss them?
    mine = np.flatnonzero(np.isin(client, drawn))
    start, end = ends[mine] - mass[mine], ends[mine]
    cut = np.minimum(np.floor(start) + 1, end)
    whole, last = np.divmod(end - cut, 1.0)
    missed = np.ones(len(row))
    np.multiply.at(missed, client[mine], (1 - (cut - start)) * (1 - last) * (whole == 0))
    return Plan(drawn, np.full(len(drawn), model), 1 - missed[drawn], count * row.sum() / strata)


def clusters(distance: Array, mass: Array) -> list[list[int]]:
    """The largest subtrees of Ward's tree whose mass is at most 1."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    found = {leaf: [leaf] for leaf in range(len(mass))}
    if len(mass) > 1:
        tree = linkage(squareform(distance, checks=False), "ward")
        for node, (one, two) in enumerate(tree[:, :2].astype(int).tolist(), start=len(mass)):
            if one in found and two in found and mass[found[one] + found[two]].sum() <= 1 + 1e-9:
                found[node] = found.pop(one) + found.pop(two)
    return list(found.values())


def pour(groups: list[list[int]], mass: Array) -> tuple[Array, Array]:
    """Segments (client, mass) of strata of mass 1: heavy groups begin them, others fill them up."""
    strata = round(float(mass.sum()))
    groups = sorted(groups, key=lambda group: -mass[group].sum())
    rest = [[client, mass[client]] for group in groups[strata:] for client in group]
    client, part = list[int](), list[float]()
    for group in groups[:strata]:
        client += group
        part += mass[group].tolist()
        free = 1 - mass[group].sum()
        while rest and free > 0:
            poured = min(free, rest[0][1])
            client.append(rest[0][0])
            part.append(poured)
            free -= poured
            rest[0][1] -= poured
            if rest[0][1] <= 0:
                rest.pop(0)
    return np.array(client, np.int64), np.array(part)
