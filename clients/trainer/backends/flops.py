# pyright: basic, reportMissingImports=false
"""Model FLOP utilisation of a train step, as in PaLM (Chowdhery et al. 2022)."""

from typing import Any

import torch

from staleflow.clients.trainer.backends.collectives import Ranks
from staleflow.configs.schema import Model

PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "B200": (2250e12, 75e12),
    "B100": (1750e12, 60e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "RTX 4090": (165.2e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}
"""Dense FLOP/s in bfloat16 and float32 (without TF32) from the vendors' data sheets, by a part of the device's name.
The first match counts."""


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's configuration that hold the number of routed experts per layer."""


def peak_flops(device: str, model: Model) -> float | None:
    """Return the FLOP/s of a device by its name, in the model's precision; None for unknown devices."""
    for name, (bfloat16, float32) in PEAKS.items():
        if name in device:
            tf32 = bfloat16 / 2  # of the dense tensor cores, on all of these devices
            return bfloat16 if model.dtype == "bfloat16" else tf32 if model.matmul_precision == "high" else float32
    return None


def step_flops(parameters: float, layers: int, width: int, *, tokens: int, squares: int) -> float:
    """Return the FLOPs of forward and backward over sequences of these total and squared lengths.

    ``6 P`` per token, plus ``6 layers width n^2`` per sequence for causal attention (12 without causality).
    """
    return 6.0 * parameters * tokens + 6.0 * layers * width * squares


def active_parameters(model: Any, config: Any) -> float | None:
    """Return the parameters used by one token; of routed experts, only the fraction that it uses counts.

    Frozen parameters count for two thirds: a step computes gradients through them, but none of them. None if the
    model's ``config`` does not give that fraction, or the experts' parameters cannot be identified.
    """
    routed = sum(_work(p) for name, p in model.named_parameters() if "experts" in name.split("."))
    total = sum(_work(p) for p in model.parameters())
    experts: int = next((count for key in _EXPERTS if (count := getattr(config, key, None))), 0)
    used: int | None = getattr(config, "num_experts_per_tok", None)
    if not routed and not experts:
        return total
    return total - routed + routed * used // experts if routed and experts and used else None


def _work(parameter: torch.Tensor) -> float:
    return parameter.numel() if parameter.requires_grad else parameter.numel() * 2 / 3


class FlopsMeter:
    """FLOP utilisation of one model on one kind of device. Create it before a backend shards the model."""

    def __init__(self, model: Any, ranks: Ranks, settings: Model) -> None:
        config = model.config.get_text_config()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        looked_up = 0 if tied else _work(model.get_input_embeddings().weight)  # a lookup performs no multiplication
        active = active_parameters(model, config)
        self._parameters = None if active is None else active - looked_up
        head = model.get_output_embeddings()
        self._head = 0.0 if head is None else _work(head.weight)
        self._flops = 0.0
        self._layers = config.num_hidden_layers
        heads = config.num_attention_heads
        self._width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._ranks = ranks
        cuda = ranks.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(ranks.device), settings) if cuda else None

    @property
    def measures(self) -> bool:
        """True if the peak and the active parameters are known."""
        return self._peak is not None and self._parameters is not None

    def begin(self) -> None:
        """Start or restart a step."""
        self._flops = 0.0

    def count(self, *, tokens: int, squares: int, logits: int, share: float = 1.0) -> None:
        """Count a pass of this rank, with logits for that many of its tokens.

        ``share``: of forward and backward; a third for a pass without gradient.
        """
        if self._parameters is not None:
            flops = step_flops(self._parameters, self._layers, self._width, tokens=tokens, squares=squares)
            self._flops += share * (flops - 6.0 * self._head * (tokens - logits))

    def values(self, seconds: float) -> dict[str, float]:
        """Return ``perf/mfu`` of a step over all ranks; empty if the peak or the active parameters are unknown."""
        if self._peak is None or self._parameters is None:
            return {}
        total = float(self._ranks.sum(torch.tensor([self._flops], dtype=torch.float64))[0])
        return {"perf/mfu": total / (max(seconds, 1e-9) * self._peak * self._ranks.place.world)}
