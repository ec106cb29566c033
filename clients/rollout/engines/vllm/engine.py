# pyright: basic, reportMissingImports=false
"""vLLM's asynchronous engine as an ``AsyncEngine``.

The engine core itself reports which version generated a token, step by step. Its weight version changes only while it
is paused and nothing is in flight, so a segment ends exactly where the weights changed.

Versions never share the prefix cache: each request carries the version in its cache salt, and a request without tokens
is resubmitted with the new salt when the weights change. (*keep* cannot clear the cache, which contains the keys and
values of running requests; *recompute* and *drain* clear it.)
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from staleflow.clients.rollout.engines.base import (
    EngineError,
    EngineStats,
    LoadError,
    Request,
    RequestError,
    Trajectory,
    check_request,
)
from staleflow.clients.rollout.engines.load_weights import check_weights, one_name_each
from staleflow.clients.rollout.engines.vllm.adapter import AdapterFolder
from staleflow.clients.rollout.engines.vllm.counters import Counters
from staleflow.clients.rollout.engines.vllm.draft import Draft
from staleflow.clients.rollout.engines.vllm.server import ServerClient
from staleflow.clients.rollout.engines.vllm.weights import Parcel, parcels
from staleflow.clients.texts import Decode
from staleflow.protocols.consistency.ids import Lineage, Version

log = logging.getLogger(__name__)

OnUpdate = Literal["keep", "recompute", "drain"]

POLL_INTERVAL_S = 0.25
"""Interval between health checks of an idle engine."""
CLOSE_TIMEOUT_S = 2.0


class VllmEngine:
    """Owns ``llm``, which reports its statistics to ``counters``. Create it inside a running event loop.

    ``model``: the ``transformers`` model whose tensors are published (it may be on ``meta``). ``stop_ids``: tokens
    that end a trajectory. ``decode``: converts completions to text, to find stop strings. ``context``: maximum number
    of tokens of prompt and completion together. ``adapter``: the folder of the model's adapter, if it has one.
    """

    def __init__(
        self,
        llm: AsyncLLM | ServerClient,
        counters: Counters,
        model: Any,
        stop_ids: Sequence[int],
        decode: Decode,
        *,
        context: int,
        on_update: OnUpdate = "keep",
        adapter: AdapterFolder | None = None,
    ) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.context = context
        self.vocabulary = model.config.get_text_config().vocab_size
        self._llm = llm
        self._counters = counters
        self._model = model
        self._stop_ids = sorted(set(stop_ids))
        self._decode = decode
        self._on_update = on_update
        self._adapter = adapter
        self._more: dict[str, Any] = {} if adapter is None else {"lora_request": adapter.request}
        """Further arguments of each request."""
        self._drafts: dict[int, Draft] = {}
        self._names = itertools.count()
        self._salt = label(Lineage(0), Version(-1))
        self._open = asyncio.Event()
        """Set while requests may go to the engine; cleared while weights are loaded."""
        self._open.set()
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._paused_s = 0.0
        self._spawn(self._watch())

    async def start(self) -> None:
        """Warm the engine up with a first request, which takes seconds on a CPU."""
        await self._llm.update_weight_version(self._salt)
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=0, logprobs=0, detokenize=False)
        async for _ in self._llm.generate(tokens_input([0]), params, "first"):
            pass
        self._counters.generated_tokens = 0

    async def generate(self, request: Request) -> Trajectory:
        """Return the finished trajectory. Raise ``RequestError`` if unservable, ``CancelledError`` on ``abort``."""
        if self.failure.done():
            raise EngineError("the engine has failed")
        check_request(request, self.context, self.vocabulary)
        draft = Draft(request, self.context, self._decode)
        self._drafts[request.id] = draft
        self._busy()
        draft.task = asyncio.ensure_future(self._write(draft))
        try:
            return await draft.task
        finally:
            del self._drafts[request.id]
            self._busy()

    def interrupt(self, request: int, least: int = 1) -> None:
        """End a request with its tokens so far. Without any, it ends after its first, or at once if ``least`` is 0."""
        draft = self._drafts.get(request)
        if draft is not None and (not draft.cut or (draft.least and not least)):
            draft.cut = True
            draft.least = least
            if draft.enough and draft.attempt_id:
                self._spawn(self._llm.abort(draft.attempt_id))

    def abort(self, request: int) -> None:
        """Discard a request. Unknown ids are ignored."""
        if (draft := self._drafts.get(request)) is not None and draft.task is not None:
            draft.task.cancel()

    async def load(self, tensors: Mapping[str, NDArray[np.generic]], lineage: Lineage, version: Version) -> None:
        """Return once the next token will come from these weights. On ``LoadError`` the old weights stay loaded."""
        async with self._loading:
            if self.failure.done():
                raise EngineError("the engine has failed")
            await asyncio.to_thread(check_weights, self._model, tensors)
            self._open.clear()
            try:
                paused_at = time.monotonic()
                await self._pause()
                paused_at = max(paused_at, self._counters.stepped_at)  # the steps in flight ended first
                await self._update(tensors, label(lineage, version))
                await self._llm.resume_generation()
                self._paused_s += time.monotonic() - paused_at
            except Exception as error:  # the weights may be half-written, so this engine cannot continue
                raise self._fail(error) from error
            finally:
                self._open.set()

    def stats(self) -> EngineStats:
        """Return the engine core's counters. Requests that have not reached it count as waiting."""
        counters, requests = self._counters, len(self._drafts)
        running = min(counters.running, requests)
        return EngineStats(
            running=running,
            waiting=requests - running,
            kv_used=counters.kv_used if requests else 0.0,
            kv_tokens=round(counters.kv_used * counters.kv_capacity) if requests else 0,
            kv_capacity=counters.kv_capacity,
            slots=counters.slots,
            generated_tokens=counters.generated_tokens,
            steps=counters.steps,
            preemptions=counters.preemptions,
            paused_s=self._paused_s,
        )

    def busy_s(self) -> float:
        since = self._busy_since
        return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    def tokens_per_s(self) -> float:
        """Return the generation rate over the last few seconds."""
        return self._counters.throughput.per_s(self._counters.generated_tokens)

    def stuck_s(self) -> float:
        """Return the seconds since the last step or the last parcel of a load; 0 if the engine is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - max(since, self._counters.stepped_at)

    async def close(self) -> None:
        """End the engine's processes and cancel the remaining callers."""
        tasks = [*self._tasks, *(draft.task for draft in self._drafts.values() if draft.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._adapter is not None:
            self._adapter.close()
        if isinstance(self._llm, ServerClient):
            await self._llm.close()  # the server continues
        else:
            await asyncio.to_thread(self._llm.shutdown, CLOSE_TIMEOUT_S)

    # --- requests ---

    async def _write(self, draft: Draft) -> Trajectory:
        try:
            while True:
                await self._open.wait()
                if draft.cut and draft.enough:
                    return draft.trajectory()
                await self._attempt(draft)
                if not draft.retry:
                    return draft.trajectory()
        except Exception as error:  # an engine failure: unservable requests are rejected before they reach the engine
            raise self._fail(error) from error

    async def _attempt(self, draft: Draft) -> None:
        """Submit the request to the engine and collect its output until it ends or must be resubmitted.

        No await separates reading the salt from registering the request, so a load cannot change the salt meanwhile.
        """
        draft.begin(f"{draft.request.id}.{next(self._names)}")
        prompt = tokens_input(draft.token_ids_so_far(), cache_salt=self._salt)
        requested = self._llm.generate(prompt, self._params(draft), draft.attempt_id, **self._more)
        async with contextlib.aclosing(requested) as outputs:
            async for output in outputs:
                draft.take(output.outputs[0])
                if (draft.cut or draft.stopped_at) and not output.finished and not draft.retry:
                    await self._llm.abort(draft.attempt_id)

    def _params(self, draft: Draft) -> SamplingParams:
        """Return vLLM's parameters of an attempt.

        vLLM has no tokenizer here, so the draft finds stop strings. A later attempt has earlier tokens in its prompt:
        the repetition penalty covers prompt and output alike. vLLM's presence and frequency penalties cover only the
        output, so with them each attempt of a draft starts over.
        """
        sampling = draft.request.sampling
        return SamplingParams(
            max_tokens=draft.room(),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=draft.seed(),
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # stop_ids alone decides which tokens end a trajectory
            logprobs=0,  # of the drawn token
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    # --- weights ---

    async def _pause(self) -> None:
        match self._on_update:
            case "keep":
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                await self._retry_unstarted()
            case "recompute":
                await self._llm.pause_generation(mode="keep", clear_cache=True)
            case "drain":
                await self._llm.pause_generation(mode="wait", clear_cache=True)

    async def _retry_unstarted(self) -> None:
        """Abort the attempts that have no token yet, so that the new weights read their prompts."""
        for draft in list(self._drafts.values()):
            if draft.attempt_id and not draft.written_here and not draft.retry:
                draft.retry = True
                await self._llm.abort(draft.attempt_id)

    async def _update(self, tensors: Mapping[str, NDArray[Any]], version: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._adapter is not None:
            llm: Any = self._llm  # an engine of this worker: a server gets no adapter
            await llm.add_lora(await asyncio.to_thread(self._adapter.replacement, tensors))
            await self._llm.update_weight_version(version)
            self._salt = version
            return
        await self._llm.start_weight_update()
        self._counters.stepped_at = time.monotonic()
        coming = parcels(one_name_each(self._model, tensors))
        try:
            while (parcel := await asyncio.to_thread(_next, coming)) is not None:
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=parcel.message()))
                self._counters.stepped_at = time.monotonic()  # progress, so leases are renewed during a long load
        finally:
            coming.close()
        await self._llm.finish_weight_update(weight_version=version)
        self._salt = version

    # --- the engine as a whole ---

    async def _watch(self) -> None:
        """Detect an engine core that dies while no request waits for it."""
        while not self.failure.done():
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._llm.errored:
                self._fail(self._llm.dead_error)

    def _fail(self, error: BaseException) -> EngineError:
        if isinstance(error, RequestError | LoadError):
            return error
        failed = EngineError(f"the engine failed: {error!r}")
        if not self.failure.done():
            log.error("vLLM failed: %r", error)
            self.failure.set_exception(failed)
        return failed

    def _busy(self) -> None:
        """Update the busy time; call it whenever the number of requests changes."""
        now = time.monotonic()
        if self._drafts and self._busy_since is None:
            self._busy_since = now
        elif not self._drafts and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def label(lineage: Lineage, version: Version) -> str:
    """Return the engine core's label of a version."""
    return f"{lineage}.{version}"


def _next(coming: Any) -> Parcel | None:
    return next(coming, None)
