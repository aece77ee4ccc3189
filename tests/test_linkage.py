"""Agglomerative clustering, against scipy's."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from rota.grouping.linkage import clusters, merges


def same(one: Any, other: Any) -> bool:
    """Whether two clusterings are the same but for their numbers."""
    pairs = len(np.unique(np.stack([one, other]), axis=1).T)
    return bool(pairs == len(np.unique(one)) == len(np.unique(other)))


@pytest.mark.parametrize("how", ["average", "single"])
def test_clusters_are_scipys(how: Any) -> None:
    generator = np.random.default_rng(0)
    for points in (2, 3, 9, 40):
        for _ in range(10):
            flat = pdist(generator.random((points, 3)))
            tree, distance = linkage(flat, how), squareform(flat)
            heights = [height for height, _, _ in merges(distance, how)]
            np.testing.assert_allclose(heights, tree[:, 2])
            for number in (1, 2, points // 2 + 1):
                known = fcluster(tree, number, "maxclust")
                assert same(clusters(distance, how, number=number), known)
            most = float(np.median(heights))
            known = fcluster(tree, most * (1 + 1e-12), "distance")
            assert same(clusters(distance, how, most=most * (1 + 1e-12)), known)


@pytest.mark.parametrize("how", ["average", "single"])
def test_equal_distances_and_few_points(how: Any) -> None:
    assert clusters(np.zeros((1, 1)), how).tolist() == [0]
    assert clusters(np.zeros((0, 0)), how).tolist() == []
    ties = 1.0 - np.eye(6)
    assert clusters(ties, how, most=0.5).tolist() == [0, 1, 2, 3, 4, 5]
    assert clusters(ties, how, most=1.0).tolist() == [0] * 6
    assert clusters(ties, how, number=2).max() == 1
    blocks = 1.0 - np.kron(np.eye(2), np.ones((3, 3)))
    assert clusters(blocks[::-1][:, ::-1], how, number=2).tolist() == [0, 0, 0, 1, 1, 1]


def test_two_clusters_of_single_linkage_are_as_far_apart_as_two_can_be() -> None:
    """Sattler et al.'s optimal bipartition, against all bipartitions."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        near = 1 - squareform(pdist(generator.normal(size=(7, 3)), "cosine"))
        halves = [list(half) for size in (1, 2, 3) for half in combinations(range(7), size)]
        across = [np.delete(near[half], half, axis=1).max() for half in halves]
        of = clusters(1 - near, "single", number=2)
        assert near[np.ix_(of == 0, of == 1)].max() == pytest.approx(min(across))
