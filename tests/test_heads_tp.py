# SPDX-License-Identifier: Apache-2.0
"""Heads over two real workers: gathered or sharded logits equal Hugging Face's."""

import pytest
from support import jobs
from support.comparison import from_hugging_face
from support.jobs import NEW_TOKENS
from support.tp_jobs import ENV

CLOSE = 1e-4
WRONG = 1e-2


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


# Five of different lengths in one batch: three are one rank's, two the other's
PROMPTS = [*jobs.PROMPTS, [88, 2, 19], [5, 5, 71, 100], [44]]


@pytest.fixture
def in_shares(vllm):
    """Serve a batch on two ranks, each of which samples its share: the calls for that, and how far the rows are."""
    if reason := vllm.run("support.batch_shard_jobs:why_no_sharded_sampling"):
        pytest.skip(reason)

    def serve(folder, **engine):
        run = {"checkpoint": folder, "prompts": PROMPTS, **engine}
        found = vllm.run("support.batch_shard_jobs:sampled_in_shares", env=ENV, **run)
        return found["shared"], from_hugging_face(vllm, folder, found["rows"], PROMPTS)

    return serve


@pytest.mark.parametrize("name", ["gpt_oss", "granite", "gemma2"])
def test_batch_that_is_sampled_in_shares(checkpoint, vllm, in_shares, name):
    shared, difference = in_shares(checkpoint(vllm, name, tie_word_embeddings=False))
    assert difference < CLOSE
    assert min(shared) >= NEW_TOKENS


def test_batch_that_is_sampled_in_shares_has_the_models_head(checkpoint, vllm, in_shares):
    folder = checkpoint(vllm, "granite", tie_word_embeddings=False)
    shared, difference = in_shares(folder, tamper="support.tampers:take_every_head_for_a_projection")
    assert difference > WRONG
    assert min(shared) >= NEW_TOKENS


def test_batch_of_a_full_head_is_sampled_as_a_whole(checkpoint, vllm, in_shares):
    shared, difference = in_shares(checkpoint(vllm, "modernbert-decoder", tie_word_embeddings=False))
    assert difference < CLOSE
    assert shared == [None, None]
