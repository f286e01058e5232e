"""The command `efficient-attn`: parses, calls the library once, prints."""

import sys

from efficient_attn.errors import AttentionError, naming_missing

# Exit codes.
DONE = 0
REGRESSION = 1
WRONG_REQUEST = 2
SOME_NOT_MEASURED = 3
NOTHING_MEASURED = 4
INTERRUPTED = 130


def start() -> None:
    """Run the command line. Without its packages, or with a file that is no study, exit with one line."""
    try:
        with naming_missing("The command line"):
            from .main import main

            main()
    except AttentionError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG_REQUEST)
