# SPDX-License-Identifier: Apache-2.0
"""torch.compile takes what is patched: the guarded attention function, and the shifted positions."""

import pytest

COMPILED = {"TORCHDYNAMO_DISABLE": "0"}


@pytest.mark.parametrize("name", ["gpt_oss", "roberta"])
def test_logprobs_equal_hugging_face(vllm, checkpoint, difference, name, tmp_path):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    environment = {**COMPILED, "VLLM_CACHE_ROOT": str(tmp_path)}
    assert difference(vllm, folder, env=environment, enforce_eager=False) < 1e-4
    # The graph compiled without the plugin is not the one that it takes, nor the other way round
    off = difference(vllm, folder, env={**environment, "VLLM_TF_SINKS": "head"}, enforce_eager=False)
    assert (off > 1e-2) == (name == "gpt_oss" and vllm.version < "0.30")
    assert difference(vllm, folder, env=environment, enforce_eager=False) < 1e-4
