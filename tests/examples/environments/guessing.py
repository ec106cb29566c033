# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="misc"
"""An environment of the real package ``openenv``, for tests: a guessed number, with a hint after each guess.

``serving`` runs its server, or the one of another module, in a process. A step with a number below 0 never returns.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.servers.ports import ReservedPort

MAX_GUESSES = 4
START_S = 90.0


class Serving:
    """The process of a server module. Its port stays the same if it is started again."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._reserved = ReservedPort()
        self.url = f"http://127.0.0.1:{self._reserved.number}"
        self._command = [sys.executable, "-m", module, "--port", str(self._reserved.number), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process; it serves some time later."""
        self._process = subprocess.Popen(self._command)

    def wait(self) -> None:
        """Return when the server answers."""
        from staleflow.examples.environments.openenv_session import Server, ServerError

        give_up = time.monotonic() + START_S
        while True:
            try:
                Server(self.url).schemas()
                return
            except ServerError:
                assert self._process is not None, "the server was not started"
                assert self._process.poll() is None, "the server ended"
                assert time.monotonic() < give_up, "the server does not start"
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._reserved.close()


@contextlib.contextmanager
def serving(
    module: str = "tests.examples.environments.guessing", *arguments: str, sessions: int = 64
) -> Iterator[Serving]:
    server = Serving(module, "--sessions", str(sessions), *arguments)
    try:
        server.launch()
        server.wait()
        yield server
    finally:
        server.close()


def main() -> None:
    import uvicorn
    from openenv.core import Action, Environment, Observation, State, create_app

    class Guess(Action):
        number: int

    class Hint(Observation):
        text: str = ""
        guesses: int = 0

    class Guessing(Environment[Guess, Hint, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._number, self._guesses = 0, MAX_GUESSES

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
            if seed is None:
                raise ValueError("seed is missing")
            self._number, self._guesses = seed, 0
            return Hint(text=f"{MAX_GUESSES}?")

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
            if action.number < 0:
                time.sleep(3600)
            self._guesses += 1
            right = action.number == self._number
            hint = "=" if right else "+" if action.number < self._number else "-"
            done = right or self._guesses >= MAX_GUESSES
            return Hint(text=hint, guesses=self._guesses, done=done, reward=1.0 if right else -0.25)

        @property
        def state(self) -> State:
            return State(step_count=self._guesses)

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--sessions", type=int)
    arguments = parser.parse_args()
    app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=arguments.sessions)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
