"""Search space of BM25's k1 and b: FlexNeuART's grid of 56 points (Mokrii et al. 2021)."""

from itertools import product

K1 = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
B = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def param_grid() -> list[tuple[float, float]]:
    """Returns every pair of k1 and b."""
    return list(product(K1, B))
