"""The command line: `as2ray corpora | rank | evaluate | cost | calibrate | serve`.

Knows jsonargparse. Must hold no logic of its own.
"""

import sys
from collections.abc import Sequence

from jsonargparse import CLI

from as2ray.commands.calibrate import calibrate
from as2ray.commands.corpora import Corpora
from as2ray.commands.cost import cost
from as2ray.commands.evaluate import evaluate
from as2ray.commands.rank import rank
from as2ray.commands.serve import serve
from as2ray.errors import As2rayError

COMMANDS = {
    "corpora": Corpora,
    "rank": rank,
    "evaluate": evaluate,
    "cost": cost,
    "calibrate": calibrate,
    "serve": serve,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `as2ray`."""
    try:
        CLI(COMMANDS, args=arguments, as_positional=False)
    except As2rayError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(2)
