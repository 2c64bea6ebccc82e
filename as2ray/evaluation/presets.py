"""Names of measures and question filters, and how each paper combines them.

Knows ir-measures values. Must not know tables, scores, models or files.
"""

from typing import Any, NamedTuple

import ir_measures
from ir_measures import AP, RR, P, nDCG

from as2ray.errors import EvaluationError
from as2ray.tables.filters import QuestionFilter

Measure = Any
"""A measure of ir-measures, such as `nDCG @ 10`; the package is not typed."""


class PaperPreset(NamedTuple):
    """How one paper evaluates: `evaluate(table, scores, **PRESETS["tanda"]._asdict())`."""

    measures: tuple[Measure, ...]
    question_filter: QuestionFilter


PAPER_PRESETS: dict[str, PaperPreset] = {
    "tanda": PaperPreset((AP, RR), "clean"),  # arXiv:1911.04118
    "cascade": PaperPreset((AP, nDCG @ 10, P @ 1, RR), "no_all_negative"),  # arXiv:2005.02534
    "cerberus": PaperPreset((P @ 1, AP, RR), "no_all_negative"),  # arXiv:2201.05767
    "pseudo_labels": PaperPreset((RR,), "raw"),  # arXiv:2103.03335
}
"""Measures and question filter of each paper."""


def parse_measure(measure: Measure | str) -> Measure:
    """The ir-measures value of a name such as "nDCG@10"; a value passes through.

    Raises:
        EvaluationError: An unknown name or parameter, or a measure that nothing here can compute.
    """
    try:
        value = ir_measures.parse_measure(measure) if isinstance(measure, str) else measure
        problem = _find_problem(value)
    except (NameError, ValueError, KeyError, AssertionError, AttributeError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        raise EvaluationError(
            f"measure {measure!r}: {problem}"
            "; expected an ir-measures name such as AP, RR, P@1, nDCG@10 or AP(rel=2)",
            fix="see https://ir-measur.es for the names and their parameters",
        )
    return value


def _find_problem(measure: Measure) -> str:
    providers = ir_measures.DefaultPipeline.providers
    if not any(p.is_available() and p.supports(measure) for p in providers):
        return "no provider computes it"
    return "its cutoff is below 1" if measure.params.get("cutoff", 1) < 1 else ""
