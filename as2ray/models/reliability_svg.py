"""A reliability diagram as a small picture in HTML."""

from as2ray.tables.reliability import Reliability

SIZE = 120
"""Width and height in pixels."""


def reliability_svg(before: Reliability, after: Reliability) -> str:
    """Draws the share of answers over the score as an SVG element; the diagonal is perfect.

    Args:
        before: Of the scores; gray.
        after: Of the calibrated scores; blue.
    """
    diagonal = f'<line x1="0" y1="{SIZE}" x2="{SIZE}" y2="0" stroke="silver"/>'
    curves = _draw(before, "gray") + _draw(after, "steelblue")
    return f'<svg width="{SIZE}" height="{SIZE}" role="img">{diagonal}{curves}</svg>'


def _draw(reliability: Reliability, color: str) -> str:
    bins = list(zip(reliability.mean_scores, reliability.accuracy, reliability.bin_counts))
    places = [(SIZE * score, SIZE * (1 - accuracy)) for score, accuracy, _ in bins]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{color}"/>'
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{color}">'
        f"<title>score {score:.2f}, {accuracy:.0%} of {count:,} are answers</title></circle>"
        for (x, y), (score, accuracy, count) in zip(places, bins)
    )
    return line + dots
