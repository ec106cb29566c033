"""Process of a user's stage: ``python -m staleflow.clients.user_code.group_child``, started by the runner.

User code cannot harm its worker, as for a reward (``child``).
"""

import sys
from collections.abc import Callable
from typing import Any

from staleflow.clients.user_code import pipe
from staleflow.clients.user_code.child import serve
from staleflow.clients.user_code.group import Group, WrongColumns, checked_columns
from staleflow.protocols.wire.tensors import pack, unpack
from staleflow.protocols.wire.trajectory import GroupPayload


def main() -> int:
    """Serve calls until the parent closes the pipe."""
    return serve(lambda load: noun_of(load.stage), UserFunction)


def noun_of(stage: str) -> str:
    """Return the name of a stage in messages to the operator."""
    return f"the stage {stage}"


class UserFunction:
    """A user's stage function, called with groups."""

    def __init__(self, function: Callable[..., Any], load: pipe.Load) -> None:
        self._function = function
        self._load = load

    def called(self, call: pipe.GroupCall) -> pipe.Answer:
        group = _group(call)
        return self._answer(call, group, self._function(group, **self._load.options))

    async def awaited(self, call: pipe.GroupCall) -> pipe.Answer:
        group = _group(call)
        return self._answer(call, group, await self._function(group, **self._load.options))

    def _answer(self, call: pipe.GroupCall, group: Group, returned: object) -> pipe.Answer:
        try:
            return pipe.Answer(id=call.id, packed=pack(checked_columns(group, self._load.makes, returned)))
        except WrongColumns as wrong:
            return pipe.Answer(id=call.id, error=f"{noun_of(self._load.stage)}: {wrong}")


def _group(call: pipe.GroupCall) -> Group:
    return Group.of(call.row, call.completions, GroupPayload.from_arrays(unpack(call.payload)))


if __name__ == "__main__":
    sys.exit(main())
