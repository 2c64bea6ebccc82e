"""The command line `as2ray`: parses arguments with jsonargparse and reports errors."""

import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence

os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # Read when pydantic is imported.

from jsonargparse import CLI
from pydantic import ValidationError

from as2ray.cli.ask import ask
from as2ray.cli.calibrate import calibrate
from as2ray.cli.cascade import cascade
from as2ray.cli.convert import convert
from as2ray.cli.corpora import Corpora
from as2ray.cli.cost import cost
from as2ray.cli.evaluate import evaluate
from as2ray.cli.export import export
from as2ray.cli.index import index
from as2ray.cli.info import info
from as2ray.cli.quantize import quantize
from as2ray.cli.rank import rank
from as2ray.cli.serve import serve
from as2ray.cli.store import StoreCommands
from as2ray.cli.stream import stream
from as2ray.errors import As2rayError, ConfigError, from_validation_error

COMMANDS = {
    "corpora": Corpora,
    "index": index,
    "ask": ask,
    "rank": rank,
    "evaluate": evaluate,
    "cost": cost,
    "calibrate": calibrate,
    "cascade": cascade,
    "quantize": quantize,
    "info": info,
    "export": export,
    "convert": convert,
    "store": StoreCommands,
    "stream": stream,
    "serve": serve,
}

POSITIONAL_FLAGS = {"index": "--documents", "ask": "--question"}
"""Flag that the first argument of a command fills, as in `as2ray ask "..."`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line `as2ray`.

    Args:
        arguments: The command line; by default this process's.
    """
    flags = list(sys.argv[1:] if arguments is None else arguments)
    if flags[:1] and flags[0] in POSITIONAL_FLAGS and flags[1:] and not flags[1].startswith("-"):
        flags.insert(1, POSITIONAL_FLAGS[flags[0]])
    try:
        CLI(COMMANDS, args=flags, as_positional=False, exit_on_error=False)
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
    return ConfigError(f"{flag[1]}: {problem}" if flag else problem, fix="see --help")


if __name__ == "__main__":
    main()
