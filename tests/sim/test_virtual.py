"""A killed virtual process does nothing more, a stopped one does its work late, and the order is deterministic."""

import asyncio

from staleflow.sim.virtual import BEGIN_S, Conductor


def test_a_killed_process_runs_no_line_more_not_even_its_last_will() -> None:
    conductor, said = Conductor(), list[str]()

    async def main() -> None:
        try:
            await asyncio.sleep(1.0)
            said.append("woke")
        finally:
            said.append("finally")

    process = conductor.spawn("p", main)
    conductor.after(0.5, conductor.kill, process)
    conductor.run(lambda: False)
    assert (said, process.alive, process.error) == ([], False, None)
    conductor.close()
    assert said == ["finally"]  # during cleanup, after the last observation


def test_a_stopped_process_does_late_what_fell_due() -> None:
    conductor, woke = Conductor(), list[float]()

    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            woke.append(asyncio.get_running_loop().time() - BEGIN_S)

    process = conductor.spawn("p", main)
    conductor.after(1.5, conductor.stop, process)
    conductor.after(5.0, conductor.resume, process)
    conductor.run(lambda: False)
    assert woke == [1.0, 5.0, 6.0]
    conductor.close()


def test_an_error_ends_the_process_that_made_it_and_no_other() -> None:
    conductor, done = Conductor(), list[str]()

    async def fails() -> None:
        await asyncio.sleep(0.1)
        raise ValueError("no")

    async def works() -> None:
        await asyncio.to_thread(done.append, "thread")
        await asyncio.sleep(1.0)
        done.append("end")

    failed, worked = conductor.spawn("a", fails), conductor.spawn("b", works)
    conductor.run(lambda: False)
    assert (str(failed.error), worked.error, done) == ("no", None, ["thread", "end"])
    conductor.close()


def test_an_error_in_a_callback_ends_its_process() -> None:
    conductor = Conductor()

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.1, lambda: 1 // 0)
        await asyncio.sleep(1.0)

    process = conductor.spawn("p", main)
    conductor.run(lambda: False)
    assert (type(process.error), process.alive) == (ZeroDivisionError, False)
    conductor.close()
