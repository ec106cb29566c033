"""The page of the trace: every event of ``trace.jsonl`` with its fields, types and units.

Names, types and order come from ``staleflow.trace.events``, meanings from the tables below. An event or a field without
a meaning, and a meaning without its field, is an error, so that the page stays complete.
"""

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from msgspec import inspect

from docs.generate.made import MADE
from staleflow.protocols.consistency.effects import Code
from staleflow.trace.audit.state import Rule
from staleflow.trace.events import SCHEMA, AnyEvent

ABOUT = f"""\
`trace.jsonl` in the run directory records every decision of the scheduler. It is sufficient to audit a run: this page
lists every event and field, and [The consistency protocol](consistency.md) defines the rules. `staleflow trace check`
is one auditor; the format is stable, so that anyone can write another.

## File format

- One compact JSON object per line, in UTF-8. A line feed ends each line.
- The scheduler commits a line to its store in the same transaction as the state change. The file may lag the store
  but does not lead it, except after a power failure without `durability = "power"`. Nothing deletes or rotates lines.
- The trace continues across restarts of the scheduler. Each start is an incarnation and begins with an `open` line.
- Readers accept unknown events and unknown fields of known events. `schema` rises when a field changes; it is
  {SCHEMA}.
- A field of type *integer* lies between -2^50 and 2^50, so that a 64-bit float holds it exactly; a *number* lies
  between 0 and 2^50. Exceptions: `t`, `m`, `bytes`, `shard`, and the values that a peer reported (`pull`, `reject`)
  may be any 64-bit integer.

Every line starts with the common fields, in this order. The fields of its event follow, in the order of the tables
below, and `h` is the last field:

| field | type | unit | meaning |
|---|---|---|---|
| `schema` | integer | | {SCHEMA} |
| `run` | string | | identity of the run; the same in every line |
| `inc` | integer | | incarnation of the scheduler, from 1; `open` raises it by 1 |
| `seq` | integer | | line number, contiguous from 1 across incarnations |
| `t` | integer | ns | Unix time; a label for readers, not an order |
| `m` | integer | ns | monotonic clock; never decreases within an incarnation, not comparable between incarnations |
| `ev` | string | | name of the event |
| `h` | string | | hash chain: 16 hex digits |

`h` is the first 16 hex digits of SHA-256 over the previous line's `h` in ASCII, followed by the bytes of this line
before `,"h":`. For the first line the previous `h` is sixteen zeros. Checked by a few lines of Python:

```python
import hashlib
from pathlib import Path


def check_chain(trace: Path) -> None:
    previous = "0" * 16
    for line in trace.read_bytes().splitlines():
        body, _, ending = line.rpartition(b',"h":"')
        previous = hashlib.sha256(previous.encode() + body).hexdigest()[:16]
        assert ending == previous.encode() + b'"}}'
```

## Order of events

- The first line is `open`. The first `publish` is version 0 and precedes the first `reserve`.
- A group moves `reserve`, `push`, `occupy`, `seal`, `consume`. `release` ends a leased or pushed group, `drop` an
  occupied one.
- The `publish` of version s + 1 follows the `consume` of step s on the next line, in the same transaction.
- A step that is ready is sealed in the transaction that made it ready, once a trainer has joined.
- `rollback` is followed by the releases, drops and promotions that it causes, and, if the next step was sealed before,
  by the `seal` of the same batch under a new id.
- A restart changes no group, batch or version: `recovered` of `open` equals the state after the preceding lines.
- The `version` of a group is its oldest version: `reserve` fixes it, and no segment of the `push` is below it.

## State that an auditor derives

- The current lineage and version are those of the last `publish` or `rollback` (`lineage`, `to_version`). The next step
  to seal is one above the last `seal`; `rollback` sets it to `to_version`, `unseal` to the step of its batch.
- To check whether a version of a lineage survives, start at the current lineage with the current version as the limit.
  Follow the rollbacks back (`lineage` to `from_lineage`), lowering the limit to `to_version` at each, until the lineage
  is reached. The version survives if it is at most the limit. A lineage that is never reached is abandoned.
- `rollback` and `unseal` return the members of batches from that step on to occupied, in their old order, and undo all
  claims. Groups with any token of a version that does not survive then leave as `release` or `drop`, `rollback`.
- The batch of step k can be sealed again as long as a kept checkpoint has a version ≤ k: `checkpoint` discards consumed
  batches of steps below its `version`.
- `tokens` of a `seal` is the sum over the segments of its members. `masked_tokens` counts the segments with
  `version` < `step` - `max_staleness`; under the trajectory bound no member has such a segment.
- Outside a rollback, reserves = releases + occupies + leased + pushed, and occupies = drops + occupied + sealed +
  consumed, after every line.
"""

