# SPDX-License-Identifier: Apache-2.0
"""Logits of a long prompt take no more memory than vLLM's own: prompt logprobs ask for thousands of rows at once."""

import pytest

ROWS = 512
VOCABULARY = 32768
CONSTANTS = 64  # bytes of numbers that torch makes tensors of


@pytest.mark.parametrize(
    ("name", "dtype", "upstream", "hidden_states"),
    [
        ("granite", "float32", "stock_scale", 0),
        ("granite", "bfloat16", "stock_scale", 0),
        ("gemma2", "bfloat16", "stock_cap", 0),
        # A norm in float32 and a dense layer before the projection, a cap after it
        ("warped_llama", "bfloat16", "stock_cap", 8),
    ],
)
def test_peak_of_a_long_prompt(vllm, checkpoint, name, dtype, upstream, hidden_states):
    fields = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    engine = {"dtype": dtype}
    if name == "warped_llama":
        fields |= {"builder": "remote", "warp_size": 64}
        engine["trust_remote_code"] = True
    folder = checkpoint(vllm, name, **fields)
    found = vllm.run("support.memory_jobs:peaks", checkpoint=folder, rows=ROWS, **engine)
    assert found["logits"] == ROWS * VOCABULARY * (2 if dtype == "bfloat16" else 4)
    assert found["head"] <= found["logits"] + hidden_states * found["hidden"] + CONSTANTS
    assert found["head"] <= found[upstream]
