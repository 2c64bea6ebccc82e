"""The stage that chooses k1 and b of BM25."""

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

from as2ray.evaluation.measures import evaluate
from as2ray.experiments.queries import (
    distinct_texts,
    positive_texts,
    read_queries,
    retrieved_rows,
)
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.tables import read_table
from as2ray.tables.filters import QuestionFilter
from as2ray.text.bm25 import BM25, TermConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BM25Grid(Stage):
    """The point of a grid of k1 and b that ranks the dev table best; a single point is given."""

    VERSION = 2

    dev: Stage
    points: tuple[tuple[float, float], ...]
    """Pairs of k1 and b."""
    measure: str = "RR"
    """The measure that chooses; Mokrii et al. take RR."""
    collection: tuple[Stage, ...] = ()
    """Tables whose candidates are retrieved from, as the index will; by default each question's own
    candidates are ranked."""
    depth: int = 100
    """Number of candidates to retrieve from the collection."""
    terms: TermConfig = field(default_factory=TermConfig)
    """What counts as a term."""

    def run(self, context: StageContext) -> Outputs:
        """Ranks with each point; of equal points the first one wins."""
        if len(self.points) == 1:
            return self._outputs(*self.points[0])
        rows, queries = read_table(context.path(self.dev)), read_queries(context.path(self.dev))
        is_search = bool(self.collection)
        texts = distinct_texts(context, self.collection)
        candidates = texts if is_search else rows["candidate"].to_pylist()
        term_counts = self._bm25().count_terms(candidates)
        grid = []
        for k1, b in self.points:
            if is_search:
                index = self._bm25(k1, b).build_from_counts(term_counts)
                hits = (index.search(query.text, self.depth) for query in queries)
                results = ({texts[hit.index]: hit.score for hit in found} for found in hits)
                positives = positive_texts(rows)
                ranked, scores, _ = retrieved_rows(positives, queries, results)
            else:
                ranked, scores = rows, self._bm25(k1, b).score_candidates(rows, term_counts)
            kept: QuestionFilter = "raw" if is_search else "no_all_negative"
            result = evaluate(ranked, scores, [self.measure], question_filter=kept)
            grid.append((k1, b, result.measures[self.measure]))
        k1, b, quality = max(grid, key=lambda point: point[2])
        log.info("BM25: dev %s %.4f with k1 %g, b %g", self.measure, quality, k1, b)
        return {**self._outputs(k1, b), self.measure: quality, "grid": grid}

    def chosen(self, context: StageContext) -> BM25:
        """Returns BM25 with the chosen k1 and b."""
        outputs = context.outputs(self)
        return self._bm25(outputs["k1"], outputs["b"])

    def _outputs(self, k1: float, b: float) -> dict[str, Any]:
        changed = [name for name, is_set in asdict(self.terms).items() if is_set]
        return {"k1": k1, "b": b, "content": ", ".join([f"k1={k1:g}", f"b={b:g}", *changed])}

    def _bm25(self, k1: float = BM25.k1, b: float = BM25.b) -> BM25:
        return BM25(k1, b, **asdict(self.terms))
