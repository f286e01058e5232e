"""The command line in this process."""

import contextlib
import io

import pytest

from efficient_attn_cli.main import main


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()
