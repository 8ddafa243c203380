# SPDX-License-Identifier: Apache-2.0
"""Heads of remote code: run in full, traced or eager, or refused by name."""

import pytest
from support.fork_server import JobError

CLOSE = 1e-4


@pytest.mark.parametrize("form", ["flat", "reading"])
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, form):
    folder = checkpoint(vllm, "warped_llama", "remote", head_form=form)
    assert difference(vllm, folder, trust_remote_code=True) < CLOSE
    with pytest.raises(JobError, match="There is no module or parameter named 'final'"):
        difference(vllm, folder, trust_remote_code=True, env={"VLLM_TF_SINKS": "sinks"})


def test_bias_called_as_the_projection_s_is_not_that(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "biased_llama", "remote")
    assert difference(vllm, folder, trust_remote_code=True) < CLOSE


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_projection_to_a_part_of_the_vocabulary(vllm, checkpoint, difference, scale, tied):
    folder = checkpoint(vllm, "pruned_llama", "remote", scale=scale, tie_word_embeddings=tied)
    assert difference(vllm, folder, trust_remote_code=True) < CLOSE


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("norm", "ForCausalLM has no single projection to the vocabulary: its output embeddings are a NormLinear"),
        ("direct", "ForCausalLM cannot be served: it goes through its projection 0 times"),
        ("random", "ForCausalLM cannot be served: it gives other logits for the same hidden states"),
    ],
)
def test_head_that_cannot_be_right_is_refused(vllm, checkpoint, form, message):
    folder = checkpoint(vllm, "warped_llama", "remote", head_form=form)
    with pytest.raises(JobError, match=message):
        vllm.run("support.jobs:served_rows", checkpoint=folder, trust_remote_code=True)
