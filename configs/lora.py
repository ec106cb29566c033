"""``[model.lora]``: the trained part of the policy, if that is not the whole model."""

from typing import Annotated

from msgspec import Meta, field

from staleflow.configs.section import PositiveFloat, Section, Text


class Lora(Section, frozen=True, kw_only=True):
    """Train a LoRA adapter of ``peft`` (an extra, ``lora``) and leave the model's own weights as they are. Versions and
    checkpoints hold the adapter only; every process reads the model itself from ``model.path`` or the run directory.
    """

    rank: Annotated[int, Meta(ge=0, le=512)] = 0
    """Rank of the adapter; 0: no adapter, the whole model is trained. Memory, bytes of a version and capacity to learn
    grow with it. An adapter needs about ten times the ``trainer.lr`` of the whole model."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is multiplied by ``alpha`` / ``rank``. A higher value acts like a higher learning rate."""
    target_modules: list[Text] = field(default_factory=list[Text])
    """Names of the linear layers that get an adapter, as in ``peft``: ``["q_proj", "v_proj"]``. Empty: all linear
    layers except the output layer (``all-linear``). Routed experts get none."""
    path: Text = ""
    """Adapter to start from: a folder of ``peft``, for example a checkpoint of another run, with this rank, alpha and
    base model. Empty: a new adapter without any effect. The reference model is the base model in both cases."""
