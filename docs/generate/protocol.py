"""The page of the wire protocol: framing, rules, and every message with its fields.

Names, types, order and most meanings come from ``staleflow.protocols.wire.messages``; fields without a docstring there
have theirs in ``FIELDS``. A field without a meaning, and a meaning without its field, is an error.
"""

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as kinds

from docs.generate.made import MADE
from staleflow.configs.loading.describe import field_docs
from staleflow.net.limits import TransportLimits
from staleflow.net.permissions import OPS, VERBS, Role
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import Segment
from staleflow.protocols.wire.messages import PROTOCOL, Command, Op, Reply, Request
from staleflow.protocols.wire.messages.status import Status
from staleflow.protocols.wire.tensors import DTYPES

LIMITS = TransportLimits()

ABOUT = f"""\
Everything between the processes of a run is a request and its reply over ZeroMQ, so a worker can be written in any
language that has ZeroMQ and msgpack. In Python, [RolloutClient and StageClient](python.md#bring-your-own-engine) are
less work. This page describes protocol {PROTOCOL}. `tests/process/plain_client.py` is a rollout worker of about 150
lines that uses this page, `pyzmq` and `msgpack` only, and nothing of staleflow; a test runs it in a real run.

## A message

A client is a DEALER socket, a server a ROUTER socket. One server has one address; the scheduler's is `scheduler.bind`,
or `sock/scheduler` in the run directory. `AttachReply` has the others.

- The routing id of the DEALER is `WORKER/NONCE`. `WORKER` is the id of the process, `NAME.SUFFIX`, where the suffix is
  new at each start; use the same id at every server. The nonce is random: a connection with the same route would
  receive the replies.
- The first frame of a message is the header, the msgpack array `[protocol, id, body]`. Other frames are raw arrays,
  little-endian and in C order, in the order in which the body describes them.
- `id` is chosen by the client, and its reply has the same. Replies arrive in any order. Send a request that got no
  reply for a second or two again with the same id: every request is idempotent.
- `body` is an array, `[tag, field, field, ...]`, with the fields in the order of the tables below. Trailing optional
  fields may be left out. Parts, such as `TensorSpec`, are arrays without a tag.
- Both sides must use the same `protocol`; another one is refused before anything else is read.
- A message has at most {LIMITS.max_message_bytes >> 20} MiB, {LIMITS.max_header_bytes >> 20} MiB of header and
  {LIMITS.max_frames:,} frames. A connection has at most {LIMITS.max_pending:,} unanswered requests.
- Send something every second, `Ping` if nothing else: after {LIMITS.missed} silent seconds a server considers a peer
  gone. A client that receives nothing for as long opens a new socket.
- With keys, the socket uses CURVE and the key decides which requests are allowed ([Security](security.md)).

Any request may be answered with `Refusal`. `busy` is temporary: repeat the request after `retry_after_ms`. Other codes
are final; [Refusals](operations.md#refusals) explains each: {", ".join(f"`{code}`" for code in Code)}. A server answers
a header that it cannot read with a refusal of id 0.

Arrays: `TensorSpec` names an array, and its frame has exactly the bytes of dtype and shape. Dtypes are
{", ".join(f"`{name}`" for name in DTYPES)} (`bfloat16` is sent as its bits).

## A rollout worker, step by step

1. `Attach` to the scheduler with role `rollout` and a `capacity`. Repeat it until every entry of `shards` is set.
2. Keep one `Report` open at the scheduler. Its reply is `Commands`, at once or after `wait_ms`. Carry out commands
   with a number above the last `ack`, then report again with the new `ack`. Each report renews the leases in `held`.
3. `Pull`: get the weights (`GetManifest` at the parameter server, then the file at `path`, or `GetChunk`), load them,
   `Unpin`, send `Pulled` with the manifest's `sha`, and report the version in `stats` from then on.
4. `Assign`: request the prompt row from the shard (`GetRows`), generate `rollout.group_size` samples with a version
   that is at least the command's, and send `PushGroups` to the same shard. Its reply is `Results`: `code` None means
   that the group is durable and registered. `stale_lease` and `stale` mean that it was discarded.
5. A group that cannot be generated is given back: `Operations` with a `RegisterRelease`, `why` `aborted`.
6. `Interrupt`: push the tokens so far, with `truncated`. `Abort`: discard the lease. `Evaluate` is sent to
   workers only whose `Attach` had `eval_prompts`.
7. `Yield`: hand the group over, or ignore the order. Send all started samples to the shard (`PutPartial`), then
   `Operations` with a `RegisterYield`. A worker may also do so without an order, with `any_target`: `busy` then
   means that no worker has a free place yet. Without success the lease is unchanged. A worker that gets an
   `Assign` with `partial` requests those samples with `GetRows` and continues them, or starts over; their tokens keep
   their versions.
8. `Detach` when the worker leaves. `Commands` with `drain` means: finish, then leave.

A push has these arrays, for n samples with T tokens in all (completions one after another):

| array | type | content |
|---|---|---|
| `prompt_ids` | int32 [P] | token ids of the prompt |
| `lengths` | int32 [n] | tokens of each completion |
| `token_ids` | int32 [T] | token ids of all completions |
| `logprobs` | float32 [T] | log-probability of each token in the distribution that it was sampled from |
| `loss_mask` | uint8 [T] | 1; 0 for tokens that an environment wrote |
| `segments` | int64 [S, 4] | rows (sample, lineage, version, tokens): consecutive tokens that one version wrote |
| `finish` | uint8 [n] | 0 stop, 1 length, 2 interrupted |
| `token/NAME` | as declared, [T, …] | `[[column]]` with `per = "token"`: values of the completion tokens, no prompt |
| `sample/NAME` | as declared, [n, …] | `[[column]]` with `per = "sample"` |
| `sample/NAME` | uint8 [B] | `[[column]]` with `dtype = "bytes"`: the byte strings of all samples, joined |
| `sample/NAME:sizes` | int64 [n] | their sizes in bytes |

The last four are the [columns that the run declares](python.md#columns-of-your-own). A push that lacks a required
one, has one that is not declared, or one of another dtype or shape is refused with `malformed`, and one with a byte
string that is too long with `oversize`; the detail names the column, the expected type and the received one. Other
groups of the message are unaffected. Samples that move to another instance have the same arrays, with 0 or nothing
where there is no value yet.
"""

