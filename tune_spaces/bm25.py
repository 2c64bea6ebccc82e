"""k1 and b of BM25: FlexNeuART's grid of 56 points (Mokrii et al. 2021 tune on it).

Knows plain numbers. Must not know indexes, measures or Ray.
"""

from itertools import product

K1 = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
B = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def param_grid() -> list[tuple[float, float]]:
    """Every k1 with every b."""
    return list(product(K1, B))
