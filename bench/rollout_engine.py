# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Tokens a second of the embedded engine beside ``model.generate`` of the same model, on one core.

    OMP_NUM_THREADS=1 python bench/rollout_engine.py [--hidden 128] [--layers 4] [--tokens 64]

Lengths vary: each request ends after a number of tokens drawn once. ``generate`` takes them in batches of as many as
the engine has rows and runs each batch to its longest; the engine admits the next request as soon as a row is free.
"""

import time
from typing import Any

import click
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.progress import tracked
from staleflow.clients.rollout.engines.base import Request, Sampling
from staleflow.clients.rollout.engines.transformers.engine import TransformersEngine


@click.command()
@click.option("--hidden", default=128)
@click.option("--layers", default=4)
@click.option("--tokens", default=64, help="Longest completion; the mean is half of it.")
@click.option("--waves", default=8, help="Requests, as a multiple of the rows.")
def main(hidden: int, layers: int, tokens: int, waves: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(hidden, layers)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, one thread; tokens/s by wall clock (by CPU time)"
    )
    print(f"{'concurrent':>10} {'staleflow':>20} {'model.generate':>20}")
    for rows in tracked("at once", (1, 16, 64)):
        rng = np.random.default_rng(rows)
        prompts = rng.integers(3, 64, (rows * waves, 12))
        lengths = rng.integers(1, tokens + 1, rows * waves)
        ours, theirs = timed(engine, model, prompts, lengths, rows), timed(padded, model, prompts, lengths, rows)
        print(f"{rows:>10} {ours:>20} {theirs:>20}")


def build(hidden: int, layers: int) -> Any:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def timed(run: Any, model: Any, prompts: Any, lengths: Any, rows: int) -> str:
    run(model, prompts[:rows], np.minimum(lengths[:rows], 4), rows)  # warm up
    wall, cpu = time.perf_counter(), time.process_time()
    run(model, prompts, lengths, rows)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{lengths.sum() / wall:,.0f} ({lengths.sum() / cpu:,.0f})"


def engine(model: Any, prompts: Any, lengths: Any, rows: int) -> None:
    serving = TransformersEngine(model, [], slots=rows)
    for id, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(max_new_tokens=int(length))
        serving.submit(Request(id=id, prompt_ids=prompt.astype(np.int32), sampling=sampling, seed=id))
    done = 0
    while done < len(prompts):
        done += len(serving.step())


def padded(model: Any, prompts: Any, lengths: Any, rows: int) -> None:
    with torch.inference_mode():
        for start in range(0, len(prompts), rows):
            batch = torch.from_numpy(prompts[start : start + rows])
            longest = int(lengths[start : start + rows].max())
            model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )


if __name__ == "__main__":
    main()
