# pyright: basic, reportMissingTypeStubs=false
"""A rollout worker in plain pyzmq and msgpack, written from docs/protocol.md. It imports nothing of staleflow.

``python plain_client.py SCHEDULER PROTOCOL GROUPS`` attaches, pushes GROUPS groups of random tokens, waits until the
run has trained past them, leaves, and prints its leases. Everything happens in one thread; an engine of its own would
generate between two reports.
"""

import json
import os
import random
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq

NAME = "plain"
RESEND_MS = 2000
WAIT_MS = 200


class Refused(Exception):
    pass


class Server:
    """A DEALER to one server of the run."""

    def __init__(self, address: str, worker: str, protocol: int) -> None:
        self.protocol = protocol
        self.last_id = 0
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, f"{worker}/{secrets.token_hex(8)}".encode())
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(address)

    def ask(self, *body: Any, frames: Sequence[bytes] = ()) -> tuple[list[Any], list[bytes]]:
        """Return the fields of the reply, without its tag, and its frames."""
        self.last_id += 1
        message = [msgpack.packb([self.protocol, self.last_id, body]), *frames]
        while True:
            self.socket.send_multipart(message)
            while self.socket.poll(RESEND_MS):
                header, *answer = self.socket.recv_multipart()
                _, number, (tag, *fields) = msgpack.unpackb(header)
                if number not in (0, self.last_id):
                    continue  # a pong, or a second reply to an earlier request
                if tag != "Refusal":
                    return fields, answer
                code, detail, retry_after_ms, _ = fields
                if code != "busy":
                    raise Refused(f"{body[0]}: {code}: {detail}")
                time.sleep(max(retry_after_ms, 50) / 1000)
                break

    def ping(self) -> None:
        """Show that this worker is alive; the reply is skipped later."""
        self.socket.send(msgpack.packb([self.protocol, 1 << 40, ["Ping"]]))


class Worker:
    def __init__(self, address: str, protocol: int) -> None:
        self.me = f"{NAME}.{secrets.token_hex(4)}"
        self.scheduler = Server(address, self.me, protocol)
        shards, parameters = self.attach()
        self.shards = [Server(shard, self.me, protocol) for shard in shards]
        self.parameters = Server(parameters, self.me, protocol)
        self.ack = 0
        self.held: dict[int, list[Any]] = {}
        self.loaded = [0, -1]
        self.pushed: list[tuple[int, int]] = []

    def attach(self) -> tuple[list[str], str]:
        hello = [self.me, NAME, "rollout", "", "", 0, 0, "", 4, os.getpid()]  # capacity: 4 groups
        while True:
            (_, config, _, _, shards, parameters, *_), _ = self.scheduler.ask("Attach", *hello)
            if all(shards) and parameters:
                self.rollout = json.loads(config)["rollout"]
                return shards, parameters
            time.sleep(0.1)

    def report(self) -> tuple[int, bool]:
        """Report, carry out the commands of the reply, and return the newest version and whether the run drains."""
        report = [self.me, self.ack, list(self.held), self.loaded, WAIT_MS]
        (first, commands, newest, drain), _ = self.scheduler.ask("Report", *report)
        for number, (kind, *fields) in enumerate(commands, start=first):
            if number <= self.ack:
                continue  # commands are repeated until a report acknowledges them
            self.ack = number
            if kind == "Pull":
                self.pull(*fields)
            elif kind == "Assign":
                self.held[fields[1]] = fields
            elif kind == "Abort":
                self.held.pop(fields[0], None)
        for server in (*self.shards, self.parameters):
            server.ping()
        return newest, drain

    def pull(self, lineage: int, version: int) -> None:
        """Read the version in chunks, then report it as loaded. A model would load the tensors of the manifest."""
        ((tensors, nbytes, sha), *_), _ = self.parameters.ask("GetManifest", self.me, lineage, version)
        data = bytearray()
        while len(data) < nbytes:
            _, (chunk,) = self.parameters.ask("GetChunk", lineage, version, len(data), min(nbytes - len(data), 1 << 20))
            data += chunk
        weights = {name: bytes(data[start : start + size]) for name, _, _, start, size, _ in tensors}
        assert sum(map(len, weights.values())) <= nbytes
        self.parameters.ask("Unpin", self.me, lineage, version)
        self.scheduler.ask("Pulled", self.me, lineage, version, sha, True)
        self.loaded = [lineage, version]

    def produce(self, group: int, lease: int, lineage: int, version: int, shard: int, *partial: Any) -> None:
        """Generate and push one group, or give its lease back."""
        if self.loaded < [lineage, version]:
            release = ["RegisterRelease", group, lease, "aborted", f"version {version} is not loaded here"]
            self.scheduler.ask("Operations", [release])
            return
        (rows, *_), _ = self.shards[shard].ask("GetRows", [group])
        prompt = list(rows[0]["prompt"].encode())  # a tokenizer would be used here
        samples = self.rollout["group_size"]
        lengths = [random.randint(1, self.rollout["max_new_tokens"]) for _ in range(samples)]
        tokens = sum(lengths)
        arrays = [
            ("prompt_ids", "int32", [len(prompt)], struct.pack(f"<{len(prompt)}i", *prompt)),
            ("lengths", "int32", [samples], struct.pack(f"<{samples}i", *lengths)),
            ("token_ids", "int32", [tokens], struct.pack(f"<{tokens}i", *random.choices(range(256), k=tokens))),
            ("logprobs", "float32", [tokens], struct.pack(f"<{tokens}f", *[-1.0] * tokens)),
            ("loss_mask", "uint8", [tokens], bytes([1] * tokens)),
            ("segments", "int64", [samples, 4], b"".join(self.segment(n, lengths[n]) for n in range(samples))),
            ("finish", "uint8", [samples], bytes(samples)),
        ]
        specs = [[name, dtype, shape] for name, dtype, shape, _ in arrays]
        item = [group, lease, self.me, False, specs]
        (results,), _ = self.shards[shard].ask("PushGroups", [item], frames=[data for _, _, _, data in arrays])
        code, detail = results[0]
        if code is None:
            self.pushed.append((lease, version))
        else:
            print(f"group {group}, lease {lease}: {code}: {detail}", file=sys.stderr)

    def segment(self, sample: int, tokens: int) -> bytes:
        lineage, version = self.loaded
        return struct.pack("<4q", sample, lineage, version, tokens)

    def work(self, groups: int) -> None:
        """Push ``groups`` groups, and wait until the run has trained beyond the last of them."""
        newest, drain = self.report()
        while not drain and not (
            len(self.pushed) >= groups and newest > max(version for _, version in self.pushed) + 2
        ):
            for fields in list(self.held.values()):
                self.produce(*fields)
                self.held.pop(fields[1])
            newest, drain = self.report()
        self.scheduler.ask("Detach", self.me, "done")


if __name__ == "__main__":
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    worker.work(int(sys.argv[3]))
    print(json.dumps([lease for lease, _ in worker.pushed]))
