"""The column ``routed_experts`` of ``trainer.router_replay``: the experts selected for each completion token.

The value of a token is [MoE layers, experts per token]: the experts that the engine's routers selected in the pass that
sampled the token, at the position of the token before it. It therefore belongs to the same version as the token and its
log-probability. Tokens of an environment have zeros, which mean nothing.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.messages import ModelLimits
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.typed_columns import Dtype, TypedColumn

NAME: Final = "routed_experts"
COLUMN: Final = TypedColumn(name=NAME, per="token", dtype="uint8", shape=None)


def dtype_of(experts: int) -> Dtype:
    """Return the dtype of the column for a model with this number of experts in each layer."""
    return "uint8" if experts <= 256 else "uint16"


def unlike_most(arrays: Sequence[Array]) -> dict[int, str]:
    """Return the places of records that differ in dtype or dimensions from those of most groups, with the reason.

    A batch has one array for all its groups. Without limits of the model, no shard has refused the others.
    """
    forms = [f"{array.dtype}[tokens, {', '.join(map(str, array.shape[1:]))}]" for array in arrays]
    usual = max(Counter(forms).items(), key=lambda item: item[1], default=("", 0))[0]
    return {
        place: f"column {NAME} is {form}; in most groups of the batch it is {usual}"
        for place, form in enumerate(forms)
        if form != usual
    }


def check_experts(array: Array, model: ModelLimits) -> None:
    """Raise ``ProtocolError`` for records that this model cannot replay. An index out of range ends a GPU process.

    Nothing is checked if the model is unknown.
    """
    if not model.experts:
        return
    dtype, shape = dtype_of(model.experts), (model.moe_layers, model.experts_per_token)
    if array.dtype != dtype or array.shape[1:] != shape:
        expected = f"{dtype}[tokens, {shape[0]}, {shape[1]}], as the trained model's MoE layers and experts per token"
        detail = f"column {NAME} is {array.dtype}{list(array.shape)}; it must be {expected}"
        raise ProtocolError(Code.MALFORMED, detail)
    if (highest := int(np.max(array, initial=0))) >= model.experts:
        detail = f"column {NAME} holds {highest}; the trained model has {model.experts} experts in a layer, from 0"
        raise ProtocolError(Code.MALFORMED, detail)
