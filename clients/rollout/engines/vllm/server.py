# pyright: basic, reportMissingImports=false
"""Client of a running vLLM server, with the methods of vLLM's ``AsyncLLM`` that ``VllmEngine`` calls.

Token ids and log-probabilities travel through ``/inference/v1/generate``, weights as places in files through the weight
transfer endpoints: the server must have the backend of ``plugin.py`` and run on this host.

The server's engine core labels each token with the version of the weights. The labels and the cache salts of this
client begin with a random word. Tokens of weights that anyone else has loaded, or of a restarted server, therefore
raise ``EngineError`` and are never taken for a version of the run.
"""

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp

from staleflow.clients.rollout.engines.base import EngineError
from staleflow.clients.rollout.engines.vllm.counters import Counters

REQUEST_PREFIX = "generate-tokens-"
"""The server puts it before the request id of a call."""
POLL_INTERVAL_S = 1.0
MAX_FAILED_POLLS = 10
PARAMETERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "stop_token_ids", "ignore_eos", "logprobs", "detokenize"),
)
"""Sampling parameters that a call sends; for any other the server might have a default of its own."""


@dataclass(slots=True)
class Stream:
    """The outputs of one call."""

    outputs: "asyncio.Queue[Any]" = field(default_factory=lambda: asyncio.Queue[Any]())
    """Outputs in order, an exception, or None after an abort without tokens."""
    started: bool = False
    """A token has arrived, so the engine core knows the request."""


class ServerClient:
    """Owns the connections to ``url``. Create it inside a running event loop. ``counters``: updated once a second."""

    def __init__(self, url: str, counters: Counters) -> None:
        self.errored = False
        self.dead_error = EngineError(f"the vLLM server at {url} does not answer")
        self._counters = counters
        self._word = secrets.token_hex(8)
        key = os.environ.get("VLLM_API_KEY", "")
        self._http = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=None, connect=30.0),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 20,
            trust_env=False,
        )
        self._streams: dict[str, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> dict[str, Any]:
        """Return the server's configuration. Resume it, as an earlier worker may have died during an update."""
        info = await self._call("GET", "/server_info?config_format=json")
        await self.resume_generation()
        self._spawn(self._poll())
        return dict(info["vllm_config"])

    # --- requests ---

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        """Yield outputs with the tokens since the last one, as ``AsyncLLM.generate`` does."""
        body = {
            "request_id": request_id,
            "token_ids": prompt["prompt_token_ids"],
            "sampling_params": {name: getattr(params, name) for name in PARAMETERS},
            "stream": True,
        }
        if salt := prompt.get("cache_salt"):
            body["cache_salt"] = self._label(salt)
        stream = self._streams[request_id] = Stream()
        reader = asyncio.ensure_future(self._read(stream, body))
        finished = False
        try:
            while (output := await stream.outputs.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
                if finished:
                    return
        finally:
            del self._streams[request_id]
            reader.cancel()
            if not finished:  # the closed connection ends it too, but later
                self._spawn(self._abort_quietly(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request with its tokens so far. Without tokens it ends at once: it may not have arrived yet."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.started:
            stream.outputs.put_nowait(None)
        elif stream is not None:
            await self._abort(request_id)

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):
            await self._abort(request_id)

    async def _abort(self, request_id: str) -> None:
        await self._call("POST", "/abort_requests", {"request_ids": [REQUEST_PREFIX + request_id]})

    async def _read(self, stream: Stream, body: dict[str, Any]) -> None:
        try:
            async with self._http.post("/inference/v1/generate", json=body) as response:
                await _check(response)
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    output = self._output(json.loads(line[len(b"data: ") :]))
                    self._counters.generated_tokens += len(output.outputs[0].token_ids)
                    self._counters.throughput.record(self._counters.generated_tokens)
                    self._counters.progressed()
                    stream.started = True
                    stream.outputs.put_nowait(output)
                    if output.finished:
                        return
            raise EngineError("the vLLM server ended a stream of tokens early")
        except Exception as error:  # generate() raises it
            stream.outputs.put_nowait(error)

    def _output(self, chunk: dict[str, Any]) -> Any:
        if "choices" not in chunk:
            raise EngineError(f"the vLLM server answers {chunk}")
        choice = chunk["choices"][0]
        drawn = (choice["logprobs"] or {}).get("content") or []
        versions = choice["weight_versions"]
        if versions is not None:
            versions = [SimpleNamespace(version=self._own(one["version"]), start=one["start"]) for one in versions]
        completion = SimpleNamespace(
            token_ids=choice["token_ids"],
            logprobs=SimpleNamespace(logprobs=[one["logprob"] for one in drawn]),
            finish_reason=choice["finish_reason"],
            weight_versions=versions,
        )
        return SimpleNamespace(outputs=[completion], finished=completion.finish_reason is not None)

    # --- weights ---

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._call("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume_generation(self) -> None:
        await self._call("POST", "/resume")

    async def start_weight_update(self) -> None:
        await self._call("POST", "/start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._call("POST", "/update_weights", {"update_info": request.update_info})

    async def finish_weight_update(self, *, weight_version: str) -> None:
        await self._call("POST", "/finish_weight_update", {"weight_version": self._label(weight_version)})

    async def update_weight_version(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", {"new_version": self._label(version)})

    def _label(self, version: str) -> str:
        return f"{self._word}:{version}"

    def _own(self, label: str) -> str:
        """Return the version of a label. Raise ``EngineError`` if the label is not of this client."""
        word, _, version = label.partition(":")
        if word != self._word:
            raise EngineError(f'tokens have weights "{label}", which another client of the vLLM server has loaded')
        return version

    # --- the server as a whole ---

    async def close(self) -> None:
        """End the connections. The server continues."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def _poll(self) -> None:
        """Read the server's load. ``errored`` is set after ten failures in a row."""
        failed = 0
        while failed < MAX_FAILED_POLLS:
            try:
                async with self._http.get("/metrics", timeout=aiohttp.ClientTimeout(total=30.0)) as response:
                    self._count(await response.text())
                failed = 0
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            await asyncio.sleep(POLL_INTERVAL_S)
        self.errored = True

    def _count(self, text: str) -> None:
        """Read the counters from metrics in Prometheus' text format: ``name{labels} value``."""
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "{" in line}
        counters, steps = self._counters, self._counters.steps
        counters.running = int(values.get("vllm:num_requests_running", 0))
        counters.kv_used = values.get("vllm:kv_cache_usage_perc", 0.0)
        counters.steps = int(values.get("vllm:iteration_tokens_total_count", 0))
        counters.preemptions = int(values.get("vllm:num_preemptions_total", 0))
        if counters.steps != steps:
            counters.progressed()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            async with self._http.request(method, path, json=body) as response:
                await _check(response)
                return await response.json()
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.dead_error}: {error}") from error

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _check(response: Any) -> None:
    """Raise ``EngineError`` for an error of the server."""
    if response.status >= 400:
        text = (await response.text())[:500]
        raise EngineError(f"the vLLM server answers {response.status} to {response.url.path}: {text}")
