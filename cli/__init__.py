"""The command `efficient-attn`: parses, calls the library once, prints."""

import sys

from efficient_attn.errors import MissingPackageError, naming_missing

# Exit codes.
DONE = 0
REGRESSION = 1
WRONG_REQUEST = 2
SOME_NOT_MEASURED = 3
NOTHING_MEASURED = 4
INTERRUPTED = 130


def start() -> None:
    """Run the command line; without its packages, exit with one line that names the first."""
    try:
        with naming_missing("The command line"):
            from .main import main

            main()
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG_REQUEST)
