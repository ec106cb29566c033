"""When to try again: exponential, capped, jittered."""

from tenacity import RetryCallState, Retrying, wait_random_exponential


class Backoff:
    """Delays drawn between ``base_s`` and twice it, then four times it, ... never above ``cap_s``."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._state = RetryCallState(Retrying(), None, (), {})
        self._wait = wait_random_exponential(multiplier=2 * base_s, min=base_s, max=max(cap_s, base_s))

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait after attempt number ``attempt``, from 1."""
        self._state.attempt_number = attempt
        return self._wait(self._state)
