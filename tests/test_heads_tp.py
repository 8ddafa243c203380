# SPDX-License-Identifier: Apache-2.0
"""Heads over two real workers: gathered or sharded logits equal Hugging Face's."""

import pytest
from support.tp_jobs import ENV

CLOSE = 1e-4


@pytest.mark.parametrize("name", ["granite", "gemma2", "modernbert-decoder"])
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    assert difference(vllm, folder, job="support.tp_jobs:served_by_two", env=ENV) < CLOSE


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_shares_of_a_batch_equal_the_gathered_logits(vllm, checkpoint, name):
    shares = vllm.run("support.batch_shard_jobs:shares", env=ENV, checkpoint=checkpoint(vllm, name))
    vocabulary = 128
    assert [share["shape"] for share in shares] == [(3, vocabulary), (2, vocabulary)]
    for share in shares:
        assert share["equal"]
        assert share["spread"] > 0.1
