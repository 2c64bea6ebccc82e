"""Trials of searches over stored scores.

Every process of a search loads this module, so it imports neither stages nor rankers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from as2ray.evaluation.cascade_replay import CascadeReplay
from as2ray.evaluation.measures import mean_average_precision
from tune_spaces import drop_ratios, ensembles


def dropped(config: Mapping[str, Any], replay: CascadeReplay) -> dict[str, float]:
    """Returns quality and cost of the exits and drop ratios of a trial."""
    point = replay.evaluate(*drop_ratios.apply_params(config, len(replay.exit_layers)))
    return {"quality": point.map, "cost": point.relative_flops}


def dropped_first(first: float, replay: CascadeReplay) -> list[dict[str, Any]]:
    """Evaluates the part of the paper's grid that begins with a drop ratio."""
    every = list(range(len(replay.exit_layers)))
    ratios = [drop for drop in drop_ratios.param_grid(len(every)) if drop[0] == first]
    return [asdict(replay.evaluate(every, drop)) for drop in ratios]


Stored = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Scores [rows, members], question ids [rows] and labels [rows] of a dev table."""


def weighted(config: Mapping[str, Any], stored: Stored) -> dict[str, float]:
    """Returns the quality of an ensemble with the weights of a trial."""
    return {"quality": ensemble_map(ensembles.apply_params(config, stored[0].shape[1]), stored)}


def ensemble_map(weights: Sequence[float], stored: Stored) -> float:
    """Returns the MAP of the members' weighted scores."""
    scores, question, label = stored
    return mean_average_precision(question, label, scores @ np.asarray(weights))