EVENTS = {
    "open": "An incarnation of the scheduler starts.",
    "auth": "A process requested to attach, or a handshake failed. At most one line per second and peer.",
    "attach": "A process attached, or returned after silence.",
    "detach": "A process left, was replaced, or fell silent. Leases of a silent worker last until they expire.",
    "publish": "A version of the weights is published. Versions are dense: each is the previous one plus 1.",
    "pull": (
        "A rollout worker reported that it loaded, or failed to load, a published version. Each newer version has its "
        "own line; failures and repeats have at most one line per second and worker."
    ),
    "join": "A trainer joined and fenced every older term.",
    "rollback": "A trainer resumed from an older checkpoint; later versions are abandoned.",
    "reserve": "A group is leased to a worker.",
    "promote": "An occupied spare becomes a counted group, in a free place or in that of `demoted`.",
    "push": "The payload of a group is durable.",
    "occupy": "All stages of a group are done; it is ready to train.",
    "release": (
        "A leased or pushed group is given up. Its id may return, except after `filtered`, `surplus` or repeated "
        "failures."
    ),
    "drop": "An occupied group is given up. Its id is never leased again.",
    "seal": (
        "A batch is fixed for a step: claimed groups first, then by deadline (trajectory bound), then by order of "
        "occupation."
    ),
    "claim": "An occupied group is fixed as the next member of a batch that is not sealed yet (streaming).",
    "unseal": "A sealed batch, and every later one, is dissolved; its members are occupied again.",
    "deliver": "A rank of the trainer was given a batch, or the first micro-batch of one.",
    "consume": "A step is committed. The publish of the new version follows.",
    "checkpoint": "A checkpoint is registered. Payload of steps before the oldest kept checkpoint may be deleted.",
    "reject": "A request was refused and changed nothing. At most one line per second, peer and code.",
    "overload": "New work is refused because a resource is exhausted, or is accepted again.",
    "close": "An incarnation ends in an orderly way. A killed one has no `close`.",
}

FIELDS = {
    "attempt": ("", "1 for the first delivery of this batch to this rank, then 2, 3, …"),
    "batch": ("", "batch id; strictly increasing from 1, never reused: a batch that is sealed again has another id"),
    "batch_size": ("groups", "groups of a batch"),
    "bound": ("", "what the bound applies to: every token of a group, or only trained tokens (older ones are masked)"),
    "checkpoint": ("", "checkpoint that the trainer starts from"),
    "code": ("", f"refusal code: {', '.join(f'`{code}`' for code in Code)}"),
    "config_sha": ("", "hex SHA-256 of the settings that all processes of this session share"),
    "count": ("", "number of requests that the line stands for"),
    "deadline": ("step", "last step that may train the group: `version` + `max_staleness`; null under the token bound"),
    "demoted": ("", "leased group that becomes a spare in exchange"),
    "digest": (
        "",
        "hex SHA-256 over the lines `group lease lineage version sha` of the members, each ended by a line feed",
    ),
    "from_lineage": ("", "lineage before the rollback"),
    "group": ("", "group id: epoch * rows + row of the prompt source"),
    "group_size": ("trajectories", "trajectories of a group"),
    "lease": ("", "lease number; strictly increasing, never reused: the fencing token of the group"),
    "lease_ms": ("ms", "time after the last heartbeat at which a lease expires"),
    "limit": ("share", "share at which overload starts"),
    "lineage": ("", "number of the surviving history; a rollback raises it by 1"),
    "masked_tokens": ("tokens", "tokens of the members that are too old to train (token bound), else 0"),
    "max_staleness": ("versions", "the bound"),
    "members": ("", "groups of the batch, in training order"),
    "min_trainable": ("share", "smallest share of trainable tokens of a group (token bound)"),
    "ok": ("", "whether the worker loaded the version"),
    "on": ("", "true at the start of the overload, false at its end"),
    "on_overdue": ("", "policy for groups that pin the step which the trainer waits for"),
    "op": ("", "refused operation: a verb of the ledger, `push`, `pull`, `message`, or the name of a request"),
    "occupied": ("groups", "groups in state occupied"),
    "protocol": ("", "version of the wire protocol"),
    "rank": ("", "rank of the trainer"),
    "recovered": ("", "state that this incarnation read from the store"),
    "reserved": ("groups", "groups that are leased or pushed"),
    "resource": ("", "the exhausted resource; `failing` is a disk with input/output errors"),
    "role": ("", "declared role: `rollout`, `stage`, `trainer`, `trajectories`, `parameters`, `relay`, `monitor`"),
    "segments": ("", "tokens by version, of all samples together, in ascending order of version"),
    "sha": (
        "",
        "digest of the payload: `blake3:` and 64 hex digits; of earlier releases, 64 hex digits of SHA-256",
    ),
    "shard": ("", "trajectory server with the payload"),
    "spare": ("", "true: the group is redundant and not counted until a `promote`"),
    "step": ("step", "step k consumes batch k and publishes version k + 1"),
    "to_version": ("version", "version of the checkpoint; the next step to seal is the one of the same number"),
    "tokens": ("tokens", "sampled tokens that are lost; 0 for a group without a push"),
    "trainer": ("", "name of the trainer process"),
    "trainer_term": ("", "fencing number of the trainer; each join raises it; only the newest may act"),
    "truncated": ("", "whether any sample was truncated"),
    "used": ("share", "used share of the resource"),
    "version": ("version", "version of the weights: the number of committed steps; 0 is the initial model"),
    "why": ("", "reason: see [Refusals](operations.md#refusals)"),
    "worker": ("", "name of the process, unique to its lifetime: a name and a nonce"),
    # fields whose meaning differs from event to event
    "checkpoint.version": ("version", "version of the oldest checkpoint that is kept: no rollback goes below it"),
    "checkpoint.lineage": ("", "lineage of the oldest checkpoint that is kept"),
    "auth.ok": ("", "whether the process was accepted"),
    "peer": ("", "name of the process on the connection; after a failed handshake its address"),
    "auth.role": ("", "declared role; empty after a failed handshake"),
    "auth.why": ("", "why the process was refused; empty when `ok`"),
    "attach.why": ("", "empty, or the reason of a return after silence"),
    "detach.why": ("", "`goodbye` or the process's own reason, `silent`, or `replaced by` and the successor"),
    "join.checkpoint.lineage": ("", "lineage of that checkpoint"),
    "publish.bytes": ("bytes", "size of the weights"),
    "publish.sha": ("", "hex SHA-256 over the entries of the manifest, with the digest of each tensor"),
    "push.bytes": ("bytes", "size of the payload"),
    "seal.tokens": ("tokens", "sampled tokens of all members"),
    "close.why": ("", "why the incarnation ended, for example `finished`, `drained` or a signal"),
    "pull.lineage": ("", "lineage as the worker reports it; any 64-bit integer"),
    "pull.version": ("version", "version as the worker reports it; any 64-bit integer"),
    "pull.sha": ("", "`sha` of the loaded version; may be empty when not `ok`"),
    "reject.group": ("", "group as the peer named it; any 64-bit integer"),
    "reject.lease": ("", "lease as the peer named it; any 64-bit integer"),
    "reject.worker": ("", "worker as the peer named it, else the peer"),
    "reserve.version": ("version", "oldest version of the group: the version at which it is leased"),
    "open.recovered.last_seq": ("", "`seq` of the last line before this one"),
    "open.recovered.sealed": ("groups", "groups that are sealed"),
    "open.recovered.version": ("version", "newest published version; -1 before version 0"),
    "push.segments.tokens": ("tokens", "sampled tokens that this version wrote"),
    "seal.members.version": ("version", "oldest version of the group"),
    "seal.members.sha": ("", "digest of the group's push"),
}
"""Unit and meaning of a field, by its name, or by ``event.field`` where that differs from event to event."""


