# SPDX-License-Identifier: Apache-2.0
"""Models in the dtypes that they are served in, by the fixture that this package gives authors of models."""

import pytest

OFF = {"VLLM_TF_SINKS": "0"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["granite_swa_scaled", "modernbert-decoder"])
def test_logprobs_equal_hugging_face(vllm, checkpoint, logprob_parity, name, dtype):
    folder = checkpoint(vllm, name)
    logprob_parity(folder, dtype=dtype)
    with pytest.raises(pytest.fail.Exception, match=r"Differs, plugin on|Refused, plugin on"):
        logprob_parity(folder, dtype=dtype, env=OFF)
