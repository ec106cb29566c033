"""Requests of clients that submit prompts and read their outcomes, and of the trajectory servers that need the rows.

A submission is acknowledged once it is durable. While too many rows are pending, or the store fills up, it is refused
``busy``, and the client sends it again.
"""

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.row_files import prompt_row
from staleflow.net.endpoint import Call
from staleflow.net.errors import RUN_IS_OVER
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import GroupId
from staleflow.protocols.wire.messages import (
    SUBMITTED_ROWS,
    GetOutcomes,
    GetSubmittedRows,
    Outcomes,
    SubmitPrompts,
    SubmitPromptsReply,
    SubmittedRows,
)
from staleflow.protocols.wire.messages.prompts import MAX_ROWS
from staleflow.servers.scheduler.ledger.pending_replies import PendingReplies
from staleflow.servers.scheduler.long_polls import LongPolls
from staleflow.servers.scheduler.prompts.outcome_log import outcomes_after
from staleflow.servers.scheduler.prompts.submissions import Submissions, digest, encoded_row
from staleflow.servers.scheduler.state import SchedulerState

MAX_ID_BYTES = 200
MAX_DETAIL = 500
"""Maximum characters of the reason why a row is refused: it names the columns of the row."""
MAX_STORE_SHARE = 0.5
"""Used share of the store beyond which no rows are accepted: the rest is for the ledger, which must never wait for
rows."""
MAX_OUTCOMES = 4096
"""Maximum number of outcomes in one reply."""
MAX_FRAME_BYTES = 64 << 20
"""Maximum size of the rows in one reply, its first row excepted."""
SCANNED_ROWS = 4096
"""Maximum number of rows that one call of ``delete_unneeded`` checks."""


