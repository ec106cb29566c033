# pyright: basic, reportMissingImports=false
"""Measure the memory of models and passes with fake tensors: the real code runs, and no number is computed or stored.

``python -m staleflow.clients.memory.measure`` reads a ``Question`` on stdin and writes a ``Measured`` on stdout; the
calling process does not import torch. Fake tensors are on the CPU even for a plan of GPUs, because a torch without CUDA
aborts on fake ones there. Both devices keep the same tensors for the backward pass of sdpa's flash kernels.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM

from staleflow.clients.memory.allocations import Allocations
from staleflow.clients.memory.question import Measured, Question
from staleflow.clients.models.gradient_checkpointing import checkpoint_gradients
from staleflow.clients.models.likelihood import token_logprobs
from staleflow.clients.models.lora import inject
from staleflow.clients.rollout.engines.transformers.engine import MAX_PREFILL_TOKENS
from staleflow.clients.rollout.engines.transformers.kv_cache import grown
from staleflow.clients.stage.critic import ValueModel
from staleflow.clients.trainer.backends.collectives import OneRank
from staleflow.clients.trainer.backends.flops import FlopsMeter
from staleflow.clients.trainer.backends.prompt_attention import fake_tensors
from staleflow.clients.trainer.backends.sharded_files import layers
from staleflow.clients.trainer.backends.shared_prompts import why_not_tried
from staleflow.clients.trainer.backends.single import PlainLearner
from staleflow.clients.trainer.data.batch import TrainBatch
from staleflow.clients.trainer.model_passes import ModelPasses
from staleflow.configs.schema import Config
from staleflow.protocols.consistency.ids import BatchId, GroupId, Lineage, Step

CPU = torch.device("cpu")


def measured(question: Question) -> Measured:
    """Return all sizes. A pass that cannot be measured is 0, and listed in ``problems``."""
    config, problems = question.config, list[str]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(config, Path(question.directory), config.model.dtype)
        result = _sizes(model)
        attempt = _Attempts(problems)
        result = attempt("the engine's passes", result, lambda: _engine(result, model, question))
        result = attempt("the trainer's passes", result, lambda: _trainer(result, question))
        if question.reference:
            result = attempt("the reference model", result, lambda: _reference(result, question))
        if question.critic:
            result = attempt("the critic", result, lambda: _critic(result, question))
    return replace(result, problems=problems)


class _Attempts:
    """Run a measurement; if the model raises, record why and keep the result so far."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __call__(self, what: str, before: Measured, measure: Callable[[], Measured]) -> Measured:
        try:
            return measure()
        except Exception as error:
            # Models whose tensor sizes depend on values, such as some mixtures of experts, cannot run without values.
            self._problems.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            return before


def _model(config: Config, directory: Path, dtype: str, *, adapter: bool = True) -> Any:
    own = AutoConfig.from_pretrained(directory, local_files_only=True)
    build: Any = AutoModelForCausalLM.from_config
    with unset_fake_temporarily(), torch.device("meta"):  # peft moves its layers, which fake ones refuse
        model = build(own, dtype=getattr(torch, dtype)).requires_grad_(True)
        if adapter and config.model.lora.rank:
            inject(model, config.model.lora)
    _fill(model)
    return model.eval()


def _fill(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by fake ones on the CPU; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in made:
                value = torch.empty_like(tensor, device=CPU)
                whole = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if whole else value
            setattr(module, name, made[id(tensor)])


def _sizes(model: Any) -> Measured:
    config = model.config.get_text_config()
    parts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers(model)]
    parameters = [*model.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in parameters)
    return Measured(
        parameters=total,
        trained=sum(parameter.numel() for parameter in trained),
        narrow=sum(parameter.numel() for parameter in trained if parameter.dtype != torch.float32),
        weights=sum(parameter.nbytes for parameter in parameters),
        trained_weights=sum(parameter.nbytes for parameter in trained),
        layer=max(parts, default=0),
        outside=total - sum(parts),
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None) or 0,
    )