def trace() -> Iterator[str]:
    """Return the lines of the page."""
    unused = set(FIELDS)
    yield from ("# The trace", "", MADE, "", *ABOUT.splitlines(), "", "## Events", "")
    for kind in get_args(AnyEvent):
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        name = str(info.tag)
        yield from (f"### `{name}`", "", EVENTS[name], "", "| field | type | unit | meaning |", "|---|---|---|---|")
        yield from _rows(info, name, "", unused)
        yield ""
    assert not unused, f"no event has these fields: {sorted(unused)}"
    yield from (
        "## Rules",
        "",
        "`staleflow trace check` verifies the chain, the numbering, the types, and these rules. A report lists how",
    )
    yield from ("often each had something to check, and names the rules that had nothing to check.", "")
    yield from ("| rule | meaning |", "|---|---|", *(f"| `{rule.name}` | {rule.value} |" for rule in Rule))


def _rows(info: inspect.StructType, owner: str, prefix: str, unused: set[str]) -> Iterator[str]:
    for field in info.fields:
        name = field.encode_name
        key = f"{owner}.{name}" if f"{owner}.{name}" in FIELDS else name
        unit, meaning = FIELDS[key]
        unused.discard(key)
        optional = "" if field.required else ", optional"
        yield f"| `{prefix}{name}` | {_type(field.type)}{optional} | {unit} | {meaning} |"
        inner, mark = field.type, "."
        if isinstance(inner, inspect.ListType):
            inner, mark = inner.item_type, "[]."
        if isinstance(inner, inspect.StructType):
            yield from _rows(inner, f"{owner}.{name}", f"{prefix}{name}{mark}", unused)


def _type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(_type(one) for one in types if not _is_unset(one))
        case inspect.EnumType(cls=cls):
            return "string: " + ", ".join(f"`{member.value}`" for member in cls)
        case inspect.LiteralType(values=values):
            return "string: " + ", ".join(f"`{value}`" for value in values)
        case inspect.ListType(item_type=item):
            return f"array of {_type(item)}s"
        case inspect.IntType(ge=ge):
            return "integer ≥ 1" if ge == 1 else "integer"
        case inspect.FloatType(ge=ge):
            return "number ≥ 0" if ge == 0 else "number"
        case _:
            return _NAMES[type(kind)]


_NAMES: dict[Any, str] = {
    inspect.BoolType: "boolean",
    inspect.StrType: "string",
    inspect.StructType: "object",
    inspect.NoneType: "null",
}


def _is_unset(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.CustomType) and kind.cls is msgspec.UnsetType
