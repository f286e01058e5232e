"""A terminal of a test's own, and all that a command writes to it."""

import os
import struct
import subprocess
import sys


def on_a_terminal(code, *words, columns=80, **variables):
    """What a child writes to a terminal of its own."""
    import fcntl
    import pty
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {"TERM": "xterm-256color", **variables}
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=its, stdout=its, stderr=its, env=environment | settings
    )
    os.close(its)
    written = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(ours)
    child.wait()
    return written.decode()
