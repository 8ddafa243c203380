# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loaded into a running engine takes effect: sinks, biases, and the head's own weights."""

import numpy as np
import pytest
from support.zygote import JobError

RELOADED = "support.jobs:reloaded_rows"


def seeds(vllm, checkpoint, name, tied):
    return (checkpoint(vllm, name, seed=seed, tie_word_embeddings=tied) for seed in (0, 1))


@pytest.mark.parametrize("name", ["gpt_oss", "granite", "modernbert-decoder", "bert"])
def test_reload_equals_cold_start(vllm, checkpoint, name):
    first, second = seeds(vllm, checkpoint, name, tied=False)
    cold = vllm.run("support.jobs:served_rows", checkpoint=second)
    warm = vllm.run(RELOADED, checkpoint=first, other=second)
    for (_, *expected), (_, *found) in zip(cold, warm, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert np.abs(one - other).max() < 1e-5


def test_bias_of_a_tied_projection_is_not_reloaded_in_silence(vllm, checkpoint):
    first, second = seeds(vllm, checkpoint, "bert", tied=True)
    with pytest.raises(JobError, match="cannot reload the bias of BertLMHeadModel's projection"):
        vllm.run(RELOADED, checkpoint=first, other=second)
