"""Searches under Ray Tune with Optuna: plain trials over stored scores.

Knows Ray Tune. Must not know what a trial computes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search.optuna import OptunaSearch

Metrics = Mapping[str, float]


def search(
    trial: Callable[[Mapping[str, Any], Any], Metrics],
    space: Callable[[Any], None],
    modes: Mapping[str, str],
    data: Any,
    folder: str | Path,
    trials: int = 100,
    seed: int = 0,
) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """An Optuna search for several measures at once; what each trial chose and found.

    Args:
        trial: (choice, data) -> measures.
        space: What Optuna's trials are asked, define-by-run.
        modes: For each measure `min` or `max`.
        data: What every trial reads; kept once in the object store.
        folder: Where Tune writes.
        trials: How many.
        seed: Of the sampler.
    """
    held = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report(dict(trial(config, ray.get(held))))

    names = list(modes)
    searcher = OptunaSearch(
        space=space, metric=names, mode=[modes[name] for name in names], seed=seed
    )
    results = _fit(run, {"search_alg": searcher, "num_samples": trials}, None, folder)
    return [(dict(r.config), {name: float(r.metrics[name]) for name in names}) for r in results]


def grid(
    work: Callable[[Any, Any], list[Any]], choices: Sequence[Any], data: Any, folder: str | Path
) -> list[Any]:
    """`work(choice, data)` of every choice, end to end.

    Args:
        work: What one trial computes, as plain values; make it large enough to be worth one.
        choices: Of the trials.
        data: What every trial reads; kept once in the object store.
        folder: Where Tune writes.
    """
    if not choices:
        return []
    held = ray.put(data)

    def run(config: dict[str, Any]) -> None:
        tune.report({"found": work(config["choice"], ray.get(held))})

    results = _fit(run, {}, {"choice": tune.grid_search(list(choices))}, folder)
    return [one for result in results for one in result.metrics["found"]]


def _fit(
    run: Callable[[dict[str, Any]], None],
    how: dict[str, Any],
    space: dict[str, Any] | None,
    folder: str | Path,
) -> tune.ResultGrid:
    folder = Path(folder).resolve()
    tuner = tune.Tuner(
        tune.with_resources(run, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(reuse_actors=True, **how),
        run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0),
    )
    results = tuner.fit()
    if results.num_errors:
        raise results.errors[0]
    return results
