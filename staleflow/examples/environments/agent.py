"""An agent with a tool, written with the ``openai`` package as for any model: it knows nothing of staleflow.

The policy calls ``calculator``, reads its result and answers. Only the policy's tokens are trained; the description of
the tool and its results are context and masked.
"""

import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, BadRequestError

from staleflow.clients.rollout.episodes.env_client import Client
from staleflow.examples.environments.calculator import calculate

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add or subtract two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


class CalculatorAgent:
    """Rows need ``prompt`` (the question) and ``answer``."""

    def __init__(self, max_calls: int = 3) -> None:
        """``max_calls``: calls of the policy, the last of which has to be the answer."""
        self.max_calls = max_calls

    async def rollout(self, client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        """``reward``: 1 for exactly the answer; ``calculated``: the number of results that the tool returned."""
        results: list[str] = []
        try:
            async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
                answer = await self._run(policy, row["prompt"], results)
        except BadRequestError as error:
            if error.code != "episode_over":  # interrupted: score what there is
                raise
            answer = ""
        calculated = len(results) - results.count("?")
        return {"reward": float(answer.strip() == row["answer"]), "calculated": float(calculated)}

    async def _run(self, policy: AsyncOpenAI, question: str, results: list[str]) -> str:
        """Return the first answer without tool calls, "" if there is none. ``results`` receives those of the tool."""
        messages: list[Any] = [{"role": "user", "content": question}]
        for _ in range(self.max_calls):
            reply = await policy.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = run_tool(call.function.name, call.function.arguments) if call.type == "function" else "?"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                results.append(result)
        return ""


def run_tool(name: str, arguments: str) -> str:
    """Return the value of the expression; ``?`` if the policy called another tool or gave no expression."""
    expression = json.loads(arguments).get("expression")
    return calculate(expression) if name == "calculator" and isinstance(expression, str) else "?"
