"""Reads configurations from YAML files and flags, and prints them as such files.

Files and flags are merged into one tree, which pydantic validates once. jsonargparse only prints
the help: as a validator it does not give the path of a wrong value inside a dictionary.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings
from pydantic import TypeAdapter, ValidationError

from as2ray.errors import ConfigError, from_validation_error, suggest
from as2ray.experiments.stage import plain

T = TypeVar("T")

PRINT_CONFIG = "--print_config"
"""Flag that prints the configuration with its defaults instead of running it."""

TYPE_NAMES = {Any: "any", None: "null", type(None): "null"}
"""Names of types in the help where Python's are others."""


class HelpFormatter(DefaultHelpFormatter):  # type: ignore[misc]
    """Formats a help whose types a reader understands, such as `float > 0 or null`."""

    def _get_type_str(self, action: Any) -> str | None:
        hint = getattr(action, "_typehint", None)
        name: str | None = super()._get_type_str(action) if hint is None else describe_type(hint)
        return name


def describe_type(hint: Any) -> str:
    """Returns what a type means to someone who writes a value of it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = " and ".join(_describe_bounds(arguments[1:]))
        return f"{describe_type(arguments[0])} {bounds}".strip()
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, arguments))
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (list, tuple):
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return f"dict[{', '.join(map(describe_type, arguments))}]"
    is_class = isinstance(hint, type) and origin is None
    return TYPE_NAMES.get(hint, hint.__name__ if is_class else str(hint))


def _describe_bounds(metadata: Sequence[Any]) -> list[str]:
    """Returns the bounds of pydantic's metadata, such as `> 0`."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    nested = [each for field in metadata for each in getattr(field, "metadata", [field])]
    return [
        f"{sign} {getattr(each, name):g}"
        for each in nested
        for name, sign in signs.items()
        if isinstance(getattr(each, name, None), int | float)
    ]


def print_help(kinds: Sequence[type], arguments: Sequence[str]) -> None:
    """Prints the help and exits, if a flag asks for it.

    Args:
        kinds: Configuration classes; their fields are the flags.
        arguments: The command line.
    """
    flags = [argument.partition("=")[0] for argument in arguments]
    if not any(flag in ("-h", "--help") or flag.endswith(".help") for flag in flags):
        return  # for the parser, jsonargparse parses the sources of all classes: 0.1 s
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=_program_name(),
        description=kinds[0].__doc__,
        formatter_class=HelpFormatter,
        print_config=None,
    )
    parser.add_argument("--config", action="config", help="a YAML file of these keys")
    text = "print the keys with all defaults as such a file, and exit"
    parser.add_argument(PRINT_CONFIG, action="store_true", help=text)
    for kind in kinds:
        parser.add_class_arguments(kind, as_group=False)
    parser.parse_args(arguments)