def _engine(result: Measured, model: Any, question: Question) -> Measured:
    """Measure a pass over prompts, and the keys and values that it stores."""
    length = _prompt(question, result)
    rows = max(1, min(MAX_PREFILL_TOKENS // length, question.config.rollout.max_inflight))
    with Allocations() as count, torch.no_grad():
        output = model(input_ids=torch.zeros(rows, length, dtype=torch.int64), use_cache=True, logits_to_keep=1)
        stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
    capacity, longest = grown(0, length), sum(_lengths(question, result))
    while capacity < longest:
        capacity = grown(capacity, capacity + 1)
    kv_token, prefill = stored // (rows * length), max(0, count.peak - stored)
    return replace(result, kv_token=kv_token, kv_capacity=capacity, prefill=prefill)


def _trainer(result: Measured, question: Question) -> Measured:
    """Measure the second pass of a step: the gradients of the first one exist already."""
    config = question.config
    if config.trainer.attention.startswith("fl"):  # refused on a CPU; flash attention keeps what sdpa's kernels keep
        config = replace(config, trainer=replace(config.trainer, attention="sdpa"))
    # The boundaries of packed rows are values; without padding, equal rows need the same memory in a padded pass.
    config = replace(config, trainer=replace(config.trainer, packing=False))
    model = _model(config, Path(question.directory), config.model.dtype)
    ranks, passes = OneRank(CPU), ModelPasses(config, OneRank(CPU))
    passes.apply(model)
    if how := config.trainer.gradient_checkpointing:
        checkpoint_gradients(model, selective=how == "selective")
    learner = PlainLearner(model, config, ranks)
    if config.trainer.backend in ("fsdp", "deepspeed"):  # they reduce and release each layer's gradient at once
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_release_gradient)
    passes.use(learner, FlopsMeter(model, ranks, config.model))
    shared = passes.assume(shares_prompts=not why_not_tried(model), whole_logits=not _logits_are_the_layers(model))
    batch = _batch(question, result, shared=shared)
    rows = np.arange(len(batch.rewards))
    with fake_tensors(gpu=question.gpu), Allocations() as count, passes.computing():
        for _ in range(2):
            base = count.reset_peak()
            learner.backward(passes.logprobs(batch, rows, last=False).sum(), last=False)
    peak = max(0, count.peak - base)
    tokens = int(batch.completion_lengths.sum())
    chunk = min(tokens, config.trainer.logit_chunk or tokens)
    logits = min(2 * chunk * result.vocabulary * getattr(torch, config.model.dtype).itemsize, peak)
    return replace(
        result,
        pass_tokens=passes.size(batch, rows),
        complete=len(rows) == _rows_of_a_step(config),
        activations=peak - logits,
        logits=logits,
    )


def _release_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@torch.no_grad()
def _logits_are_the_layers(model: Any) -> bool:
    """Return whether the model's logits are the tensor that its output layer returned."""
    returned: list[Any] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: returned.append(output))
    try:
        logits = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
    finally:
        hook.remove()
    return bool(returned) and logits.untyped_storage()._cdata == returned[-1].untyped_storage()._cdata


def _reference(result: Measured, question: Question) -> Measured:
    dtype = question.config.reference.dtype or question.config.model.dtype
    model = _model(question.config, Path(question.reference), dtype, adapter=False)
    ids, mask = _padded(question, result)
    with Allocations() as count, torch.no_grad():
        token_logprobs(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids, 1.0)
    return replace(result, reference_parameters=_sizes(model).parameters, reference_pass=count.peak)


def _critic(result: Measured, question: Question) -> Measured:
    """Measure a backward pass of the critic, whose weights are float32 whatever it computes in."""
    dtype = getattr(torch, question.config.critic.dtype)
    model = ValueModel(_model(question.config, Path(question.critic), "float32", adapter=False).base_model)
    ids, mask = _padded(question, result)
    with Allocations() as count:
        for _ in range(2):
            base = count.reset_peak()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                values = model(ids, mask)
            values.float().sum().backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return replace(result, critic_parameters=parameters, critic_pass=count.peak - base)


def _prompt(question: Question, result: Measured) -> int:
    """Return the assumed length of a prompt, which leaves room for one token in the model's context."""
    return max(1, min(question.prompt_tokens, (result.context or 1 << 62) - 1))


def _lengths(question: Question, result: Measured) -> tuple[int, int]:
    """Return the tokens of a prompt and of the longest completion."""
    prompt = _prompt(question, result)
    return prompt, min(question.config.rollout.max_new_tokens, (result.context or 1 << 62) - prompt)


def _padded(question: Question, result: Measured) -> tuple[torch.Tensor, torch.Tensor]:
    length = sum(_lengths(question, result))
    rows = max(1, question.config.trainer.micro_tokens // length)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return ids, torch.ones_like(ids)


def _batch(question: Question, result: Measured, *, shared: bool) -> TrainBatch:
    """Return the groups of a full pass, with completions of the maximum length."""
    trainer, size = question.config.trainer, question.config.rollout.group_size
    prompt, completion = _lengths(question, result)
    most = _rows_of_a_step(question.config)
    if not shared:
        rows = max(1, trainer.micro_tokens // (prompt + completion))
    elif (groups := trainer.micro_tokens // (prompt + size * completion)) > 0:
        rows = groups * size
    else:
        rows = max(1, (trainer.micro_tokens - prompt) // completion)
    rows = min(rows, most)
    shape = (rows, prompt + completion)
    written = np.broadcast_to(np.arange(shape[1]) >= prompt, shape)
    return TrainBatch(
        step=Step(0),
        batch=BatchId(1),
        lineage=Lineage(0),
        digest="",
        attempt=1,
        input_ids=np.zeros(shape, np.int64),
        attention_mask=np.ones(shape, np.int64),
        loss_mask=written.copy(),
        behavior_logprobs=np.zeros(shape, np.float32),
        token_versions=np.where(written, 0, -1),
        rewards=np.zeros(rows, np.float32),
        group_ids=np.array([GroupId(row // size) for row in range(rows)], np.int64),
        completion_lengths=np.full(rows, completion, np.int64),
        cut=np.zeros(rows, np.bool_),
        masked_tokens=0,
        rows=({},) * rows,
    )


def _rows_of_a_step(config: Config) -> int:
    return max(1, -(-config.trainer.batch_size * config.rollout.group_size // config.trainer.nproc))


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    warnings.simplefilter("ignore")
    sys.stdout.buffer.write(msgspec.json.encode(measured(question)))


if __name__ == "__main__":
    main()
