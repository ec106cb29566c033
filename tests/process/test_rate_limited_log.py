"""A message that repeats does not fill the disk: its log lines are rate-limited."""

from staleflow.process.rate_limited_log import RateLimitedLog


def test_one_line_a_second_and_nothing_uncounted() -> None:
    now_s = [0.0]
    said = RateLimitedLog(lambda: now_s[0])
    assert said.due() == ""
    assert [said.due() for _ in range(1200)] == [None] * 1200
    now_s[0] = 0.999
    assert said.due() is None
    now_s[0] = 1.0
    assert said.due() == " (and 1,201 like it before)"
    assert said.due() is None
    now_s[0] = 60.0
    assert said.due() == " (and 1 like it before)"
    now_s[0] = 61.0
    assert said.due() == ""