class PromptRequests:
    """Handles the requests about submitted rows, and deletes the rows that no group needs any more."""

    def __init__(self, state: SchedulerState, replies: PendingReplies) -> None:
        self._config, self._phase = state.config.prompts, state.phase
        self._interpreter, self._instances = state.interpreter, state.instances
        self._prompts = state.interpreter.prompts
        self._replies = replies
        self._waiting = LongPolls[GetOutcomes](state.interpreter.clock.now_ms)
        """Calls that wait for an outcome."""

    # --- submissions ---------------------------------------------------------------------------------------------

    def submit(self, call: Call, body: SubmitPrompts) -> None:
        """Append rows. The same submission again gets the same reply."""
        if (rows := self._open(call)) is None:
            return
        if not 0 < len(body.id.encode()) <= MAX_ID_BYTES or not body.id.isprintable():
            detail = f"the id of a submission must have 1 to {MAX_ID_BYTES} printable bytes"
            self._replies.refuse(call, Code.MALFORMED, detail)
            return
        if (count := len(body.rows)) > (limit := min(MAX_ROWS, self._config.max_pending)):
            self._replies.refuse(call, Code.OVERSIZE, f"submission {body.id} has {count} rows; at most {limit} at once")
            return
        try:
            encoded = [self._encode(body.id, place, row) for place, row in enumerate(body.rows)]
        except ConfigError as error:
            code = Code.OVERSIZE if error.what == "prompts.max_row_bytes" else Code.MALFORMED
            self._replies.refuse(call, code, f"submission {body.id}: {error.allowed[:MAX_DETAIL]}")
            return
        sha, known = digest(encoded, last=body.last), rows.find(body.id)
        if known is not None and known.sha != sha:
            self._replies.refuse(call, Code.CONFLICT, f"submission {body.id} was made before with other rows")
        elif known is None and (no := self._objection(rows, count)) is not None:
            self._replies.refuse(call, *no)
        else:
            if known is None:
                known = rows.add(body.id, sha, encoded, last=body.last)
                self._prompts.submitted()
                self._instances.changed = True
            self._replies.add(call, SubmitPromptsReply(first=known.first))

    def _open(self, call: Call) -> Submissions | None:
        """Return the rows of the run; refuse the call if they come from its configuration."""
        if self._prompts.submissions is None:
            detail = "the prompts of this run come from its configuration; prompts.submitted = true lets clients submit"
            self._replies.refuse(call, Code.CONFLICT, detail)
        return self._prompts.submissions

    def _encode(self, id: str, place: int, row: dict[str, object]) -> bytes:
        """Return a row as it is stored and sent. Raise ``ConfigError`` if no run can use it or it is too large."""
        prompts = self._config
        where = f"row {place}"
        _, encoded = prompt_row("row", id, where, row, prompts.columns, chat_template=prompts.chat_template)
        if (size := len(encoded)) > (limit := prompts.max_row_bytes):
            detail = f"{where} has {size} bytes; prompts.max_row_bytes allows {limit}"
            raise ConfigError("prompts.max_row_bytes", size, detail)
        return encoded

    def _objection(self, rows: Submissions, count: int) -> tuple[Code, str] | None:
        """Return why a new submission is refused, or None."""
        if self._phase.ending:
            return Code.DENIED, RUN_IS_OVER
        if rows.ended:
            return Code.CONFLICT, "the prompts were finished by a client; the run takes no more until it is resumed"
        if rows.num_rows + count > SUBMITTED_ROWS:
            return Code.OVERSIZE, f"a run takes at most {SUBMITTED_ROWS} rows"
        if count and (pending := self._prompts.num_pending()) + count > (limit := self._config.max_pending):
            return Code.BUSY, f"{pending} rows are pending; prompts.max_pending allows {limit}"
        if count and (used := self._interpreter.store.used_share()) >= MAX_STORE_SHARE:
            detail = f"the scheduler's store is {used:.0%} full of rows that a checkpoint may need"
            return Code.BUSY, f"{detail}; checkpoints free it, or raise scheduler.map_mb"
        return None

    # --- rows ----------------------------------------------------------------------------------------------------

    def rows(self, call: Call, body: GetSubmittedRows) -> None:
        """Reply with committed rows: a group is leased only after its row was committed."""
        sizes, frames = list[int](), list[bytes]()
        left = min(body.most_bytes, MAX_FRAME_BYTES)
        with self._interpreter.store.read() as txn:
            for row in body.rows[:MAX_ROWS]:
                encoded = encoded_row(txn, row)
                left -= len(encoded or b"")
                if frames and left < 0:
                    break
                sizes.append(-1 if encoded is None else len(encoded))
                frames.append(encoded or b"")
        call.reply(SubmittedRows(sizes=sizes), [b"".join(frames)])

    def delete_unneeded(self) -> None:
        """Delete rows whose group is over and that no rollback can need."""
        rows, log = self._prompts.submissions, self._prompts.outcomes
        if rows is not None and log is not None:
            for row in rows.delete_unneeded(self._is_needed, SCANNED_ROWS):
                log.forget(row)

    def _is_needed(self, row: int) -> bool:
        """Return whether the current group of a row waits, is live, or may be live again after a rollback."""
        machine, group = self._interpreter.machine, GroupId(row)
        while machine.retired(group):
            group = GroupId(group + SUBMITTED_ROWS)
        return self._prompts.is_queued(group) or machine.must_keep(group)

    # --- outcomes ------------------------------------------------------------------------------------------------

    def outcomes(self, call: Call, body: GetOutcomes) -> None:
        """Keep a call until there are outcomes for it."""
        if self._open(call) is not None:
            self._waiting.add(call, body)
            self.reply_waiting()

    def reply_waiting(self) -> None:
        """Reply to the calls for which committed outcomes exist."""
        self._waiting.settle(self._reply)

    def _reply(self, call: Call, body: GetOutcomes) -> bool:
        log = self._prompts.outcomes
        if log is None or body.since >= log.newest:
            if self._phase.finished:
                call.reply(Outcomes(outcomes=[], ended=True))
            return self._phase.finished
        with self._interpreter.store.read() as txn:
            call.reply(Outcomes(outcomes=outcomes_after(txn, body.since, max(1, min(body.most, MAX_OUTCOMES)))))
        return True

    def answer_due(self, now_ms: int | None = None) -> None:
        """Reply without outcomes to the calls whose wait time has passed; without ``now_ms``, to all."""
        self._waiting.end(lambda call: call.reply(Outcomes(outcomes=[])), now_ms)
