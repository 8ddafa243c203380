# SPDX-License-Identifier: Apache-2.0
"""Heads over two real workers: gathered or sharded logits equal Hugging Face's."""

import pytest
from support.tp_jobs import ENV

CLOSE = 1e-4


@pytest.mark.parametrize("name", ["granite", "gemma2", "modernbert-decoder"])
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    assert difference(vllm, folder, job="support.tp_jobs:served_by_two", env=ENV) < CLOSE
