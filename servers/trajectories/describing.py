"""Send the features of prompts to the scheduler as it requests them.

Consumes the rows that the prompt queue is about to issue, produces their features; waits inside one call at a time.
"""

import asyncio

from staleflow.configs.loading.prompt_rows import PromptRows
from staleflow.net.client import Client
from staleflow.net.errors import Refused
from staleflow.protocols.wire.messages import PromptFeatures, PromptFeaturesReply
from staleflow.protocols.wire.tensors import specs_and_frames
from staleflow.servers.trajectories.prompt_features import feature_matrix


async def describe(scheduler: Client, prompts: PromptRows, shard: int) -> None:
    """Serve feature requests until the run is over."""
    rows: list[int] = []
    while True:
        features = {"features": await asyncio.to_thread(feature_matrix, prompts, rows)} if rows else {}
        specs, frames = specs_and_frames(features)
        try:
            answer = await scheduler.ask(
                PromptFeatures(shard=shard, rows=rows, frames=specs), PromptFeaturesReply, frames, timeout_s=None
            )
        except Refused:
            return
        rows = answer.rows
