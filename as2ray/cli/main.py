"""The command line `as2ray`: parses arguments with jsonargparse and reports errors."""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from itertools import zip_longest
from typing import Any

os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # Read when pydantic is imported.

from jsonargparse import ArgumentParser, auto_cli, set_parsing_settings
from pydantic import ValidationError

import as2ray
from as2ray.errors import As2rayError, ConfigError, from_validation_error, suggest
from as2ray.experiments.configuration import HelpFormatter
from as2ray.interrupts import sigterm_interrupts

COMMANDS: dict[str, tuple[str, str, str]] = {
    "train": ("train", "train_command", "train a ranker on a table of your own"),
    "rank": ("rank", "rank", "rank sentences by how well they answer a question"),
    "index": ("index", "index", "build an index of documents"),
    "ask": ("ask", "ask", "answer a question from an index"),
    "annotate": ("annotate", "annotate", "write lists of candidates for people to label"),
    "serve": ("serve", "serve", "serve a ranker, and an index, over HTTP"),
    "evaluate": ("evaluate", "evaluate", "evaluate a ranker or a run, and test it against another"),
    "calibrate": ("calibrate", "calibrate", "turn scores into probabilities"),
    "cascade": ("cascade", "cascade", "make a cascade of a ranker, with a bound on its loss"),
    "quantize": ("quantize", "quantize", "fit what int8 needs to know of a ranker"),
    "info": ("info", "info", "describe a ranker"),
    "cost": ("cost", "cost", "show what dropping candidates saves"),
    "corpora": ("corpora", "Corpora", "list, fetch, verify and prepare public corpora"),
    "convert": ("convert", "convert", "convert a released checkpoint"),
    "export": ("export", "export", "export a ranker for sentence-transformers"),
    "store": ("store", "StoreCommands", "list and prune stored stages of pipelines"),
    "stream": ("stream", "stream", "measure how fast a table is read for training"),
}
"""Module below `as2ray.cli`, name in it, and help of each command. Only the module of the command
that runs is imported."""

SWITCHES = ("--quiet", "--verbose", "--json_log")
"""Flags that may stand without a value."""

TRUTH_VALUES = (["true"], ["false"])

EXAMPLES = {"dict": """'{"NAME": "VALUE"}'""", "list": """'["A", "B"]'"""}
"""How a value of a type is written on the command line."""

POSITIONAL_FLAGS = {"index": "--documents", "ask": "--question"}
"""Flag that the first argument of a command fills, as in `as2ray ask "..."`."""


class _Parser(ArgumentParser):  # type: ignore[misc]
    """A parser that accepts no abbreviated flags, and whose help has plain types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(*args, **{**defaults, **kwargs})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line `as2ray`.

    Args:
        arguments: The command line; by default this process's.
    """
    flags = list(sys.argv[1:] if arguments is None else arguments)
    if flags[:1] and flags[0] in POSITIONAL_FLAGS and flags[1:] and not flags[1].startswith("-"):
        flags.insert(1, POSITIONAL_FLAGS[flags[0]])
    for position in reversed(range(len(flags))):
        if flags[position] in SWITCHES and flags[position + 1 : position + 2] not in TRUTH_VALUES:
            flags[position] += "=true"
    try:
        with sigterm_interrupts():
            _run(flags)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader has what it wanted, as `head` does.
        # Python flushes once more at its exit, and would report the closed pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ArgumentError as error:
        _exit_with(from_argument_error(error))
    except ValidationError as error:
        _exit_with(from_validation_error(error))
    except (As2rayError, OSError) as error:
        _exit_with(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _run(flags: list[str]) -> None:
    if not flags or flags[0] in ("-h", "--help"):
        lines = [f"  {name:10} {text}" for name, (_, _, text) in COMMANDS.items()]
        usage = "usage: as2ray COMMAND [--FLAG VALUE ...]"
        more = "as2ray COMMAND --help explains its flags; as2ray --version prints the version."
        sys.stdout.write("\n".join([usage, "", *lines, "", more, ""]))
        return
    if flags[0] == "--version":
        sys.stdout.write(f"as2ray {as2ray.__version__}\n")
        return
    name = flags[0]
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS) or "see as2ray --help"
        raise ConfigError(f"unknown command {name!r}", fix=hint)
    module, attribute, _ = COMMANDS[name]
    component = getattr(import_module(f"as2ray.cli.{module}"), attribute)
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        auto_cli(
            {name: component},
            args=_complete_switches(flags, component),
            as_positional=False,
            exit_on_error=False,
            parser_class=_Parser,
            prog="as2ray",
        )
    except ArgumentError as error:
        unknown = re.match(r"(?:Unrecognized|unrecognized) arguments: (.+)", str(error))
        if unknown is None:
            raise
        raise _unknown_flags(unknown[1].split(), component, name) from None


