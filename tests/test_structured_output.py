# SPDX-License-Identifier: Apache-2.0
"""A grammar masks the logits of a head in place: answers obey it, and have Hugging Face's logprobs under the mask."""

import numpy as np
import pytest
import regex
from support.checkpoints import SIZES
from support.jobs import PROMPTS

CLOSE = 1e-4
WRONG = 1e-2
NO_TEXT = {SIZES["pad_token_id"], SIZES["eos_token_id"]}


def masked(row: np.ndarray, text: str, pattern: str) -> np.ndarray:
    """The log-softmax row [V] of what may follow `text` in a match of `pattern`; token 17 is the text "17"."""
    allowed = np.array(
        [
            token not in NO_TEXT and regex.fullmatch(pattern, f"{text}{token}", partial=True) is not None
            for token in range(len(row))
        ]
    )
    allowed[SIZES["eos_token_id"]] = regex.fullmatch(pattern, text) is not None
    row = np.where(allowed, row, -np.inf)
    return row - np.logaddexp.reduce(row)


def difference(vllm, folder, pattern, **run) -> float:
    """How far the rows are from Hugging Face's, masked where the grammar masks them."""
    (constrained, rows), (free, free_rows) = vllm.run(
        "support.structured_jobs:constrained", checkpoint=folder, pattern=pattern, **run
    )
    sequences = [[*PROMPTS[0], *constrained], [*PROMPTS[0], *free]]
    reference, free_reference = (
        each[len(PROMPTS[0]) - 1 : -1]
        for each in vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences)
    )
    text = ""
    for step, token in enumerate(constrained):
        reference[step] = masked(reference[step], text, pattern)
        assert np.array_equal(np.isneginf(rows[step]), np.isneginf(reference[step]))
        assert token == rows[step].argmax()
        text += "" if token in NO_TEXT else str(token)
    assert regex.fullmatch(pattern, text, partial=True)
    finite = np.isfinite(reference)
    return max(np.abs(rows[finite] - reference[finite]).max(), np.abs(free_rows - free_reference).max())


@pytest.mark.parametrize(
    ("name", "backend", "pattern"),
    [
        ("granite", "xgrammar", "(1[1-9]|7){2}(5|6)*"),
        ("modernbert-decoder", "outlines", "17|295|113"),
    ],
)
def test_logprobs_equal_hugging_face_under_the_mask(vllm, checkpoint, name, backend, pattern):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    assert difference(vllm, folder, pattern, backend=backend) < CLOSE


def test_logprobs_are_wrong_without_the_head(vllm, checkpoint):
    folder = checkpoint(vllm, "granite", tie_word_embeddings=False)
    assert difference(vllm, folder, "(1[1-9]|7){2}(5|6)*", backend="xgrammar", env={"VLLM_TF_SINKS": "0"}) > WRONG
