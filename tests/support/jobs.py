# SPDX-License-Identifier: Apache-2.0
"""What runs in a fork of a fork_server: a checkpoint served by vLLM, or evaluated by Hugging Face."""

import numpy as np

PROMPTS = [[3, 17, 29, 5, 41, 8, 2, 77, 60, 11, 90, 14], [9, 4, 33, 70, 21]]
NEW_TOKENS = 6


def served_rows(checkpoint: str, tamper: str = "", **engine) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """For each prompt: the greedy continuation, its log-softmax rows, and those of the prompt.

    Args:
        checkpoint: folder of the model.
        tamper: `module:function` of the tests, called before the engine starts.
        engine: arguments of `LLM`.

    Returns:
        new tokens [N], decode rows [N, V], prompt rows [T - 1, V].
    """
    from vllm import LLM

    if tamper:
        call(tamper)
    return rows_of(LLM(checkpoint, **{**ENGINE, **engine}))


def rows_of(llm, prompts=PROMPTS, adapters=None) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """For each prompt, what `served_rows` returns.

    Args:
        adapters: a LoRARequest or None for each.
    """
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        logprobs=-1,
        prompt_logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False, lora_request=adapters)

    def rows(entries) -> np.ndarray:
        table = np.full((len(entries), vocabulary), -np.inf)
        for row, entry in zip(table, entries, strict=True):
            for token, logprob in entry.items():
                row[token] = logprob.logprob
        return table

    return [(list(o.outputs[0].token_ids), rows(o.outputs[0].logprobs), rows(o.prompt_logprobs[1:])) for o in outputs]


ENGINE = {
    "model_impl": "transformers",
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_logprobs": -1,
    "num_gpu_blocks_override": 32,  # a cache of 1 GiB takes seconds to clear
    "disable_log_stats": True,
}


def reference_rows(checkpoint: str, sequences: list[list[int]], dtype: str = "float32", **load) -> list[np.ndarray]:
    """Hugging Face eager's log-softmax rows [T, V] of each sequence, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager", **load
    ).eval()
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0].double(), -1).numpy()
            for tokens in sequences
        ]


def call(function: str, **kwargs):
    """Call `module:function`."""
    import importlib

    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**kwargs)