def _complete_switches(flags: list[str], component: Any) -> list[str]:
    """Returns flags in which those of truth values that stand alone, `--overwrite`, are true."""
    function = component
    if isinstance(component, type):
        function = getattr(component, flags[1] if flags[1:] else "", None)
    parameters = signature(function).parameters if callable(function) else {}
    switches = {f"--{name}" for name, each in parameters.items() if each.annotation is bool}
    return [
        f"{flag}=true" if flag in switches and (following or "--").startswith("--") else flag
        for flag, following in zip_longest(flags, flags[1:])
    ]


def _unknown_flags(flags: list[str], component: Any, name: str) -> ConfigError:
    """An error that names the first unknown flag and the nearest known one."""
    parser = _Parser()
    if not isinstance(component, type):
        parser.add_function_arguments(component)
    options = [option for action in parser._actions for option in action.option_strings]
    flag = flags[0].partition("=")[0]
    leaf = {option.rpartition(".")[2]: option for option in options if "." in option}
    near = suggest(flag, options) or suggest(flag.rpartition(".")[2].lstrip("-"), leaf)
    if near and near.split("'")[1] in leaf:
        near = f"did you mean {leaf[near.split(chr(39))[1]]!r}?"
    problem = f"unknown flag {flag}" if flag.startswith("-") else f"{flag!r} follows no flag"
    return ConfigError(problem, fix=near or f"see as2ray {name} --help")


def _exit_with(error: Exception) -> None:
    sys.stderr.write(f"{type(error).__name__}: {error}\n")
    sys.exit(2)


def from_argument_error(error: ArgumentError) -> ConfigError:
    """Converts an error of jsonargparse, which may wrap one of pydantic, to a `ConfigError`."""
    flag = re.match(r'Parser key "(.+?)":', str(error))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__cause__ or cause.__context__
    if flag and cause is not None:
        first = cause.errors(include_url=False)[0]
        return ConfigError(f"{flag[1]}={first['input']}: {first['msg']}")
    problem = str(error).partition('":\n')[2] if flag else str(error)
    if union := re.search(r"Subtypes: (\[.*?\])\n.*Given value: ([^\n]*)", problem, re.DOTALL):
        problem = f"{union[2]} is none of the types {union[1]}"
    problem = " ".join(problem.replace("typing.", "").split())
    if flag and (union or re.search(r"Expected a (?:<class|Literal\[)", problem)):
        return _wrong_type(flag[1], problem)
    if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.+)\)", problem):
        return _no_choice("subcommand: ", choice[1], choice[2])
    if subcommand := re.match(r'expected "(\w+)\.subcommand" to be one of', problem):
        return ConfigError(
            f"{subcommand[1]} needs a subcommand", f"see as2ray {subcommand[1]} --help"
        )
    if required := re.fullmatch(r"the following arguments are required: (.+)", problem):
        names = [name.strip().split(".") for name in required[1].split(",")]
        *command, _ = names[0]
        flags = ", ".join(f"--{name[-1]}" for name in names)
        return ConfigError(f"{flags} must be given", fix=f"see as2ray {' '.join(command)} --help")
    return ConfigError(f"{flag[1]}: {problem}" if flag else problem, fix="see --help")


def _no_choice(start: str, text: str, choices: str) -> ConfigError:
    """An error that names the values that are accepted, such as `'error', 'drop'`, and the nearest.

    Args:
        start: What stands before the value.
        text: The value.
        choices: Values, with commas between them; texts are in quotes.
    """
    accepted = re.findall(r"[^\s,']+", choices)
    problem = f"{start}{text} is none of {', '.join(accepted)}"
    return ConfigError(problem, fix=suggest(text, accepted) or "see --help")


def _wrong_type(flag: str, problem: str) -> ConfigError:
    """An error that names the type of a flag, and shows how a value of it is written."""
    value, names = re.split(r" is none of the types |Expected a ", problem), ""
    is_union = "is none of the types" in problem
    text = value[0] if is_union else problem.rpartition("Got value: ")[2]
    if nested := re.match(r"NestedArg\(key='(.+?)'", text):
        return ConfigError(f"unknown flag --{flag}.{nested[1]}", fix=f"did you mean '--{flag}'?")
    names = value[1] if is_union else value[1].partition(". Got value")[0]
    if choices := re.search(r"Literal\[(.+?)\]", names):
        return _no_choice(f"{flag}=", text, choices[1])
    names = re.sub(r"<class '(\w+)'>", r"\1", names).removeprefix("[").removesuffix("]")
    names = names.replace(", NoneType", " or null").replace("tuple", "list")
    example = next((e for kind, e in EXAMPLES.items() if kind in names), "")
    fix = f"write it as {example}" if example else "see --help"
    return ConfigError(f"{flag}={text} is no {names}", fix=fix)


if __name__ == "__main__":
    main()
