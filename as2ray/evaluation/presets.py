"""Parses names of measures, and lists the measures and question filter of each paper."""

from typing import Any, NamedTuple

import ir_measures
from ir_measures import AP, RR, P, nDCG

from as2ray.errors import EvaluationError
from as2ray.tables.filters import QuestionFilter
from as2ray.tables.ranking_order import RelevanceColumn

Measure = Any
"""A measure of ir-measures, such as `nDCG @ 10`; that package has no type hints."""


class PaperPreset(NamedTuple):
    """How a paper evaluates: `evaluate(table, scores, **PAPER_PRESETS["tanda"]._asdict())`."""

    measures: tuple[Measure, ...]
    question_filter: QuestionFilter


PAPER_PRESETS: dict[str, PaperPreset] = {
    "tanda": PaperPreset((AP, RR), "clean"),  # arXiv:1911.04118
    "cascade": PaperPreset((AP, nDCG @ 10, P @ 1, RR), "no_all_negative"),  # arXiv:2005.02534
    "cerberus": PaperPreset((P @ 1, AP, RR), "no_all_negative"),  # arXiv:2201.05767
    "pseudo_labels": PaperPreset((RR,), "raw"),  # arXiv:2103.03335
}
"""Measures and question filter of each paper, by name."""


def parse_measure(measure: Measure | str, relevance: RelevanceColumn = "grade") -> Measure:
    """Returns the ir-measures value of a name such as "nDCG@10"; a value is only checked.

    Raises:
        EvaluationError: An unknown name or parameter, a measure that no provider computes, or one
            of grades if the relevance is the label, which is 0 or 1.
    """
    try:
        value = ir_measures.parse_measure(measure) if isinstance(measure, str) else measure
        problem = "its cutoff is below 1" if value.params.get("cutoff", 1) < 1 else ""
        if not ir_measures.DefaultPipeline.supports(value):
            problem = "no provider computes it"
    except (NameError, ValueError, KeyError, AssertionError, AttributeError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        raise EvaluationError(
            f"measure {measure!r}: {problem}",
            fix="use a name of https://ir-measur.es, such as AP, RR, P@1 or nDCG@10, or AP(rel=2) "
            "of grades",
        )
    if relevance == "label" and value.params.get("rel", 1) > 1:
        raise EvaluationError(
            f"measure {value}: labels are 0 and 1, so that no candidate would be relevant",
            fix="evaluate a table with grades by `as2ray evaluate --relevance grade` or "
            'evaluate(relevance="grade"), or leave out `rel`',
        )
    return value
