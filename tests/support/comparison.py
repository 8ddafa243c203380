# SPDX-License-Identifier: Apache-2.0
"""How far served rows are from Hugging Face's."""

import numpy as np

from support.jobs import PROMPTS


def from_hugging_face(vllm, folder: str, served: list, prompts: list[list[int]] = PROMPTS) -> float:
    """The largest difference of log-softmax rows, of what `support.jobs:rows_of` gave for the model in `folder`."""
    sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(prompts, served, strict=True)]
    expected = vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
    found = [np.concatenate([prompt_rows, decode_rows]) for _, decode_rows, prompt_rows in served]
    return max(float(np.abs(rows - wanted[:-1]).max()) for rows, wanted in zip(found, expected, strict=True))


def references(vllm, folder: str, served: list[tuple], dtype: str = "float32") -> list:
    """Hugging Face's log-softmax rows of what `support.feature_jobs:served` gave in one of its lists."""
    sequences = [[*prompt, *new] for prompt, new, *_ in served]
    return vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences, dtype=dtype)


def furthest(served: list[tuple], expected: list) -> tuple[float, float]:
    """The largest difference of log-softmax rows, of the prompts and of what was generated."""
    prompts = decoded = 0.0
    for (prompt, _, decode_rows, prompt_rows, _), rows in zip(served, expected, strict=True):
        last = len(prompt) - 1
        decoded = max(decoded, float(np.abs(decode_rows - rows[last:-1]).max()))
        if prompt_rows is not None:
            prompts = max(prompts, float(np.abs(prompt_rows - rows[:last]).max()))
    return prompts, decoded
