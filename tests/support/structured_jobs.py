# SPDX-License-Identifier: Apache-2.0
"""Answers that a grammar constrains."""

import numpy as np

from support.checkpoints import add_tokenizer
from support.jobs import ENGINE, PROMPTS


def constrained(checkpoint: str, pattern: str, backend: str, **engine) -> list[tuple[list[int], np.ndarray]]:
    """The greedy answers to the first prompt, constrained to a regular expression and free, in one batch.

    Returns:
        For each, its tokens [N] and the log-softmax rows [N, V] that they were taken from.
    """
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    add_tokenizer(checkpoint)
    config = {"skip_tokenizer_init": False, "structured_outputs_config": {"backend": backend}}
    llm = LLM(checkpoint, **{**ENGINE, **config, **engine})
    grammars = [StructuredOutputsParams(regex=pattern), None]
    sampling = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=-1, structured_outputs=grammar) for grammar in grammars
    ]
    prompt = {"prompt_token_ids": PROMPTS[0]}
    answers = [output.outputs[0] for output in llm.generate([prompt, prompt], sampling, use_tqdm=False)]
    rows = [
        np.array([[entry[token].logprob for token in sorted(entry)] for entry in answer.logprobs]) for answer in answers
    ]
    return [(list(answer.token_ids), each) for answer, each in zip(answers, rows, strict=True)]
