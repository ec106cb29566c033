"""Limits of a run on one group: token ids of its model, lengths of its configuration, columns of a rollout worker.

``GroupPayload.check`` checks what holds for any group; this module checks what depends on the run. A trajectory server
checks each push, and a trainer each group that it fetches: a token id outside the vocabulary raises inside the model,
which on a GPU ends the process.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import ModelLimits
from staleflow.protocols.wire.routed_experts import COLUMN as ROUTED_EXPERTS
from staleflow.protocols.wire.routed_experts import check_experts
from staleflow.protocols.wire.stages import ENVIRONMENT
from staleflow.protocols.wire.trajectory import GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, check_columns

MAX_NAMED = 5
"""Maximum number of columns that a refusal names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadLimits:
    """Limits of one group. 0 means no limit."""

    model: ModelLimits = field(default_factory=ModelLimits)
    sampled_tokens: int = 0
    """Maximum number of tokens of one sample that the policy writes."""
    environment: bool = False
    """The run has an environment, which may also write tokens and return numbers with a push."""

    columns: tuple[TypedColumn, ...] = ()
    """Columns that the configuration declares."""

    def check(self, payload: GroupPayload) -> None:
        """Raise ``ProtocolError`` with the first limit that the payload exceeds."""
        self._check_columns(payload)
        self._check_lengths(payload)
        self.check_tokens(payload)

    def check_tokens(self, payload: GroupPayload) -> None:
        """Check only what the model requires: ids of its vocabulary, sequences within its context, its experts."""
        vocabulary, context = self.model.vocabulary, self.model.context
        if not len(payload.prompt_ids):
            raise ProtocolError(Code.MALFORMED, "the prompt is empty; it must have a token at least")
        for name, ids in (("prompt_ids", payload.prompt_ids), ("token_ids", payload.token_ids)):
            if vocabulary and (highest := int(np.max(ids, initial=0))) >= vocabulary:
                detail = f"{name} holds {highest}; the model's vocabulary has {vocabulary} tokens"
                raise ProtocolError(Code.MALFORMED, f"{detail}: does the engine use the run's tokenizer?")
        longest = len(payload.prompt_ids) + int(payload.lengths.max())
        if context and longest > context:
            raise ProtocolError(Code.OVERSIZE, f"a sample has {longest} tokens; the model's context is {context}")
        if (experts := payload.columns.get(ROUTED_EXPERTS.key)) is not None:
            check_experts(experts, self.model)

    def _check_columns(self, payload: GroupPayload) -> None:
        names = [name for name in payload.stages if not (self.environment and name.startswith(ENVIRONMENT))]
        if names:
            allowed = f"only {ENVIRONMENT}*" if self.environment else "none without environment.run"
            had = ", ".join(names[:MAX_NAMED])
            raise ProtocolError(Code.MALFORMED, f"a push has the stage columns {had}; it may have {allowed}")
        samples, tokens = payload.num_samples, payload.num_tokens
        check_columns(self.columns, payload.columns, samples=samples, tokens=tokens)

    def _check_lengths(self, payload: GroupPayload) -> None:
        if not self.environment and not payload.all_sampled():
            detail = "loss_mask holds a 0, for a token that an environment wrote; this run has none"
            raise ProtocolError(Code.MALFORMED, detail)
        longest = max(payload.sampled_lengths())
        if self.sampled_tokens and longest > self.sampled_tokens:
            detail = f"a sample has {longest} sampled tokens; the run allows {self.sampled_tokens}"
            raise ProtocolError(Code.OVERSIZE, detail)


PLAIN: Final = PayloadLimits()
"""Limits of a run without an environment whose model is not known."""
