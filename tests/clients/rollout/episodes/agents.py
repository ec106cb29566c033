"""An episode behind a real server, whose engine returns given texts, for tests of the APIs with their own packages."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from staleflow.clients.rollout.engines.base import Request, Sampling, TokenSegment, Trajectory
from staleflow.clients.rollout.engines.simulated import SimulatedEngine
from staleflow.clients.rollout.engines.thread import EngineThread
from staleflow.clients.rollout.episodes.chat.routes import BASE
from staleflow.clients.rollout.episodes.chat.server import ChatServer
from staleflow.clients.rollout.episodes.chat.template import ByteChatTemplate
from staleflow.clients.rollout.episodes.episode import Episode
from staleflow.configs.schema import Environment
from staleflow.configs.simulation import Simulated
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.trajectory import Finish


class GivenTexts(EngineThread):
    """An engine whose next trajectories are the bytes of ``texts``, each with a stop token if it fits the limit."""

    def __init__(self, *texts: str) -> None:
        super().__init__(SimulatedEngine(Simulated(), slots=1))
        self.texts = list(texts)
        self.requests: list[Request] = []
        self.released = asyncio.Event()
        """While cleared, requests wait."""
        self.released.set()

    async def generate(self, request: Request) -> Trajectory:
        self.requests.append(request)
        await self.released.wait()
        written = np.array([*self.texts.pop(0).encode(), 0], np.int32)
        limit = request.sampling.max_new_tokens
        token_ids = written[:limit]
        segment = TokenSegment(
            lineage=Lineage(0),
            version=Version(0),
            token_ids=token_ids,
            logprobs=np.full(len(token_ids), -0.5, np.float32),
        )
        finish = Finish.STOP if len(written) <= limit else Finish.LENGTH
        return Trajectory(id=request.id, segments=(segment,), finish=finish)


@dataclass(slots=True)
class Scene:
    """One open episode."""

    engine: GivenTexts
    episode: Episode
    base_url: str
    key: str
    anthropic_base_url: str = field(init=False)

    def __post_init__(self) -> None:
        self.anthropic_base_url = self.base_url.removesuffix(BASE)

    @property
    def prompts(self) -> list[str]:
        """Return what the engine has read for each request."""
        return [bytes(request.prompt_ids.tolist()).decode() for request in self.engine.requests]

    def trained(self) -> list[tuple[str, str]]:
        """Return the turns of the trained conversation as (given, sampled)."""
        turns = self.episode.transcript.turns
        return [(bytes(t.given.tolist()).decode(), bytes(t.token_ids.tolist()).decode()) for t in turns]


@asynccontextmanager
async def episode(
    *texts: str, limit: int = 1000, sampling: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[Scene]:
    """Open an episode whose policy writes ``texts``. ``sampling``: settings of the run."""
    engine, server = GivenTexts(*texts), ChatServer()
    defaults: Mapping[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}
    opened = Episode(
        engine,
        ByteChatTemplate(),
        Sampling(max_new_tokens=limit, **sampling or {}),
        seed=0,
        settings=Environment(**{**defaults, **settings}),
    )
    await server.start()
    try:
        yield Scene(engine, opened, server.base_url, server.open(opened.answer))
    finally:
        await server.close()
        await engine.close()