FIELDS = {
    "attempt": "number of this delivery of the batch to this rank, from 1",
    "base_lineage": "lineage of the base",
    "base_version": "version that the reader has",
    "batch": "batch id; None: version 0",
    "code": "reason, one of the refusal codes; None in a result: success",
    "commands": "numbered `first`, `first` + 1, …",
    "config_sha": "hex SHA-256 of the settings that all processes of the run share",
    "count": "number of further groups to wait for",
    "detail": "reason in words",
    "digest": "hex SHA-256 over the members",
    "dtype": "name of the dtype",
    "endpoint": "address at which the relay is reached",
    "endpoints": "addresses of relays",
    "error": "empty, or the reason of the failure",
    "failures": "number of groups failed in a row",
    "first": "number of the first command; they count from 1",
    "frames": "one entry for each array frame of this item, in order",
    "group": "group id",
    "groups": "group ids; in `Groups` the groups themselves",
    "host": "kernel boot id of the host",
    "items": "one entry for each group",
    "keep": "groups to keep; for a checkpoint the number of checkpoints to keep",
    "known": "limits that the shard has; None: none yet",
    "lease": "lease number, the fencing token of the group",
    "lease_ms": "time without a report after which leases expire",
    "lineage": "number of the surviving history of the run",
    "loads": "one entry for each stage",
    "manifest": "names, places and digests of the tensors",
    "max_groups": "maximum number of groups in the reply",
    "members": "groups of the batch in training order",
    "model": "limits of the trained model",
    "name": "name of the process, or of the array",
    "nbytes": "size in bytes",
    "offset": "position in bytes",
    "ok": "true: loaded; false: the load failed",
    "ops": "operations, applied in order",
    "partial": "header of the samples so far; their arrays are the frames",
    "path": "file to write into, if it is on the publisher's host",
    "pid": "process id, for display",
    "place": "place of the packed payload in a slab; None: it is in a frame",
    "rank": "rank of the trainer, from 0",
    "results": "one entry for each item of the request",
    "retry_after_ms": "time after which to repeat a `busy` request",
    "row": "columns of the prompt's row",
    "rows": "prompt rows; in requests about features their numbers",
    "run": "identity of the run",
    "segments": "[lineage, version, tokens] of all samples together, ascending",
    "sequence_tokens": "prompt and completion tokens of all samples",
    "sha": "hex SHA-256 of the payload, or of the manifest's entries",
    "shape": "dimensions",
    "shard": "number of the trajectory server",
    "shas": "hex SHA-256 of each group's payload",
    "slab": "name of the slab",
    "stage": "name of the stage",
    "stats": "numbers of the engine; `lineage` and `version` are those loaded",
    "step": "train step; step k consumes batch k and publishes version k + 1",
    "tensors": "the tensors in the order of their bytes",
    "ticket": "number that fences a stage worker which lost the group",
    "trainer": "id of the trainer's process",
    "trainer_term": "fencing number that `JoinReply` gave",
    "truncated": "whether an interrupt cut any sample",
    "upload": "number of the upload",
    "values": "numbers by name",
    "version": "version of the weights; 0 is the initial model",
    "versions": "[lineage, version] of each",
    "wait_ms": "maximum time until the reply",
    "why": "reason",
    "width": "bytes of one element",
    "worker": "id of the sending process, as in its routing id; in `StageFailing` the failing one",
    "after": "group id; groups above it are returned",
    "oldest": "oldest version that is kept",
}
"""Meaning of the fields without a docstring, by name."""


