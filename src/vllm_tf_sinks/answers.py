# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face and vLLM answer to prompts, in numbers: jobs, each for a process of its own."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from vllm_tf_sinks.parity import Answer, Floats, Reference
from vllm_tf_sinks.zygote import report

PROMPTS = (
    "The capital of France is",
    "Plants make their own food by",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker who",
    "Water boils at a lower temperature on a high mountain. The reason is that",
)
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 24  # where there is no tokenizer
CACHE_BYTES = 2**31  # for keys and values: a few prompts need little, and another process may hold memory
TOP = 20  # logprobs that vLLM is asked for: the token of the reference is among them unless vLLM is far off


def answer_with_hugging_face(
    model: str,
    prompts: list[str] | list[list[int]] | None = None,
    new_tokens: int = 16,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    whole: int = 0,
) -> Reference:
    """What Hugging Face's eager code answers. A job of its own process.

    Args:
        prompts: as text or tokens; built-in ones, or random tokens where there is no tokenizer, if None.
        dtype: `auto` is the checkpoint's own.
        whole: the largest vocabulary of which all logprobs at each place are kept, and not that of the token only.

    Raises:
        ValueError: if prompts are text and there is no tokenizer.
    """
    import torch
    from transformers import AutoConfig

    from vllm_tf_sinks.head.build import causal_lm_class

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
    sequences = _tokens(prompts, tokenizer, config.get_text_config().vocab_size)
    answers = []
    for index, sequence in enumerate(sequences):
        tokens = list(sequence)
        for step in range(new_tokens):
            report((index * new_tokens + step, len(sequences) * new_tokens))
            with torch.no_grad():
                inputs = torch.tensor([tokens], device=network.device)
                rows = network(inputs, use_cache=False).logits[0]
            tokens.append(int(rows[-1].argmax()))
        logprobs = rows.double().log_softmax(-1).cpu()
        best = logprobs.argmax(-1).numpy()
        if logprobs.shape[-1] > whole:
            logprobs = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])
        answers.append(Answer(tokens, len(sequence), logprobs.numpy(), best))
    words = [_words(tokenizer, answer.tokens) for answer in answers] if tokenizer else []
    return Reference(model, str(network.dtype).removeprefix("torch."), answers, words)


def _tokenizer(model: str, remote: dict[str, Any]) -> Any:
    """The model's tokenizer, or None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **remote)
    except Exception:  # whatever a checkpoint without one leads to
        return None
    # Some classes are made without a file, and know no words
    return tokenizer if len(tokenizer) > len(set(tokenizer.all_special_ids)) else None


def _words(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text: alone, some lose the space before them."""
    texts = [tokenizer.decode(tokens[:length]) for length in range(len(tokens) + 1)]
    return [text[len(before) :] for before, text in pairwise(texts)]


def _tokens(prompts: Sequence[str | list[int]] | None, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    if prompts is None and tokenizer is None:
        shape = (RANDOM_PROMPTS, RANDOM_TOKENS)
        numbers: list[list[int]] = np.random.default_rng(0).integers(3, vocabulary, shape).tolist()
        return numbers
    given = PROMPTS if prompts is None else prompts
    if tokenizer is None and any(isinstance(prompt, str) for prompt in given):
        raise ValueError("The checkpoint has no tokenizer, so that prompts cannot be text.")
    return [tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in given]


def answer_with_vllm(model: str, answers: list[Answer], whole: bool = False, **engine: Any) -> list[Answer]:
    """What vLLM's Transformers backend answers to the prompts of `answers`. A job of its own process.

    Args:
        whole: ask for all V logprobs at each place.
        engine: arguments of `vllm.LLM`.

    Returns:
        For each, the logprobs of the same tokens.
    """
    from vllm import LLM, SamplingParams

    new_tokens = len(answers[0].tokens) - answers[0].prompt_length
    options: dict[str, Any] = {
        "model_impl": "transformers",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": max(len(answer.tokens) for answer in answers) + 1,
        "max_logprobs": -1 if whole else TOP,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "disable_log_stats": True,
    }
    llm: Any = LLM(model, **{**options, **engine})
    sampling = SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        logprobs=-1 if whole else TOP,
        prompt_logprobs=-1 if whole else 1,
        ignore_eos=True,
        detokenize=False,
    )
    report((0, len(answers)))
    prompts = [{"prompt_token_ids": answer.tokens[: answer.prompt_length]} for answer in answers]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    served = [_served(output, answer) for output, answer in zip(outputs, answers, strict=True)]
    report((len(answers), len(answers)))
    llm.llm_engine.engine_core.shutdown()
    return served


def _served(output: Any, answer: Answer) -> Answer:
    """The logprobs that vLLM gives the tokens of `answer`, as far as it follows them."""
    (completion,) = output.outputs
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    logprobs: Floats = np.full_like(answer.logprobs, np.nan)
    best = np.full_like(answer.best, -1)
    for place, entry in enumerate(entries):
        wanted = range(logprobs.shape[1]) if logprobs.shape[1] > 1 else [answer.tokens[place + 1]]
        logprobs[place] = [entry[token].logprob if token in entry else np.nan for token in wanted]
        best[place] = max(entry, key=lambda token: entry[token].logprob)
        new = place + 1 - answer.prompt_length
        if new >= 0 and completion.token_ids[new] != answer.tokens[place + 1]:
            break  # from here on it continues another text
    return Answer(answer.tokens, answer.prompt_length, logprobs, best)


def random_checkpoint(config: Any, folder: str) -> None:
    """Save a checkpoint of random weights for `config`, each of which shows in the logits. A job."""
    import torch

    from vllm_tf_sinks.head.build import causal_lm_class

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
            else:  # sinks among them, in steps that any dtype of a kernel holds
                parameter.copy_((16 * values).round() / 16)
    model.save_pretrained(folder)
