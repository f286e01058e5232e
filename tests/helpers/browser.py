"""A page in headless Chromium, driven over a pipe of its DevTools protocol."""

import itertools
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

# File descriptors 3 and 4 of the browser are its ends of the pipes.
_START = 'read_end=$1 write_end=$2; shift 2; exec "$@" 3<&"$read_end" 4>&"$write_end"'
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")


def chromium():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A page at a width; commands wait for their answers."""

    def __init__(self, commands, answers):
        self.commands, self.answers, self.numbers, self.session = commands, answers, itertools.count(1), {}
        self.errors = []

    def send(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters, **self.session}
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while (answer := self.receive()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self):
        data = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "The browser has gone."
            data += byte
        answer = json.loads(data)
        if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(answer["params"])
        return answer

    def open(self, address, width):
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=address)
        while self.receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, script):
        """Value of an expression, of a promise when it is kept."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def mouse(self, kind, x, y):
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def click(self, x, y):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)


@contextmanager
def opened(path, width, profile):
    """The page of a file in a browser of its own."""
    (reads, commands), (answers, writes) = os.pipe(), os.pipe()
    words = ["bash", "-c", _START, "browser", str(reads), str(writes), chromium(), *_FLAGS]
    process = subprocess.Popen(
        [*words, f"--user-data-dir={profile}"], pass_fds=(reads, writes), stderr=subprocess.DEVNULL
    )
    os.close(reads)
    os.close(writes)
    with os.fdopen(commands, "wb") as written, os.fdopen(answers, "rb") as read:
        page = Page(written, read)
        try:
            page.open(path.as_uri(), width)
            yield page
        finally:
            process.terminate()
            process.wait()
