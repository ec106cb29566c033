"""A stage worker ends with its run, even without a supervisor, and not earlier."""

import asyncio
from typing import cast

import pytest

from staleflow.clients.stage.main import while_it_lasts
from staleflow.net.client import Client
from staleflow.net.errors import Unavailable
from staleflow.protocols.wire.messages import SchedulerStatus


class Scheduler:
    """Send the given replies in order; repeat the last one."""

    def __init__(self, *answers: SchedulerStatus | None) -> None:
        self._answers = list(answers)

    async def ask(self, *_: object, **__: object) -> SchedulerStatus:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise Unavailable("tcp://10.0.0.1:5551", 60.0)
        return answer


@pytest.mark.parametrize("answers", [(SchedulerStatus(finished=True),), (None,)], ids=["finished", "gone for long"])
async def test_it_ends_with_the_run(answers: tuple[SchedulerStatus | None, ...]) -> None:
    serving = asyncio.create_task(asyncio.sleep(3600.0))
    await while_it_lasts(cast(Client, Scheduler(*answers)), serving)
    assert serving.cancelled()


async def test_what_ends_the_work_before_is_raised() -> None:
    async def work() -> None:
        raise ValueError("no such group")

    with pytest.raises(ValueError, match="no such group"):
        await while_it_lasts(cast(Client, Scheduler(SchedulerStatus())), asyncio.create_task(work()))


async def test_it_goes_on_while_the_run_does() -> None:
    serving = asyncio.create_task(asyncio.sleep(3600.0))
    lasting = asyncio.create_task(while_it_lasts(cast(Client, Scheduler(SchedulerStatus())), serving))
    await asyncio.sleep(0)
    assert not lasting.done()
    lasting.cancel()
    await asyncio.wait((lasting,))
    assert serving.cancelled()
