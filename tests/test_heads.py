# SPDX-License-Identifier: Apache-2.0
"""Models served by real vLLM with their own head give Hugging Face's logprobs, and do not with the plugin off."""

import re

import pytest
from support.checkpoints import HEADS
from support.fork_server import JobError

CLOSE = 1e-4
WRONG = 1e-2
OFF = {"VLLM_TF_SINKS": "sinks"}

# Upstream vLLM is right about these: a plain projection (gpt_neox: from 0.32), or a scale or cap in the field it knows
PROJECTIONS = {"llama", "opt", "phi", "gpt_neox"}
UPSTREAM_IS_RIGHT = PROJECTIONS | {"cohere", "cohere_compass_text", "gemma2", "gemma3_text", "nanochat", "vaultgemma"}
NO_PLACE = r"There is no module or parameter named '(cls|decoder|embed_out|generator_lm_head|lm_head\.decoder)'"
REFUSALS = {"hyperclovax": r"argument of type 'NoneType' is not iterable"}  # by vLLM's config class, up to 0.31
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
        upstream = difference(vllm, folder, env={**environment, **OFF})
    except JobError as error:
        if not re.search(REFUSALS.get(name, NO_PLACE), error.error):
            raise
        return
    if name not in UPSTREAM_IS_RIGHT:
        assert upstream > WRONG
    else:
        assert upstream < CLOSE
    if name in UPSTREAM_IS_RIGHT - PROJECTIONS:
        tamper = "support.tampers:take_every_head_for_a_projection"
        assert difference(vllm, folder, env=environment, tamper=tamper) > WRONG
