# pyright: basic, reportMissingImports=false
"""The reference stage: log-probabilities of the completion tokens under a frozen model. Adapter to torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from staleflow.clients.models.files import load_model
from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.stage.model_stage import Ended, Stopping
from staleflow.clients.stage.sequences import Rows, rows_of
from staleflow.clients.stage.worker import Failed, StageGroup, StageOutcome

COLUMN = "logprobs"


class Reference:
    """Compute ``logprobs``, float32 [T], at the engine's sampling temperature, as for the policy. Never learns."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        temperature: float,
        micro_tokens: int,
        threads: int = 1,
        matmul_precision: str = "highest",
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul_precision)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = load_model(directory, dtype, self._device).requires_grad_(False)
        self._limits = Limits.of(self._model)
        self._temperature = temperature
        self._micro_tokens = micro_tokens

    def judge(self, groups: Sequence[StageGroup], stopping: Stopping) -> list[StageOutcome]:
        readable, results = within(groups, self._limits)
        if readable:
            rows = rows_of([group.payload for group in readable])
            columns = rows.columns(self._logprobs(rows, stopping))
            results |= {g.group: finite(COLUMN, column) for g, column in zip(readable, columns, strict=True)}
        return [results[group.group] for group in groups]

    def accepted(self, groups: Sequence[StageGroup], stopping: Stopping) -> None:
        """Do nothing: a frozen model does not learn."""

    def close(self) -> None:
        """Do nothing: there is no state to save."""

    def _logprobs(self, rows: Rows, stopping: Stopping) -> np.ndarray:
        """Return log-probabilities [N, L], 0 on padding."""
        logprobs = np.zeros(rows.input_ids.shape, np.float32)
        for which, width in rows.passes(self._micro_tokens):
            if stopping():
                raise Ended
            input_ids, attention = on_device(rows, which, width, self._device)
            with torch.inference_mode():
                logits = self._model(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
                computed = token_logprobs(logits, input_ids, self._temperature)
            logprobs[which, :width] = computed.cpu().numpy()
        return logprobs


def on_device(rows: Rows, which: np.ndarray, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids`` and ``attention_mask`` [n, width] of some rows on the device."""
    attention = (np.arange(width) < rows.ends[which, None]).astype(np.int64)
    input_ids = np.ascontiguousarray(rows.input_ids[which, :width])
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(attention).to(device)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the inputs of a model."""

    vocabulary: int
    context: int
    """Maximum number of tokens of prompt and completion together."""

    @classmethod
    def of(cls, model: Any) -> "Limits":
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62
        return cls(model.get_input_embeddings().num_embeddings, context)


def within(groups: Sequence[StageGroup], limits: Limits) -> tuple[list[StageGroup], dict[int, StageOutcome]]:
    """Split groups into those that the model can process and, by group, the failure of each other one."""
    readable: list[StageGroup] = []
    failed: dict[int, StageOutcome] = {}
    for group in groups:
        payload = group.payload
        largest = max(int(ids.max(initial=0)) for ids in (payload.prompt_ids, payload.token_ids))
        longest = len(payload.prompt_ids) + int(payload.lengths.max(initial=0))
        if largest >= limits.vocabulary:
            why = f"it has token {largest}; the vocabulary of this stage's model has {limits.vocabulary} tokens"
            failed[group.group] = Failed(why)
        elif longest > limits.context:
            why = f"it has a sequence of {longest} tokens; the context of this stage's model is {limits.context}"
            failed[group.group] = Failed(why)
        else:
            readable.append(group)
    return readable, failed


def finite(name: str, column: np.ndarray) -> StageOutcome:
    """Return the column, or a failure if it has a value that is not finite."""
    good = bool(np.isfinite(column).all())
    return {name: column} if good else Failed(f"the model's {name} hold a value that is not finite")