def protocol() -> Iterator[str]:
    """Return the lines of the page."""
    unused = set(FIELDS)
    yield from ("# The wire protocol", "", MADE, "", *ABOUT.splitlines())
    for title, union, sent in (
        ("Requests", Request, True),
        ("Commands", Command, False),
        ("Operations", Op, True),
        ("Replies", Reply, False),
    ):
        yield from ("", f"## {title}", "")
        if title == "Commands":
            yield from ("The members of `Commands`, tagged like messages.", "")
        if title == "Operations":
            yield from ("The members of `Operations`, tagged like messages.", "")
        for cls in get_args(union):
            yield from _message(cls, unused, sent=sent)
    yield from ("", "## Parts", "", "Arrays without a tag.", "")
    for cls in _parts():
        yield from _message(cls, unused, sent=False)
    assert not unused, f"no message has these fields: {sorted(unused)}"


def _message(cls: type[Struct], unused: set[str], *, sent: bool) -> Iterator[str]:
    info = kinds.type_info(cls)
    assert isinstance(info, kinds.StructType)
    yield from (f"### {cls.__name__}", "", _markdown(inspect.getdoc(cls) or f"Reply or part: {cls.__name__}."), "")
    if sent:
        roles = VERBS.get(cls) or OPS[cls]
        yield from (f"Sent by: {'any role' if roles == frozenset(Role) else ', '.join(sorted(roles))}.", "")
    if issubclass(cls, Status) and cls is not Status:
        yield from ("Its fields are those of `staleflow status --json`, in the same order.", "")
        return
    if not info.fields:
        return
    docs = field_docs(cls)
    yield from ("| place | field | type | default | meaning |", "|---|---|---|---|---|")
    first = 0 if info.tag is None else 1
    for place, field in enumerate(info.fields, start=first):
        if not (meaning := docs.get(field.name, "")):
            meaning = FIELDS[field.name]
            unused.discard(field.name)
        text = _markdown(meaning).replace("\n\n", " ").replace("|", "\\|")
        yield f"| {place} | `{field.name}` | {_type(field.type)} | {_default(field)} | {text} |"
    yield ""


def _parts() -> list[type[Struct]]:
    """Return the parts of all messages in the order of their first use."""
    found: dict[type[Struct], None] = {}
    members = {cls for union in (Request, Command, Op, Reply) for cls in get_args(union)}

    def visit(kind: kinds.Type) -> None:
        match kind:
            case kinds.StructType(cls=cls, fields=fields):
                if issubclass(cls, Status) or cls in found:
                    return
                if cls not in members:
                    found[cls] = None
                for field in fields:
                    visit(field.type)
            case kinds.ListType(item_type=item):
                visit(item)
            case kinds.UnionType(types=types):
                for one in types:
                    visit(one)
            case _:
                pass

    for union in (Request, Reply):
        for cls in get_args(union):
            visit(kinds.type_info(cls))
    return list(found)


def _default(field: kinds.Field) -> str:
    if field.default is not NODEFAULT:
        return f"`{field.default!r}`" if not isinstance(field.default, str) else f'`"{field.default}"`'
    if field.default_factory is NODEFAULT:
        return ""
    value: Any = field.default_factory()
    return f"`{msgspec.to_builtins(value)!r}`"


def _type(kind: kinds.Type) -> str:
    match kind:
        case kinds.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case kinds.UnionType(types=types):
            return " or ".join(dict.fromkeys(_type(one) for one in types))
        case kinds.ListType(item_type=item):
            return f"array of {_type(item)}"
        case kinds.TupleType(item_types=items):
            return f"[{', '.join(_type(item) for item in items)}]"
        case kinds.VarTupleType(item_type=item):
            return f"array of {_type(item)}"
        case kinds.DictType(value_type=value):
            return f"map of string to {_type(value)}"
        case kinds.EnumType():
            return "string"
        case kinds.LiteralType():
            return "string"
        case kinds.NamedTupleType(cls=cls):
            assert cls is Segment
            return "[integer, integer, integer]"
        case _:
            return _NAMES[type(kind)]


_NAMES: dict[Any, str] = {
    kinds.AnyType: "any",
    kinds.BoolType: "boolean",
    kinds.BytesType: "bytes",
    kinds.FloatType: "float",
    kinds.IntType: "integer",
    kinds.NoneType: "nil",
    kinds.StrType: "string",
}


def _markdown(text: str) -> str:
    """Convert the double backquotes of docstrings, and flatten their lines."""
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(paragraphs).replace("``", "`").replace("-> ", "→ ")
