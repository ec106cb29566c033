"""Threads of virtual processes wait in virtual time, and a killed process's threads run no further line."""

import asyncio

from staleflow.sim.faults.lockstep import Lockstep
from staleflow.sim.virtual import BEGIN_S, Conductor, Killed


def test_a_thread_that_waits_lets_time_pass_and_gets_results_and_errors() -> None:
    conductor, seen = Conductor(), list[object]()

    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("no")

    async def main() -> None:
        thread = Lockstep(process)

        def work() -> str:
            thread.sleep(2.0)
            seen.append(conductor.now_s - BEGIN_S)
            try:
                thread.until(fails())
            except ValueError as error:
                seen.append(str(error))
            return "done"

        seen.append(await thread.run(work))

    process = conductor.spawn("p", main)
    conductor.run(lambda: False)
    assert seen == [2.0, "no", "done"]
    assert process.error is None
    conductor.close()


def test_the_thread_of_a_killed_process_runs_no_line_more_until_it_is_buried() -> None:
    conductor, seen = Conductor(), list[str]()

    async def main() -> None:
        thread = Lockstep(process)

        def work() -> None:
            try:
                thread.sleep(1.0)
                seen.append("woke")
            except Killed:
                seen.append("buried")
                raise

        await thread.run(work)

    process = conductor.spawn("p", main)
    conductor.after(0.5, conductor.kill, process)
    conductor.run(lambda: False)
    assert seen == []
    conductor.close()
    assert seen == ["buried"]


def test_a_thread_is_asked_to_stop_waiting() -> None:
    conductor, seen = Conductor(), list[str]()

    class Late(Exception): ...

    async def main() -> None:
        thread = Lockstep(process)
        asyncio.get_running_loop().call_later(1.0, thread.stop_waiting)

        def work() -> None:
            try:
                thread.wait(asyncio.sleep(60.0), 2.0, Late)
            except Late:
                seen.append(f"late at {conductor.now_s - BEGIN_S}")

        await thread.run(work)

    process = conductor.spawn("p", main)
    conductor.run(lambda: conductor.now_s > BEGIN_S + 10)
    assert seen == ["late at 3.0"]
    conductor.close()
