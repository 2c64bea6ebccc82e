"""Compares two systems: paired tests over questions, confidence intervals, Holm's correction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats

from as2ray.errors import EvaluationError
from as2ray.evaluation.seeds import QuestionValues, align_by_question

_MAX_BATCH_CELLS = 4_000_000
"""Maximum number of values that are resampled at once."""
_MAX_EXACT_QUESTIONS = 13
"""Maximum number of questions for which SciPy enumerates all signs."""
_DECIMALS = 12  # makes 0.3 - 0.2 and 0.6 - 0.5 the same difference


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a system with a baseline on one measure, paired by question."""

    measure: str
    """Name of the measure."""
    num_questions: int
    """Number of questions."""
    baseline_mean: float
    """Mean of the baseline over questions."""
    system_mean: float
    """Mean of the system over questions."""
    difference: float
    """System minus baseline."""
    interval: tuple[float, float]
    """Percentile bootstrap interval of the difference, over questions."""
    confidence: float
    """Coverage of the interval."""
    effect_size: float | None
    """Cohen's d of paired values: mean divided by standard deviation of the differences.

    None if all questions differ by the same amount other than 0.
    """
    p_randomization: float
    """Paired randomization test, two-sided; recommended by Smucker et al., CIKM 2007."""
    p_t: float
    """Paired t-test, two-sided."""
    p_wilcoxon: float
    """Wilcoxon signed-rank test, two-sided; questions without a difference are left out."""
    spearman: float | None = None
    """Rank correlation of the two systems over questions; None if one of them is constant."""
    p_spearman: float | None = None
    """Of the hypothesis that they are not correlated, two-sided."""


def compare_systems(
    baseline: pa.Table,
    system: pa.Table,
    measure: str,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedComparison:
    """Tests `system` against `baseline` on the same questions.

    Args:
        baseline: Columns question_id and `measure`; average several seeds first.
        system: The same questions, in any order.
        measure: Column to compare.
        num_resamples: Resamples of the randomization test and of the bootstrap.
        confidence: Coverage of the interval.
        seed: Seed of the resampling.

    Raises:
        EvaluationError: Different questions, no such measure, or fewer than two questions.
    """
    baseline_values, system_values = align_by_question([baseline, system], measure)
    if len(baseline_values) < 2:
        problem = f"a test needs at least two questions; the tables have {len(baseline_values)}"
        raise EvaluationError(problem)
    differences = np.round(system_values - baseline_values, _DECIMALS)
    p_randomization, p_t, p_wilcoxon = _compute_p_values(differences, num_resamples, seed)
    is_constant = np.ptp(baseline_values) == 0 or np.ptp(system_values) == 0
    correlation = None if is_constant else stats.spearmanr(baseline_values, system_values)
    return PairedComparison(
        measure=measure,
        num_questions=len(baseline_values),
        baseline_mean=float(baseline_values.mean()),
        system_mean=float(system_values.mean()),
        difference=float(system_values.mean() - baseline_values.mean()),
        interval=_bootstrap_interval(differences, num_resamples, confidence, seed),
        confidence=confidence,
        effect_size=_effect_size(differences),
        p_randomization=p_randomization,
        p_t=p_t,
        p_wilcoxon=p_wilcoxon,
        spearman=correlation and float(correlation.statistic),
        p_spearman=correlation and float(correlation.pvalue),
    )


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Adjusts the p-values of a family of tests by Holm's step-down method, in the given order.

    Raises:
        EvaluationError: A value outside [0, 1].
    """
    invalid = [p for p in p_values if not 0 <= p <= 1]
    if invalid:
        problem = f"{len(invalid)} of {len(p_values)} p-values outside [0, 1], first {invalid[0]}"
        raise EvaluationError(problem, fix="leave out tests that could not be computed")
    # statsmodels' takes over a second to load, and collects garbage at each call.
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.tolist()


def _compute_p_values(
    differences: QuestionValues, num_resamples: int, seed: int
) -> tuple[float, float, float]:
    if not differences.any():
        return 1.0, 1.0, 1.0
    p_randomization = _randomization_p_value(differences, num_resamples, seed)
    is_constant = np.ptp(differences) == 0
    p_t = 0.0 if is_constant else float(stats.ttest_1samp(differences, 0).pvalue)
    return p_randomization, p_t, _wilcoxon_p_value(differences)


def _randomization_p_value(values: QuestionValues, num_resamples: float, seed: int) -> float:
    """Returns how often random signs give a mean as far from 0; infinity tries all signs."""
    options = _resampling_options(values, num_resamples, seed)
    if num_resamples >= 2 ** len(values):
        test = stats.permutation_test((values,), np.mean, permutation_type="samples", **options)
    else:  # the same test, which `permutation_test` computes question by question
        rng = options.pop("rng")
        test = stats.monte_carlo_test(
            values, lambda size: values * rng.choice([-1.0, 1.0], size), np.mean, **options
        )
    return float(test.pvalue)


def _wilcoxon_p_value(differences: QuestionValues) -> float:
    """Returns SciPy's p-value.

    For few questions with ties SciPy takes a second; trying all signs of the ranks takes
    milliseconds.
    """
    if len(differences) > _MAX_EXACT_QUESTIONS:
        return float(stats.wilcoxon(differences).pvalue)
    signed_ranks, is_different = np.sign(differences), differences != 0
    signed_ranks[is_different] *= stats.rankdata(np.abs(differences[is_different]))
    return _randomization_p_value(signed_ranks, np.inf, 0)


def _bootstrap_interval(
    differences: QuestionValues, num_resamples: int, confidence: float, seed: int
) -> tuple[float, float]:
    options = _resampling_options(differences, num_resamples, seed)
    interval = stats.bootstrap(
        (differences,), np.mean, method="percentile", confidence_level=confidence, **options
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _resampling_options(values: QuestionValues, num_resamples: float, seed: int) -> dict[str, Any]:
    batch = max(1, _MAX_BATCH_CELLS // len(values))
    rng = np.random.default_rng(seed)
    return {"n_resamples": num_resamples, "batch": batch, "vectorized": True, "rng": rng}


def _effect_size(differences: QuestionValues) -> float | None:
    if not differences.any():
        return 0.0
    if np.ptp(differences) == 0:
        return None
    return float(differences.mean() / differences.std(ddof=1))
