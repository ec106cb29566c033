"""Question and answer of the process that measures (``measure``)."""

import msgspec

from staleflow.configs.schema import Config


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The passes to measure."""

    config: Config
    directory: str
    """Model directory of the policy. Its ``config.json`` suffices."""
    reference: str = ""
    """Model directory of the reference stage; empty: the run has none."""
    critic: str = ""
    """Model directory of the critic's backbone; empty: the run has none."""
    prompt_tokens: int
    """Assumed length of a prompt."""
    gpu: bool = False
    """True if the models compute on a GPU, where attention with shared prompts repeats key heads."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the models and of their passes: numbers of parameters, and bytes."""

    parameters: int
    """All parameters of the policy, those of an adapter included."""
    trained: int
    """Those that the trainer updates."""
    narrow: int
    """Trained parameters in another dtype than float32, of which the trainer has a float32 copy."""
    weights: int
    """Bytes of the policy's weights, without that copy."""
    trained_weights: int
    """Bytes of the trained ones among them: those of a published version."""
    layer: int
    """Parameters of the largest layer."""
    outside: int
    """Parameters outside the layers: embeddings and output layer."""
    kv_token: int = 0
    """Bytes of keys and values that an engine stores for one token."""
    kv_capacity: int = 0
    """Tokens of a row in the cache of the ``transformers`` engine once it has its largest capacity."""
    prefill: int = 0
    """Bytes of an engine's pass over prompts, beside keys and values."""
    vocabulary: int = 0
    context: int = 0
    """Maximum number of tokens of prompt and completion; 0: unlimited."""
    pass_tokens: int = 0
    """Tokens of the measured pass of the trainer: whole groups, or rows, with completions of the maximum length."""
    complete: bool = False
    """True if that pass has all rows of a step: no pass is larger."""
    activations: int = 0
    """Bytes that a pass of the trainer needs at its peak, without ``logits``, and without the step's gradients."""
    logits: int = 0
    """Bytes of logits and their gradient in a pass of the trainer."""
    reference_parameters: int = 0
    reference_pass: int = 0
    critic_parameters: int = 0
    critic_pass: int = 0
    problems: list[str] = msgspec.field(default_factory=list[str])
    """Measurements that failed, each with the reason."""
