# pyright: basic, reportMissingImports=false
"""The routers of a mixture of experts: record the experts that they choose, or replay recorded ones.

A router of ``transformers`` selects its experts with ``torch.topk``. The result of that call is recorded or replaced
while the router computes. The weights of replayed experts come from the router's own scores, so that its gradient
remains, and gradient checkpointing repeats the choice as long as the records are set.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from staleflow.configs.errors import ConfigError
from staleflow.configs.rules.router_replay import KEY
from staleflow.protocols.wire.routed_experts import NAME, dtype_of
from staleflow.protocols.wire.typed_columns import TypedColumn

ROUTER_NAMES = ("gate", "router")
"""Names of the module beside ``experts`` that selects them."""
ROUTER_SIZES = ("num_experts", "top_k")
"""Attributes of a router: number of experts, and number of those that it selects for a token."""
_PROBE = 8
"""Number of tokens in the check of a model."""


class Routers:
    """The routers of ``model``, from the first MoE layer to the last. ``ConfigError`` for a model without any."""

    def __init__(self, model: Any) -> None:
        found = list(_routers(model))
        if not found:
            raise ConfigError(KEY, True, f"{_name(model)} has no router that selects experts; set it to false")
        sizes = {(router.num_experts, router.top_k) for router, _ in found}
        if len(sizes) > 1:
            layers = ", ".join(f"{top_k} of {experts}" for experts, top_k in sorted(sizes))
            raise ConfigError(KEY, True, f"the layers of {_name(model)} select {layers} experts; set it to false")
        self.layers = len(found)
        ((self.experts, self.per_token),) = sizes
        self._chosen: list[Tensor] | None = None
        """While recording: the choices of each router, in the order of the layers."""
        self._records: tuple[Tensor, Tensor] | None = None
        self._counts: Tensor | None = None
        for layer, (router, _) in enumerate(found):
            router.forward = partial(self._route, layer, router.forward)

    @property
    def column(self) -> TypedColumn:
        """Return the column of this model's records."""
        shape = (self.layers, self.per_token)
        return TypedColumn(name=NAME, per="token", dtype=dtype_of(self.experts), shape=shape)

    @contextmanager
    def recording(self) -> Generator[list[Tensor]]:
        """Yield a list that one pass fills: int64 [tokens, experts per token] for each layer."""
        chosen: list[Tensor] = []
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def replay(self, experts: Tensor, known: Tensor) -> None:
        """Replay in all passes until ``stop``, which have as many tokens.

        ``experts``: [tokens, layers, experts per token]. ``known``: bool [tokens]; the router chooses for the others.
        """
        self._records = experts, known
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.float64, device=known.device)

    def stop(self) -> None:
        """Let every router choose for itself."""
        self._records = None

    def take_counts(self) -> Tensor | None:
        """Return the number of replayed choices, one for each token and layer, and how many of them differ from the
        router's own, since the last call; None without a replay."""
        counts, self._counts = self._counts, None
        return counts

    def check(self, model: Any, forward: Callable[..., Any], device: torch.device) -> None:
        """Raise ``ConfigError`` unless a replay determines the experts that compute. On every rank of a sharded model.

        ``forward``: run the model.
        """
        received: list[Tensor] = []

        def look(_: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
            received.extend(value for value in tensors if not value.is_floating_point())

        hooks = [experts.register_forward_pre_hook(look, with_kwargs=True) for _, experts in _routers(model)]
        ids = (torch.arange(_PROBE, device=device) % model.config.get_text_config().vocab_size)[None]
        try:
            with torch.no_grad(), self.recording() as chosen:
                forward(input_ids=ids)
            others = [(each + 1) % self.experts for each in chosen]
            wanted = [*chosen, *others]
            if len(others) == self.layers:
                self.replay(torch.stack(others, 1), torch.ones(_PROBE, dtype=torch.bool, device=device))
                with torch.no_grad():
                    forward(input_ids=ids)
        finally:
            self.stop()
            self._counts = None
            for hook in hooks:
                hook.remove()
        same = len(received) == len(wanted) == 2 * self.layers
        if not same or not all(torch.equal(ours, theirs) for ours, theirs in zip(received, wanted, strict=True)):
            allowed = f"the routers of {_name(model)} do not select their experts with torch.topk; set it to false"
            raise ConfigError(KEY, True, allowed)

    def _route(self, layer: int, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._chosen is None and self._records is None:
            return forward(*arguments, **named)
        with _Selection(self, layer):
            return forward(*arguments, **named)

    def select(self, layer: int, scores: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and indices of the experts that a router selects; ``own``: its own choice."""
        if self._records is not None:
            experts, known = self._records
            recorded = experts[:, layer].long()
            selected = torch.where(known[:, None], recorded, own)
            self._count(own, recorded, known)
            own, values = selected, scores.gather(-1, selected)
        if self._chosen is not None:
            self._chosen.append(own)
        return values, own

    @torch.no_grad()
    def _count(self, own: Tensor, recorded: Tensor, known: Tensor) -> None:
        if self._counts is not None:
            differ = (own.sort(-1).values != recorded.sort(-1).values).any(-1) & known
            self._counts += torch.stack([known.sum(), differ.sum()])


class _Selection(TorchFunctionMode):
    """Intercept the call by which one router selects its experts; not those over groups of experts."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers = routers
        self._layer = layer

    def __torch_function__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") != "topk":
            return result
        scores, (values, own) = args[0], result
        sizes = scores.shape[-1], own.shape[-1]
        if scores.dim() != 2 or sizes != (self._routers.experts, self._routers.per_token):
            return result
        return torch.return_types.topk(self._routers.select(self._layer, scores, values, own))


def _routers(model: Any) -> Generator[tuple[Any, Any]]:
    """Yield each router with the module of its experts, from the first layer to the last."""
    for block in model.modules():
        children = dict(block.named_children())
        router = next((children[name] for name in ROUTER_NAMES if name in children), None)
        if "experts" in children and all(isinstance(getattr(router, size, None), int) for size in ROUTER_SIZES):
            yield router, children["experts"]


def _name(model: Any) -> str:
    return str(getattr(model.config, "model_type", type(model).__name__))
