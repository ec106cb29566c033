# pyright: basic, reportMissingImports=false
"""An engine of your own in a run: the ``generate`` of transformers, of which staleflow knows nothing::

staleflow run configs/smoke.toml --run-dir runs/smoke
python -m staleflow.examples.foreign_engine runs/smoke      # in another terminal, as often as you like
"""

import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import staleflow


def generate(model: Any, tokenizer: Any, lease: staleflow.Lease) -> tuple[list[int], list[staleflow.Sample]]:
    """Return the token ids of the prompt, and one group of samples."""
    prompt = tokenizer(lease.row["prompt"], return_tensors="pt")["input_ids"]
    output = model.generate(
        prompt,
        do_sample=True,
        num_return_sequences=lease.group_size,
        max_new_tokens=lease.sampling.max_new_tokens,
        temperature=lease.sampling.temperature,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    completions = output.sequences[:, prompt.shape[1] :]
    logits = torch.stack(output.logits, dim=1) / lease.sampling.temperature
    logprobs = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    samples: list[staleflow.Sample] = []
    for ids, values in zip(completions.tolist(), logprobs.tolist(), strict=True):
        stopped = tokenizer.eos_token_id in ids
        end = ids.index(tokenizer.eos_token_id) + 1 if stopped else len(ids)  # padding follows the stop token
        sample = staleflow.Sample(token_ids=ids[:end], logprobs=values[:end], finish="stop" if stopped else "length")
        samples.append(sample)
    return prompt[0].tolist(), samples


def main(run: str) -> None:
    with staleflow.RolloutClient(run, name=f"foreign-{os.getpid()}") as client:
        tokenizer = AutoTokenizer.from_pretrained(client.model_dir)
        model = AutoModelForCausalLM.from_pretrained(client.model_dir)
        client.load = lambda weights: weights.copy_to(model)
        for lease in client.leases():
            client.push(lease, *generate(model, tokenizer, lease))


if __name__ == "__main__":
    main(*sys.argv[1:])
