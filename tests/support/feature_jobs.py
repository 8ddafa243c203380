# SPDX-License-Identifier: Apache-2.0
"""One engine asked the same in several ways: in chunks, from its prefix cache, and without its sinks."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from support.jobs import ENGINE, call

NEW_TOKENS = 6
BLOCK, BUDGET = 32, 16  # of the KV cache, the smallest that CPU attention takes; and of a step
LONG = [(7 * position + position**2 // 3) % 120 + 3 for position in range(70)]
# Longer than two blocks; one block shared with that; one block long; shorter than most windows
PROMPTS = [LONG, [*LONG[:36], 90, 14, 9, 33], LONG[20:52], [9, 4, 33, 70, 21]]
FEATURES = {
    "max_model_len": 128,
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": BUDGET,
}


def served(checkpoint: str, drop: str = "support.tampers:drop_sinks", **engine) -> dict:
    """What one engine gives for `PROMPTS`: first with prompt logprobs, then from its prefix cache, then without sinks.

    Args:
        checkpoint: folder of the model.
        drop: `module:function` of the tests, which takes the sinks from the attention backend that serves.
        engine: arguments of `LLM`.

    Returns:
        `first`, `cached` and `dropped`: for each prompt its tokens, the greedy continuation, the log-softmax
        rows of that, those of the prompt (only in `first`), and how many tokens came from the cache;
        `largest_step`: the most tokens of one request that one step computed.
    """
    from vllm import LLM

    with _largest_step() as steps:
        llm = LLM(checkpoint, **{**ENGINE, **FEATURES, **engine})
        first, cached = _rows(llm, prompt_logprobs=-1), _rows(llm)
        call(drop)
        llm.reset_prefix_cache()
        return {"first": first, "cached": cached, "dropped": _rows(llm), "largest_step": max(steps)}


@contextmanager
def _largest_step() -> Iterator[list[int]]:
    """The largest number of tokens that each step computes for one request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule
    steps: list[int] = []

    def noting(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        steps.append(max(output.num_scheduled_tokens.values(), default=0))
        return output

    Scheduler.schedule = noting
    yield steps


def _rows(llm, **sampling) -> list[tuple]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=-1, ignore_eos=True, detokenize=False, **sampling
    )
    outputs = [llm.generate([{"prompt_token_ids": p}], parameters, use_tqdm=False)[0] for p in PROMPTS]
    return [
        (
            prompt,
            list(output.outputs[0].token_ids),
            _table(output.outputs[0].logprobs),
            _table(output.prompt_logprobs[1:]) if output.prompt_logprobs else None,
            output.num_cached_tokens,
        )
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]


def _table(entries) -> np.ndarray:
    """Log-softmax rows [N, V]."""
    table = np.full((len(entries), max(entries[0]) + 1), -np.inf)
    for row, entry in zip(table, entries, strict=True):
        row[list(entry)] = [logprob.logprob for logprob in entry.values()]
    return table


def has_fp8_kernels() -> bool:
    """Whether this CPU has the instructions for which vLLM's kernels for an FP8 KV cache are built."""
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


FP8 = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def fp8_reference_rows(checkpoint: str, sequences: list[list[int]], kv_cache_dtype: str, module: str) -> list:
    """Hugging Face eager's log-softmax rows, its keys and values cut as vLLM's CPU cache of `kv_cache_dtype` cuts them.

    vLLM's CPU kernels drop the bits that FP8 has no room for, where torch rounds to nearest.

    Args:
        checkpoint: folder of the model.
        sequences: the tokens.
        kv_cache_dtype: of `FP8`; scales are 1, as vLLM's are by default.
        module: Transformers' module of the model, whose attention is replaced.
    """
    import importlib

    import torch

    from support.jobs import reference_rows

    dtype = getattr(torch, FP8[kv_cache_dtype])
    modeling = importlib.import_module(module)
    attention = modeling.eager_attention_forward

    def cut(states):
        nearest = states.to(dtype)
        away_from_zero = nearest.to(states.dtype).abs() > states.abs()
        return (nearest.view(torch.uint8) - away_from_zero.byte()).view(dtype).to(states.dtype)

    def with_cut_cache(layer, query, key, value, *args, **kwargs):
        return attention(layer, query, cut(key), cut(value), *args, **kwargs)

    modeling.eager_attention_forward = with_cut_cache
    return reference_rows(checkpoint, sequences)
