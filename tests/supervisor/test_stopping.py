"""Signals become flags, on systems that have signals."""

import signal
import threading

from staleflow.supervisor.stopping import StopSignals


def test_the_first_signal_and_the_second_are_flags_and_afterwards_all_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert not stop.wait(0)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.wait(0), stop.second.is_set()) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert stop.second.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_of_a_notebook_can_wait_and_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def wait() -> None:
        with StopSignals() as stop:
            seen.extend((stop.wait(0), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [False, before]


def test_a_closed_terminal_asks_as_sigterm_does_unless_that_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, too
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.wait(0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.wait(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