def _program_name() -> str | None:
    """Returns how the pipeline of this process is started; None for argparse's own default."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec and spec.name.startswith("pipelines.") else None


def read_tree(kinds: Sequence[type], arguments: Sequence[str]) -> dict[str, Any]:
    """Merges the YAML files and flags of a command line; later ones replace earlier ones.

    Args:
        kinds: Configuration classes, which tell where a flag's value is a string.
        arguments: `--config FILE`, `--key VALUE`, `--key.key=VALUE`, or `--key+ VALUE`, which
            appends to a list. Values are YAML, except where a string is expected. A flag of a
            truth value may stand alone.

    Raises:
        ConfigError: A file cannot be read, or an argument is not a flag with a value.
    """
    tree: dict[str, Any] = {}
    defaults = _defaults(kinds)
    remaining = [argument for argument in arguments if argument != PRINT_CONFIG]
    while remaining:
        flag, has_value, text = remaining.pop(0).partition("=")
        keys = flag.removeprefix("--").removesuffix("+").split(".")
        is_switch = _field_type(kinds, keys) is bool
        if is_switch and not has_value and (not remaining or remaining[0].startswith("--")):
            has_value, text = "=", "true"
        if not flag.startswith("--") or not (has_value or remaining):
            raise ConfigError(f"{flag!r} is not a flag with a value: --key VALUE or --key=VALUE")
        text = text if has_value else remaining.pop(0)
        if flag == "--config":
            merge_into(tree, _read_yaml_file(text))
            continue
        is_string = _field_type(kinds, keys) in (str, str | None) and text != "null"
        value = text if is_string else _parse_yaml(text, flag)
        if flag.endswith("+"):
            items = value if isinstance(value, list) else [value]
            value = [*_list_at(defaults | tree, keys), *items]
        for key in reversed(keys[1:]):
            value = {key: value}
        merge_into(tree, {keys[0]: value})
    return tree


def validate(kind: type[T], tree: Mapping[str, Any], *others: type) -> T:
    """Builds a configuration from plain values.

    Args:
        kind: Class of the configuration.
        tree: Its values.
        others: Classes whose keys stand in the same file, for the suggestion of an error.

    Raises:
        ConfigError: Values are of a wrong type or out of range, or keys are unknown or missing;
            the error names the path of each.
    """
    values = dict(tree)
    for name, default in _defaults([kind]).items():
        # A dictionary of entries is what is given: its defaults could not be left out.
        if is_dataclass(_field_type([kind], [name])) and isinstance(values.get(name), Mapping):
            merge_into(default, values[name])
            values[name] = default
    try:
        config = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise from_validation_error(
            error,
            known_keys=lambda path: _known_keys([kind, *others], path) or _keys_at(tree, path),
        ) from None
    if converted := list(_list_converted(tree, plain(config))):
        raise ConfigError("\n".join(f"{path} must be a number" for path in converted))
    return config


def _list_converted(value: Any, result: Any, path: str = "") -> Iterator[str]:
    """Yields paths of truth values, such as `seeds.0=True`, that pydantic has made numbers of."""
    if isinstance(value, bool) and not isinstance(result, bool):
        yield f"{path}={value}"
    elif isinstance(value, Mapping) and isinstance(result, Mapping):
        for key in filter(result.__contains__, value):
            yield from _list_converted(value[key], result[key], f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and isinstance(result, list):
        for number, pair in enumerate(zip(value, result)):
            yield from _list_converted(*pair, f"{path}.{number}")


def _known_keys(kinds: Sequence[type], path: Sequence[str]) -> list[str]:
    """Returns the keys of the configuration at a path; [] if there is none."""
    at_path = [_field_type(kinds, path)] if path else kinds
    return [f.name for each in at_path if is_dataclass(each) for f in fields(each)]


def print_config(configs: Sequence[Any], arguments: Sequence[str]) -> None:
    """Prints configurations with all defaults as one YAML file and exits, if a flag asks for it.

    Args:
        configs: Configurations, whose keys stand in the same file.
        arguments: The command line.
    """
    if PRINT_CONFIG in arguments:
        tree = {key: value for config in configs for key, value in plain(config).items()}
        yaml.safe_dump(tree, sys.stdout, sort_keys=False, allow_unicode=True)
        sys.exit()


def merge_into(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merges changes into a tree, key by key; an empty dictionary and other values replace it."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value and isinstance(tree.get(key), dict):
            merge_into(tree[key], value)
        else:
            tree[key] = value


def _read_yaml_file(path: str) -> Mapping[str, Any]:
    if not (file := _find_config(path)).is_file():
        recipes = file.parent.glob("*.yaml")
        siblings = [each.name for each in recipes if suggest(file.stem, [each.stem])]
        raise ConfigError(f"--config {path}: there is no such file", suggest(file.name, siblings))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    tree = _parse_yaml(text, path)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"--config {path} is not a YAML mapping of keys to values")
    return tree


def _find_config(path: str) -> Path:
    """Returns the file of that path, or the recipe of that name that is installed with as2ray."""
    package = find_spec("pipelines")
    folders = list(package.submodule_search_locations or []) if package else []
    installed = [Path(folder) / "recipes" / Path(path).name for folder in folders]
    is_recipe = Path(path).parent in (Path(), Path("pipelines/recipes"))
    places = [Path(path), *(installed if is_recipe else [])]
    return next((place for place in places if place.is_file()), places[-1])


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""LibYAML's parser, which takes a tenth of the time, unless PyYAML was built without it."""


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Refuses a key that a mapping has twice, of which PyYAML drops the first value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """See `yaml.constructor.SafeConstructor`."""
        keys = set()
        for key, _ in node.value:
            if (name := str(key.value)) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} is there twice", problem_mark=key.start_mark
                )
            keys.add(name)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as failure:
        error = _find_syntax_error(text) or failure
        mark, cause = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source} is not YAML: {where}{cause or error}") from error


def _find_syntax_error(text: str) -> yaml.YAMLError | None:
    """Returns the error of PyYAML's own parser, which says more than LibYAML's."""
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        return error
    return None


def _field_type(kinds: Sequence[type], keys: Sequence[str]) -> Any:
    """Type of the field at a path; None if there is no such field."""
    hints: dict[str, Any] = {}
    for kind in kinds:
        hints |= get_type_hints(kind)
    field_type = hints.get(keys[0])
    for key in keys[1:]:
        if is_dataclass(field_type) and isinstance(field_type, type):
            field_type = get_type_hints(field_type).get(key)
        elif get_origin(field_type) is dict:
            field_type = get_args(field_type)[1]
        else:  # Of a union, such as losses, the member with this `type`.
            members = (t for t in _list_types(field_type) if getattr(t, "type", None) == key)
            field_type = next(members, None)
    return field_type


def _list_types(annotation: Any) -> Iterator[Any]:
    """Yields an annotation and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _list_types(part)


def _value_at(tree: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _list_at(tree: Mapping[str, Any], keys: Sequence[str]) -> list[Any]:
    value = _value_at(tree, keys)
    return value if isinstance(value, list) else []


def _keys_at(tree: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    value = _value_at(tree, keys)
    return list(value) if isinstance(value, Mapping) else []


def _defaults(kinds: Sequence[type]) -> dict[str, Any]:
    """Defaults of lists and nested configurations, as plain values.

    A field may have other defaults than its class has: `--training.epochs 3` must keep them.
    """
    defaults = {}
    for kind in kinds:
        for field in fields(kind):
            if field.default_factory is not MISSING:
                value = field.default_factory()
                is_config = is_dataclass(value) and not isinstance(value, type)
                defaults[field.name] = asdict(value) if is_config else value
    return defaults
