# SPDX-License-Identifier: Apache-2.0
"""Compute the logprobs of prompts by Hugging Face and by vLLM. The functions are jobs of a fork server."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_tf_sinks.parity.compare import Floats, Reference, SequenceLogprobs
from vllm_tf_sinks.parity.fork_server import report

PROMPTS = (
    "The capital of France is",
    "Plants make their own food by",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker who",
    "Water boils at a lower temperature on a high mountain. The reason is that",
)
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 24  # without a tokenizer
CACHE_BYTES = 2**31  # of the KV cache: a few prompts need little, and another process may use the memory
TOP = 20  # logprobs per token from vLLM: the reference's token is among them unless vLLM's logprobs are far off


def hugging_face_logprobs(
    model: str,
    prompts: list[str] | list[list[int]] | None = None,
    new_tokens: int = 16,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    largest_vocabulary: int = 0,
) -> Reference:
    """Compute the logprobs of Hugging Face's eager code, by greedy decoding without a cache.

    Args:
        model: path or hub id.
        prompts: texts or lists of tokens. None is built-in texts, or random tokens without a tokenizer.
        new_tokens: the number of tokens to generate for each prompt.
        dtype: the dtype of the model. `auto` is the checkpoint's.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether to run code of the checkpoint.
        largest_vocabulary: the largest vocabulary size for which the logprobs of all tokens are kept at each place.
            For a larger vocabulary only the logprob of the token there is kept.

    Raises:
        ValueError: if a prompt is a text and the checkpoint has no tokenizer.
    """
    import torch
    from transformers import AutoConfig

    from vllm_tf_sinks.lm_head.build import causal_lm_class

    remote = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(model, **remote)
    cls: Any = causal_lm_class(config, trust_remote_code, revision=revision)
    network = cls.from_pretrained(
        model,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation="eager",
        revision=revision,
        device_map="auto" if torch.cuda.device_count() > 1 else None,
    ).eval()
    if torch.cuda.device_count() == 1:
        network.to("cuda")
    tokenizer = _tokenizer(model, remote)
    prompt_tokens = _tokens(prompts, tokenizer, config.get_text_config().vocab_size)
    sequences = []
    for index, prompt in enumerate(prompt_tokens):
        tokens = list(prompt)
        for step in range(new_tokens):
            report((index * new_tokens + step, len(prompt_tokens) * new_tokens))
            with torch.no_grad():
                inputs = torch.tensor([tokens], device=network.device)
                rows = network(inputs, use_cache=False).logits[0]
            tokens.append(int(rows[-1].argmax()))
        logprobs = rows.double().log_softmax(-1).cpu()
        best = logprobs.argmax(-1).numpy()
        if logprobs.shape[-1] > largest_vocabulary:
            logprobs = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])
        sequences.append(SequenceLogprobs(tokens, len(prompt), logprobs.numpy(), best))
    words = [_words(tokenizer, sequence.tokens) for sequence in sequences] if tokenizer else []
    return Reference(model, str(network.dtype).removeprefix("torch."), sequences, words)


def _tokenizer(model: str, remote: dict[str, Any]) -> Any:
    """The model's tokenizer, or None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **remote)
    except Exception:  # a checkpoint without a tokenizer may lead to any error
        return None
    # Some classes of tokenizers load without a file, and have special tokens only
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_ids)) else None


def _words(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text that each token adds to those before it: decoded alone, some tokens lose a leading space."""
    texts = [tokenizer.decode(tokens[:length]) for length in range(len(tokens) + 1)]
    return [text[len(before) :] for before, text in pairwise(texts)]


def _tokens(prompts: Sequence[str | list[int]] | None, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    if prompts is None and tokenizer is None:
        shape = (RANDOM_PROMPTS, RANDOM_TOKENS)
        numbers: list[list[int]] = np.random.default_rng(0).integers(3, vocabulary, shape).tolist()
        return numbers
    given = PROMPTS if prompts is None else prompts
    if tokenizer is None and any(isinstance(prompt, str) for prompt in given):
        raise ValueError(
            "The checkpoint has no tokenizer, so that prompts cannot be text. Leave out the prompts: random tokens "
            "are used."
        )
    return [tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in given]


def vllm_logprobs(
    model: str, sequences: list[SequenceLogprobs], all_tokens: bool = False, **engine: Any
) -> list[SequenceLogprobs]:
    """Compute the logprobs of vLLM's Transformers backend for the tokens of `sequences`.

    Args:
        model: path or hub id.
        sequences: prompts and their continuations by Hugging Face.
        all_tokens: whether to compute the logprobs of all tokens at each place.
        engine: arguments of `vllm.LLM`.

    Returns:
        For each of `sequences`, vLLM's logprobs of the same tokens. They are NaN after the first token at which
        vLLM's greedy text differs.
    """
    from vllm import LLM, SamplingParams

    new_tokens = len(sequences[0].tokens) - sequences[0].prompt_length
    options: dict[str, Any] = {
        "model_impl": "transformers",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": max(len(sequence.tokens) for sequence in sequences) + 1,
        "max_logprobs": -1 if all_tokens else TOP,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "disable_log_stats": True,
    }
    llm: Any = LLM(model, **{**options, **engine})
    sampling = SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        logprobs=-1 if all_tokens else TOP,
        prompt_logprobs=-1 if all_tokens else 1,
        ignore_eos=True,
        detokenize=False,
    )
    report((0, len(sequences)))
    prompts = [{"prompt_token_ids": sequence.tokens[: sequence.prompt_length]} for sequence in sequences]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    served = [_served(output, sequence) for output, sequence in zip(outputs, sequences, strict=True)]
    report((len(sequences), len(sequences)))
    llm.llm_engine.engine_core.shutdown()
    return served


def _served(output: Any, sequence: SequenceLogprobs) -> SequenceLogprobs:
    """The logprobs of the tokens of `sequence` in vLLM's output, up to the first other token that vLLM generated."""
    (completion,) = output.outputs
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    logprobs: Floats = np.full_like(sequence.logprobs, np.nan)
    best = np.full_like(sequence.best, -1)
    for place, entry in enumerate(entries):
        wanted = range(logprobs.shape[1]) if logprobs.shape[1] > 1 else [sequence.tokens[place + 1]]
        logprobs[place] = [entry[token].logprob if token in entry else np.nan for token in wanted]
        best[place] = max(entry, key=lambda token: entry[token].logprob)
        new = place + 1 - sequence.prompt_length
        if new >= 0 and completion.token_ids[new] != sequence.tokens[place + 1]:
            break  # from here on vLLM's text differs
    return SequenceLogprobs(sequence.tokens, sequence.prompt_length, logprobs, best)


def random_checkpoint(config: Any, folder: str) -> None:
    """Save a checkpoint of random weights for `config`, large enough that each weight changes the logits.

    Args:
        config: a config of Transformers.
        folder: the folder of the checkpoint.
    """
    import torch

    from vllm_tf_sinks.lm_head.build import causal_lm_class

    torch.manual_seed(0)
    cls: Any = causal_lm_class(config)
    model = cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(0.15 * values)
            elif "norm" in name.lower() and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * values)
            else:  # sinks and others, as multiples of 1/16, which bfloat16 holds exactly
                parameter.copy_((16 * values).round() / 16)
    model.save_pretrained(folder)
