"""A histogram as a small picture in HTML."""

import numpy as np

NUM_BINS = 20
BAR_WIDTH, HEIGHT = 9, 40
"""Size in pixels."""


def histogram_svg(values: np.ndarray) -> str:
    """Draws how many values are in each twentieth of 0 to 1, as an SVG element.

    Args:
        values: Numbers; those outside 0 to 1 count in the first or last bin. Shape [values].
    """
    counts, _ = np.histogram(np.clip(values, 0, 1), NUM_BINS, (0, 1))
    heights = HEIGHT * counts / max(1, counts.max())
    bars = "".join(
        f'<rect x="{index * BAR_WIDTH}" y="{HEIGHT - height:.1f}" width="{BAR_WIDTH - 1}" '
        f'height="{height:.1f}"><title>{count}</title></rect>'
        for index, (height, count) in enumerate(zip(heights, counts))
    )
    size = f'width="{NUM_BINS * BAR_WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} fill="steelblue" role="img">{bars}</svg>'
