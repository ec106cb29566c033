"""The transport without sockets: answered later, never from inside, and not at all once a peer has left."""

from staleflow.net.endpoint import Call
from staleflow.net.memory_transport import MemoryEndpoint
from staleflow.protocols.wire.messages import Done, Ping, Reply


class Server:
    """Keeps the calls that it gets; ``deliver`` is the owner's turn."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.endpoint = MemoryEndpoint(self.calls.append, lambda answer: self._later.append(answer))
        self.heard: list[Reply] = []
        self._later: list[object] = []

    def ask(self, name: str) -> Call:
        self.endpoint.call(name, Ping(), self.heard.append)
        return self.calls[-1]

    def deliver(self) -> list[Reply]:
        later, self._later = self._later, []
        for answer in later:
            assert callable(answer)
            answer()
        return self.heard


def test_an_answer_comes_when_the_owner_says() -> None:
    server = Server()
    call = server.ask("rollout-0")
    assert (call.peer, call.done, server.endpoint.asked) == ("rollout-0", False, True)
    call.reply(Done())
    assert (call.done, server.heard) == (True, [])
    assert server.deliver() == [Done()]


def test_who_has_left_is_not_answered_and_its_calls_are_done() -> None:
    server = Server()
    answered, pending = server.ask("rollout-0"), server.ask("rollout-0")
    answered.reply(Done())
    server.endpoint.leave("rollout-0")
    pending.reply(Done())
    assert (pending.done, server.deliver(), server.endpoint.peers) == (True, [], [])


def test_who_comes_back_under_its_name_is_another_peer() -> None:
    server = Server()
    old = server.ask("rollout-0")
    server.endpoint.leave("rollout-0")
    new = server.ask("rollout-0")
    assert (old.done, new.done) == (True, False)
    new.reply(Done())
    assert server.deliver() == [Done()]
