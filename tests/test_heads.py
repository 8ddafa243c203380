# SPDX-License-Identifier: Apache-2.0
"""Models served by real vLLM with their own head give Hugging Face's logprobs, and do not with the plugin off."""

import pytest
from support.checkpoints import HEADS
from support.zygote import JobError

CLOSE = 1e-4
ENVIRONMENT = {"minicpm3": {"VLLM_MLA_DISABLE": "1"}}  # the CPU's MLA kernels take no float32


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", HEADS)
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name, tied):
    folder = checkpoint(vllm, name, tie_word_embeddings=tied)
    assert difference(vllm, folder, env=ENVIRONMENT.get(name)) < CLOSE
