"""Is one system better than another: paired tests over questions, intervals, families.

Knows tables of per-question values (`Evaluation.per_question`). Must not know models or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy import stats
from statsmodels.stats.multitest import multipletests

from as2ray.errors import EvaluationError
from as2ray.evaluation.seeds import (
    QuestionValues,
    SeedSummary,
    align_by_question,
    average_over_seeds,
    summarize_seeds,
)

__all__ = [
    "PairedComparison",
    "SeedSummary",
    "compare_systems",
    "holm_correction",
    "average_over_seeds",
    "summarize_seeds",
]

_MAX_BATCH_CELLS = 4_000_000
_MAX_EXACT_QUESTIONS = 13
"""Questions up to which SciPy, too, tries all signs."""
_DECIMALS = 12  # 0.3 - 0.2 and 0.6 - 0.5 are the same difference, whatever floats say


@dataclass(frozen=True)
class PairedComparison:
    """A system against a baseline on one measure, paired by question."""

    measure: str
    """Name of the measure."""
    num_questions: int
    """Pairs of values."""
    baseline_mean: float
    """Mean of the baseline."""
    system_mean: float
    """Mean of the system."""
    difference: float
    """System minus baseline."""
    interval: tuple[float, float]
    """Percentile bootstrap interval of the difference, over questions."""
    confidence: float
    """Coverage of the interval."""
    effect_size: float | None
    """Cohen's d of paired values: mean over standard deviation of the differences.

    None where all questions differ by the same amount, other than 0.
    """
    p_randomization: float
    """Paired randomisation test, two-sided: the test to quote (Smucker et al., CIKM 2007)."""
    p_t: float
    """Paired t-test, two-sided."""
    p_wilcoxon: float
    """Wilcoxon signed-rank test, two-sided; questions without a difference are left out."""
    spearman: float | None
    """Rank correlation of the two systems over questions; None where one of them is constant."""


def compare_systems(
    baseline: pa.Table,
    system: pa.Table,
    measure: str,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedComparison:
    """Tests `system` against `baseline` on the questions that both answered.

    Args:
        baseline: Columns question_id and `measure`; several seeds are averaged before.
        system: The same questions, in any order.
        measure: Column to compare.
        resamples: Draws of the randomisation test and of the bootstrap.
        confidence: Coverage of the interval.
        seed: The draws; the same seed gives the same numbers.

    Raises:
        EvaluationError: Other questions, no such measure, or fewer than two questions.
    """
    before, after = align_by_question([baseline, system], measure)
    if len(before) < 2:
        raise EvaluationError(
            f"{len(before)} question; expected at least two questions",
            fix="compare on a larger table",
        )
    differences = np.round(after - before, _DECIMALS)
    randomisation, t, wilcoxon = _compute_p_values(differences, num_resamples, seed)
    return PairedComparison(
        measure=measure,
        num_questions=len(before),
        baseline_mean=float(before.mean()),
        system_mean=float(after.mean()),
        difference=float(after.mean() - before.mean()),
        interval=_bootstrap_interval(differences, num_resamples, confidence, seed),
        confidence=confidence,
        effect_size=_effect_size(differences),
        p_randomization=randomisation,
        p_t=t,
        p_wilcoxon=wilcoxon,
        spearman=_spearman(before, after),
    )


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """p-values of one family of tests, adjusted by Holm's step-down method, in the given order.

    Raises:
        EvaluationError: A value outside [0, 1].
    """
    wrong = [p for p in p_values if not 0 <= p <= 1]
    if wrong:
        raise EvaluationError(
            f"{len(wrong)} of {len(p_values)} p-values outside [0, 1], first {wrong[0]}"
            "; expected probabilities",
            fix="leave out tests that could not be computed",
        )
    return multipletests(p_values, method="holm")[1].tolist() if len(p_values) else []


def _compute_p_values(
    differences: QuestionValues, num_resamples: int, seed: int
) -> tuple[float, float, float]:
    if not differences.any():
        return 1.0, 1.0, 1.0
    constant = np.ptp(differences) == 0
    t = 0.0 if constant else stats.ttest_1samp(differences, 0).pvalue
    return (
        _randomization_p_value(differences, num_resamples, seed),
        float(t),
        _wilcoxon_p_value(differences),
    )


def _randomization_p_value(values: QuestionValues, num_resamples: float, seed: int) -> float:
    """How often random signs give a mean as far from 0; inf resamples try all signs."""
    test = stats.permutation_test(
        (values,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=num_resamples,
        batch=_resampling_batch_size(values),
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def _wilcoxon_p_value(differences: QuestionValues) -> float:
    """SciPy's, which for few questions with ties takes a second where this takes milliseconds: all
    signs of the ranks."""
    if len(differences) > _MAX_EXACT_QUESTIONS:
        return float(stats.wilcoxon(differences).pvalue)
    signed, differ = np.sign(differences), differences != 0
    signed[differ] *= stats.rankdata(np.abs(differences[differ]))
    return _randomization_p_value(signed, np.inf, 0)


def _bootstrap_interval(
    differences: QuestionValues, num_resamples: int, confidence: float, seed: int
) -> tuple[float, float]:
    result = stats.bootstrap(
        (differences,),
        np.mean,
        vectorized=True,
        n_resamples=num_resamples,
        batch=_resampling_batch_size(differences),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _resampling_batch_size(differences: QuestionValues) -> int:
    return max(1, _MAX_BATCH_CELLS // len(differences))


def _effect_size(differences: QuestionValues) -> float | None:
    if not differences.any():
        return 0.0
    if np.ptp(differences) == 0:
        return None
    return float(differences.mean() / differences.std(ddof=1))


def _spearman(before: QuestionValues, after: QuestionValues) -> float | None:
    if np.array_equal(before, after):
        return 1.0
    if np.ptp(before) == 0 or np.ptp(after) == 0:
        return None
    return float(stats.spearmanr(before, after).statistic)
