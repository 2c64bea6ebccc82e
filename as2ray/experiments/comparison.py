"""What recipes of several runs share: the tables of the graph, and rankers made of runs."""

from collections.abc import Collection, Mapping, Sequence

from as2ray.errors import ConfigError
from as2ray.experiments.experiment import Experiment
from as2ray.experiments.recipe import Recipe, check_names
from as2ray.experiments.tables import PreparedTable, table_stages


def start_experiment(
    recipe: Recipe, data_dirs: Mapping[str, str]
) -> tuple[Experiment, dict[str, PreparedTable]]:
    """Returns an experiment that has the recipe's tables so far, and their stages by name."""
    experiment, tables = Experiment(), table_stages(recipe, data_dirs)
    for name, table in tables.items():
        experiment.add(f"tables/{name}", table)
    return experiment, tables


def check_members(
    recipe: Recipe, kind: str, rankers: Mapping[str, Sequence[str]], accepted: Collection[str]
) -> None:
    """Checks rankers that are made of a recipe's runs, such as ensembles.

    Args:
        recipe: The recipe.
        kind: What the rankers are, for the errors.
        rankers: Members of each ranker by its name.
        accepted: Runs that may be members.

    Raises:
        ConfigError: A name is invalid or a run's, there is no member, one is not accepted, or they
            share no seed.
    """
    check_names(kind, rankers)
    for name, members in rankers.items():
        if name in recipe.runs:
            raise ConfigError(f"{kind} {name!r} has the name of a run")
        if not members or not set(members).issubset(accepted):
            raise ConfigError(
                f"{kind} {name!r} of {members}: it needs members among the runs {list(accepted)}"
            )
        recipe.seeds_shared(name, members)
