"""Explains what a cascade drops: which candidates left where, what it saved, and what it lost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.cascade.cost import count_scored
from as2ray.cascade.pruning import StagedScores, log_odds
from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.margin_path import question_losses


@dataclass(frozen=True)
class PruningReport:
    """What one way of dropping candidates does to a stored run."""

    name: str
    exit_layers: tuple[int, ...]
    """Layers below the exits that were used."""
    left_shares: tuple[float, ...]
    """Share of all candidates that left after each exit, the last one included."""
    relative_flops: float
    """Operations, divided by those of the whole encoder over all candidates."""
    first_place_loss: float
    """Mean of 1 - 1 / (place of the last exit's first)."""
    map: float | None
    """MAP over all candidates; None without labels of both kinds."""


def report_pruning(
    replay: CascadeReplay, name: str, exit_indices: Sequence[int], staged: StagedScores
) -> PruningReport:
    """Measures one way of dropping candidates.

    Args:
        replay: Stored scores.
        name: What is dropped.
        exit_indices: Indices of the exits that were used.
        staged: Scores of the cascade for all rows.
    """
    assert staged.stage_index is not None
    point = replay.measure(exit_indices, staged)
    scored = count_scored(staged.stage_index, len(exit_indices))
    shares = -np.diff([*scored, 0]) / len(staged.scores)
    losses = question_losses(replay, staged, "first_place")
    has_labels = len(set(replay.table["label"].unique().to_pylist())) == 2
    return PruningReport(
        name,
        point.exit_layers,
        tuple(shares.tolist()),
        point.relative_flops,
        float(losses.mean()),
        point.map if has_labels else None,
    )


@dataclass(frozen=True)
class CandidateExit:
    """Where a candidate of a question left, and why."""

    candidate: str
    exit_layer: int
    """Layer below the last exit that scored it; 0 if there was no time for it."""
    score: float
    """Its score there."""
    gap: float
    """How far it lay below the question's best at that exit, in log-odds."""
    label: int


def explain_question(
    replay: CascadeReplay, exit_indices: Sequence[int], staged: StagedScores, question: int
) -> list[CandidateExit]:
    """Returns the candidates of a question, best first, with where they left.

    Args:
        replay: Stored scores.
        exit_indices: Indices of the exits that were used.
        staged: Scores of the cascade for all rows.
        question: Index of the question, from 0.
    """
    assert staged.stage_index is not None
    rows = np.flatnonzero(replay.question_index == question)
    rows = rows[np.argsort(-staged.sort_keys[rows], kind="stable")]
    stages, scores = staged.stage_index[rows], staged.scores[rows]
    values, texts = log_odds(scores), replay.table["candidate"].to_pylist()
    labels = replay.table["label"].to_pylist()
    explained = []
    for row, stage, score, value in zip(rows, stages, scores, values):
        reached = rows[stages >= stage]
        best = log_odds(replay.scores[reached, exit_indices[stage]]).max() if stage >= 0 else value
        layer = replay.exit_layers[exit_indices[stage]] if stage >= 0 else 0
        gap = float(best - value)
        explained.append(CandidateExit(texts[row], layer, float(score), gap, labels[row]))
    return explained
