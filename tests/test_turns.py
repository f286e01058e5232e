"""Turns of the tests themselves."""

import threading
import time

import pytest
from turns import fcntl, turn


@pytest.mark.skipif(fcntl is None, reason="needs the locks of Unix")
def test_a_serial_test_waits_for_running_ones_and_holds_back_later_ones(tmp_path):
    order, begun = [], {name: threading.Event() for name in ("first", "serial")}

    def run(name, *, alone, until=None):
        with turn(tmp_path, alone=alone):
            order.append(f"{name} begins")
            begun.get(name, threading.Event()).set()
            if until is not None:
                until.wait()
            order.append(f"{name} ends")

    release = threading.Event()
    threads = [threading.Thread(target=run, args=("first",), kwargs={"alone": False, "until": release})]
    threads[0].start()
    begun["first"].wait()
    threads.append(threading.Thread(target=run, args=("serial",), kwargs={"alone": True}))
    threads[1].start()
    # The gate is closed as soon as the serial test waits behind it.
    with open(tmp_path / "gate", "w") as gate:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            fcntl.flock(gate, fcntl.LOCK_UN)
        else:
            release.set()
            pytest.fail("the serial test does not hold the gate")
    threads.append(threading.Thread(target=run, args=("later",), kwargs={"alone": False}))
    threads[2].start()
    assert order == ["first begins"]
    release.set()
    for thread in threads:
        thread.join()
    assert order == [
        "first begins",
        "first ends",
        "serial begins",
        "serial ends",
        "later begins",
        "later ends",
    ]
