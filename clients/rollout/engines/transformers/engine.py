# pyright: basic, reportMissingImports=false
"""Continuous batching over any causal language model of ``transformers``.

A step is one forward pass with one token of each running trajectory. Queued requests join before it, in one pass over
their prompts that reads each distinct prompt once, whatever its number of samples. Weights change between two steps
only. Running trajectories continue over the keys and values of older weights, and their segments record the versions.
With ``recompute``, the new weights rebuild the cache first. ``sampling`` has the distribution that tokens are drawn
from, in float32.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from staleflow.clients.models.routers import Routers
from staleflow.clients.rollout.engines.base import (
    EngineStats,
    Request,
    RequestError,
    Sampling,
    Trajectory,
    check_request,
    prefix_tokens,
)
from staleflow.clients.rollout.engines.load_weights import copy_weights
from staleflow.clients.rollout.engines.queue import RequestQueue
from staleflow.clients.rollout.engines.running_batch import RunningBatch, uniforms
from staleflow.clients.rollout.engines.stop_strings import StopStrings
from staleflow.clients.rollout.engines.transformers.grouped_attention import serving
from staleflow.clients.rollout.engines.transformers.kv_cache import SlotCache
from staleflow.clients.rollout.engines.transformers.masks import DecodeMasks
from staleflow.clients.rollout.engines.transformers.sampling import RowSampling, draw
from staleflow.clients.texts import Decode
from staleflow.protocols.consistency.ids import Lineage, Version

MAX_PREFILL_TOKENS = 16_384
"""Maximum number of padded prompt tokens in one pass, so that joining prompts delay the others only briefly."""

JOIN_FRACTION = 8
"""Requests join when 1 / ``JOIN_FRACTION`` of all rows is free, or when the free rows hold all queued requests."""


class TransformersEngine:
    """An ``Engine`` over a model object that the caller owns; the model is in eval mode only during a step.

    ``stop_ids``: tokens that end a trajectory. ``decode``: converts completions to text, for requests with stop
    strings. ``context``: maximum number of tokens of prompt and completion together, by default the model's own limit.
    ``routers``: those of the model, whose choices become the column ``routed_experts``.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: Sequence[int],
        *,
        decode: Decode | None = None,
        slots: int = 64,
        context: int = 0,
        recompute: bool = False,
        lineage: int = 0,
        version: int = -1,
        routers: Routers | None = None,
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self.context = min(context or 1 << 62, getattr(config, "max_position_embeddings", None) or 1 << 62)
        self.vocabulary = config.vocab_size
        self.lineage, self.version = Lineage(lineage), Version(version)
        self.joining = True
        self._recompute = recompute
        self._stop_ids = np.array(sorted(set(stop_ids)), np.int64)
        self._decode_text = decode
        self._routers = routers
        self._rows = RunningBatch(slots, [] if routers is None else [routers.column])
        self._waiting = RequestQueue()
        self._masks = DecodeMasks(model)
        self._cache = SlotCache(config.num_hidden_layers, slots)
        self._generated = 0
        self._steps = 0

    def submit(self, request: Request) -> None:
        """Queue a request. ``RequestError`` names the invalid part."""
        check_request(request, self.context, self.vocabulary)
        if request.sampling.stop and self._decode_text is None:
            raise RequestError(f"stop is {list(request.sampling.stop)}; this engine has no tokenizer to read text with")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Trajectory]:
        with serving(self.model):
            if self.joining and self._should_join():
                self._join()
                if ended := self._leave():
                    return ended  # return finished trajectories at once instead of after a decode step
            if self._rows.size:
                self._decode()
            return self._leave()

    def interrupt(self, request: int) -> None:
        """Finish a request at the next step. A queued request moves to the front and ends after its first token."""
        if request in self._rows:
            self._rows.interrupt(request)
        else:
            self._waiting.interrupt(request)

    def withdraw(self, request: int) -> Request | None:
        """Remove a queued request and return it; return None if it runs or has finished."""
        return self._waiting.withdraw(request)

    @torch.inference_mode()
    def abort(self, request: int) -> None:
        if (row := self._rows.row(request)) is not None:
            self._free(np.array([row]))
        else:
            self._waiting.withdraw(request)

    def load(self, tensors: Mapping[str, np.ndarray], lineage: Lineage, version: Version) -> None:
        copy_weights(self.model, tensors)
        self.relabel(lineage, version)
        if self._recompute:
            self._requeue_running()

    def relabel(self, lineage: Lineage, version: Version) -> None:
        """Attribute later tokens to this version, after the caller changed the model's weights in place."""
        self.lineage, self.version = lineage, version
        self._rows.turn(lineage, version)

    def stats(self) -> EngineStats:
        rows = self._rows
        kv_tokens = int(rows.position[: rows.size].sum())
        capacity = rows.slots * min(self.context, self._cache.plan.capacity)
        return EngineStats(
            running=rows.size,
            waiting=len(self._waiting),
            kv_used=min(1.0, kv_tokens / max(1, capacity)),
            kv_tokens=kv_tokens,
            kv_capacity=capacity,
            slots=rows.slots,
            generated_tokens=self._generated,
            steps=self._steps,
        )

    def _requeue_running(self) -> None:
        """Return running requests to the head of the queue with their tokens as prefix; joining reads them again."""
        rows = self._rows
        for row in reversed(range(rows.size)):
            request = replace(rows.requests[row], prefix=rows.segments(row))
            self._waiting.put_back(request, cut=bool(rows.interrupted[row]))
        self._free(np.arange(rows.size))

    def _should_join(self) -> bool:
        """Return whether enough rows are free: a prompt pass costs the others a step, so single rows wait for more."""
        free = self._rows.slots - self._rows.size
        return 0 < min(len(self._waiting), max(1, self._rows.slots // JOIN_FRACTION)) <= free

    def _join(self) -> None:
        """Read the prompts of the queued requests that fit into the free rows and into one pass."""
        first, prompts, sources = self._rows.size, dict[bytes, int](), list[int]()
        sequences: list[np.ndarray] = []
        width = 0
        while self._waiting and self._rows.size < self._rows.slots:
            request = self._waiting.first()
            sequence = np.concatenate((request.prompt_ids, prefix_tokens(request.prefix)[0])).astype(np.int64)
            key = sequence.tobytes()
            wider = max(width, len(sequence))
            if key not in prompts:
                if prompts and wider * (len(prompts) + 1) > MAX_PREFILL_TOKENS:
                    break
                prompts[key] = len(sequences)
                sequences.append(sequence)
                width = wider
            cut = self._waiting.take()[1]
            limit = min(request.sampling.max_new_tokens, self.context - len(request.prompt_ids))
            self._rows.join(request, limit, self.lineage, self.version)
            sources.append(prompts[key])
            if cut:
                self._rows.interrupt(request.id)
        self._draw(first, *self._prefill(first, sequences, np.array(sources), width))

    def _prefill(
        self, first: int, sequences: list[np.ndarray], sources: np.ndarray, width: int
    ) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
        """Return the logits after the last token of each joining row's prompt, ``[rows, vocabulary]``, and columns."""
        padded = np.zeros((len(sequences), width), np.int64)  # causal attention needs no mask for padding on the right
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = sequence
        lasts = np.array([len(sequence) - 1 for sequence in sequences])
        ends, which = np.unique(lasts, return_inverse=True)
        device = self.model.device
        self._cache.reading(first, torch.from_numpy(sources).to(device), width)
        with self._recording() as chosen:
            output = self.model(
                input_ids=torch.from_numpy(padded).to(device),
                position_ids=torch.arange(width, device=device)[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.from_numpy(ends).to(device),
            )
        logits: torch.Tensor = output.logits
        columns = self._columns(chosen, sources * width + lasts[sources])
        return logits[torch.from_numpy(sources), torch.from_numpy(which[sources])], columns

    def _decode(self) -> None:
        """Generate one token for every row."""
        self._steps += 1
        rows, device = self._rows, self.model.device
        size = rows.size
        width = int(rows.position[:size].max()) + 1
        positions = torch.from_numpy(rows.position[:size].copy()).to(device)
        self._cache.writing(torch.arange(size, device=device), positions, width)
        with self._recording() as chosen:
            output = self.model(
                input_ids=torch.from_numpy(rows.last[:size]).to(device)[:, None],
                attention_mask=self._masks.decode(positions, width),
                position_ids=positions[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
        self._draw(0, output.logits[:, -1], self._columns(chosen, np.arange(size)))

    @contextmanager
    def _recording(self) -> Generator[list[torch.Tensor]]:
        """Yield a list that receives the choices of the model's routers, if they are recorded."""
        if self._routers is None:
            yield []
        else:
            with self._routers.recording() as chosen:
                yield chosen

    def _columns(self, chosen: list[torch.Tensor], places: np.ndarray) -> dict[str, np.ndarray]:
        """Return the column of the tokens that a pass samples at these places of its input."""
        if self._routers is None:
            return {}
        column, at = self._routers.column, torch.from_numpy(places).to(self.model.device)
        experts = torch.stack([layer.index_select(0, at) for layer in chosen], 1)
        return {column.name: experts.cpu().numpy().astype(column.array_dtype)}

    def _draw(self, first: int, logits: torch.Tensor, columns: Mapping[str, np.ndarray]) -> None:
        rows = self._rows
        here = slice(first, rows.size)
        sampling = RowSampling(
            temperature=rows.temperature[here],
            top_p=rows.top_p[here],
            top_k=rows.top_k[here],
            min_p=rows.min_p[here],
            repetition_penalty=rows.repetition_penalty[here],
            frequency_penalty=rows.frequency_penalty[here],
            presence_penalty=rows.presence_penalty[here],
            prompt=lambda row: rows.requests[first + row].prompt_ids,
            completion=lambda row: rows.token_ids[first + row, : rows.count[first + row]],
        )
        token_ids, logprobs = draw(logits, sampling, uniforms(rows.seed[here], rows.count[here]))
        rows.write(first, rows.size, token_ids, logprobs, columns)
        self._generated += rows.size - first
        self._find_stop_strings(first)

    def _find_stop_strings(self, first: int) -> None:
        """Mark the rows whose newest token completes one of their stop strings."""
        rows, decode = self._rows, self._decode_text
        for row in range(first, rows.size):
            if decode is not None and (stops := rows.requests[row].sampling.stop):
                count = int(rows.count[row])
                rows.stopped[row] = StopStrings(stops, decode).end(rows.token_ids[row, :count], count - 1) > 0

    def _leave(self) -> list[Trajectory]:
        ended = self._rows.finished(self._stop_ids)
        if len(ended) == 0:
            return []
        trajectories = [self._rows.take(row, self._stop_ids) for row in ended.tolist()]
        self._free(ended)
        return trajectories

    def _free(self, rows: np.ndarray) -> None:
        moves = self._rows.leave(rows)
        if len(moves.sources):
            width = int(self._rows.position[moves.targets].max())
            device = self.model.device
            self._cache.move(
                torch.from_numpy(moves.sources).to(device), torch.from_numpy(moves.targets).to(device), width
            )


def generate(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, *, seed: int = 0
) -> list[list[Trajectory]]:
    """Return ``n`` trajectories per prompt, in order. The engine must be idle; equal seeds give equal tokens."""
    if engine.stats().running or engine.stats().waiting:
        raise RequestError("the engine is busy; generate() requires an idle engine")
    for index in range(len(prompts) * n):
        prompt_ids = np.asarray(prompts[index // n], np.int32)
        engine.submit(Request(id=index, prompt_ids=prompt_ids, sampling=sampling, seed=(seed << 32) + index))
    finished: dict[int, Trajectory] = {}
    while len(finished) < len(prompts) * n:
        finished.update((trajectory.id, trajectory) for trajectory in engine.step())
    return [[finished[prompt * n + sample] for sample in range(n)] for prompt in range(len(prompts))]
