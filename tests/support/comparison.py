# SPDX-License-Identifier: Apache-2.0
"""How far served rows are from Hugging Face's."""

import numpy as np

from support.jobs import PROMPTS


def from_hugging_face(vllm, folder: str, served: list) -> float:
    """The largest difference of log-softmax rows, of what `support.jobs:rows_of` gave for the model in `folder`."""
    sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
    expected = vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
    found = [np.concatenate([prompt_rows, decode_rows]) for _, decode_rows, prompt_rows in served]
    return max(float(np.abs(rows - wanted[:-1]).max()) for rows, wanted in zip(found, expected, strict=True))
