# pyright: basic, reportMissingImports=false
"""The attention implementation of the trained model: ``trainer.attention``."""

import logging
from typing import Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from staleflow.clients.models.packed_attention import NAME, use_packed_attention
from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config

log = logging.getLogger(__name__)


class Attention:
    """The implementation of every model that the trainer loads."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._wanted = config.trainer.attention
        self._packing = config.trainer.packing
        self._flash = is_flash_attn_2_available() and device.type == "cuda" and config.model.dtype == "bfloat16"
        self._dense = False
        """True if packed passes need a dense mask, which is the case if a model mixes their trajectories without it."""
        if device.type == "cpu" and self._wanted.startswith("fl"):
            allowed = 'it needs a GPU: on a CPU "auto", "sdpa" or "eager"'
            raise ConfigError("trainer.attention", self._wanted, allowed)

    def apply(self, model: Any) -> None:
        """Set the implementation of a loaded model. ``ConfigError`` if the model does not support it."""
        if self._wanted != "auto":
            _set(model, self._wanted)
        elif self._packing and self._flash and model._supports_flash_attn:
            _set(model, "flash_attention_2")
        if self._packing and not self._dense:
            use_packed_attention(model)

    def takes_boundaries(self, model: Any) -> bool:
        """Return whether packed passes must give the model the ends of their trajectories."""
        implementation: str = model.config.get_text_config()._attn_implementation
        return implementation == NAME or implementation.startswith("flash_attention")

    def fall_back(self, model: Any) -> bool:
        """Use a dense mask from now on. Return whether the model did not use one before."""
        config = model.config.get_text_config()
        if config._attn_implementation != NAME:
            return False
        log.info("packed passes use a dense attention mask, without which this model would mix their trajectories")
        self._dense, config._attn_implementation = True, "sdpa"
        return True


def _set(model: Any, name: str) -> None:
    try:
        model.set_attn_implementation(name)
        why = "it cannot be changed"
    except (ValueError, ImportError) as error:
        why = (str(error).splitlines() or [""])[0]
    if model.config._attn_implementation != name:
        raise ConfigError("trainer.attention", name, f'this model does not support it; "auto" suits any model ({why})')
