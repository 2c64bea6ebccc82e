"""The command line `as2ray`: one command for each file of `commands`.

Knows jsonargparse, and pydantic, which checks settings. Must hold no logic of its own.
"""

import os
import sys
from collections.abc import Sequence

from jsonargparse import CLI
from pydantic import ValidationError

from as2ray.cli.ask import ask
from as2ray.cli.calibrate import calibrate
from as2ray.cli.convert import convert
from as2ray.cli.corpora import Corpora
from as2ray.cli.cost import cost
from as2ray.cli.evaluate import evaluate
from as2ray.cli.export import export
from as2ray.cli.index import index
from as2ray.cli.rank import rank
from as2ray.cli.serve import serve
from as2ray.errors import As2rayError
from as2ray.serving.settings import from_validation_error

COMMANDS = {
    "corpora": Corpora,
    "index": index,
    "ask": ask,
    "rank": rank,
    "evaluate": evaluate,
    "cost": cost,
    "calibrate": calibrate,
    "export": export,
    "convert": convert,
    "serve": serve,
}

POSITIONAL_FLAGS = {"index": "--source", "ask": "--question"}
"""Of commands that are given one thing first, as in `as2ray ask "..."`, the flag that it fills."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `as2ray`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in POSITIONAL_FLAGS and given[1:] and not given[1].startswith("-"):
        given.insert(1, POSITIONAL_FLAGS[given[0]])
    try:
        CLI(COMMANDS, args=given, as_positional=False)
        sys.stdout.flush()
    except BrokenPipeError:  # who read has what they wanted, as `head` has
        # Python flushes once more when it ends, and would tell of the pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (As2rayError, ValidationError, OSError) as found:
        error = from_validation_error(found) if isinstance(found, ValidationError) else found
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
