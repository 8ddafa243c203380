# SPDX-License-Identifier: Apache-2.0
"""Models served by real vLLM with their own head give Hugging Face's logprobs, and do not with the plugin off."""

import pytest
from support.checkpoints import HEADS
from support.zygote import JobError

CLOSE = 1e-4
WRONG = 1e-2
OFF = {"VLLM_TF_SINKS": "sinks"}

# Stock vLLM is right about these: a plain projection (gpt_neox: from 0.32), or a scale or cap in the field it knows
PROJECTIONS = {"llama", "opt", "phi", "gpt_neox"}
STOCK_IS_RIGHT = PROJECTIONS | {"cohere", "cohere_compass_text", "gemma2", "gemma3_text", "nanochat", "vaultgemma"}
ENVIRONMENT = {"minicpm3": {"VLLM_MLA_DISABLE": "1"}}  # the CPU's MLA kernels take no float32


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", HEADS)
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name, tied):
    folder = checkpoint(vllm, name, tie_word_embeddings=tied)
    assert difference(vllm, folder, env=ENVIRONMENT.get(name)) < CLOSE


@pytest.mark.parametrize("name", HEADS)
def test_logprobs_are_wrong_without_the_head(vllm, checkpoint, difference, name):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    environment = ENVIRONMENT.get(name, {})
    try:
        stock = difference(vllm, folder, env={**environment, **OFF})
    except JobError:  # stock vLLM does not load it
        return
    if name not in STOCK_IS_RIGHT:
        assert stock > WRONG
    else:
        assert stock < CLOSE
    if name in STOCK_IS_RIGHT - PROJECTIONS:
        tamper = "support.tampers:take_every_head_for_a_projection"
        assert difference(vllm, folder, env=environment, tamper=tamper) > WRONG
