"""Objects outside as2ray: named by `module:name`, or offered by entry points of other packages."""

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from as2ray.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Returns whether a name has the form `module:name`."""
    return ":" in name


def import_object(path: str, kind: str) -> Any:
    """Imports an object. The current folder is searched last, for console scripts.

    Args:
        path: Where it is: `module:name`, such as `my_package.losses:focal`.
        kind: What the object is, for the error: `corpus`, `loss`.

    Raises:
        ConfigError: There is no such module, or no such name in it.
    """
    module, _, name = path.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{kind} {path!r} cannot be imported: {error}",
            fix=f"install the package of {module!r} on every node, or put its folder into "
            "PYTHONPATH",
        ) from error


def load_entry_points(group: str) -> dict[str, Any]:
    """Loads what installed packages offer as entry points of a group, by name.

    Raises:
        ConfigError: An entry point cannot be imported.
    """
    return {
        entry.name: import_object(entry.value, f"entry point {entry.name!r} of {group!r},")
        for entry in entry_points(group=group)
    }
