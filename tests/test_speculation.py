# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding changes no logprob of the target: drafts of every source that runs on a CPU."""

import numpy as np
import pytest
from support.fork_server import JobError
from support.jobs import PROMPTS

SPECULATED = "support.speculation_jobs:speculated"
CLOSE = 1e-4
WRONG = 1e-2
OFF = {"VLLM_TF_SINKS": "0"}
FULL_ATTENTION = {"layer_types": ["full_attention"] * 3}  # vLLM wants the layers of a draft in one cache group
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture
def speculated(vllm):
    """Serve with drafts: what the job returns, and how far the rows are from Hugging Face's."""

    def serve(folder, config, prompts=PROMPTS, env=None, **engine):
        found = vllm.run(SPECULATED, env=env, checkpoint=folder, speculative_config=config, prompts=prompts, **engine)
        rows = found.pop("rows")
        sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(prompts, rows, strict=True)]
        load = {"trust_remote_code": True} if "trust_remote_code" in engine else {}
        expected = vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences, **load)
        difference = max(
            np.abs(np.concatenate([prompt_rows, decode_rows]) - reference[:-1]).max()
            for (_, decode_rows, prompt_rows), reference in zip(rows, expected, strict=True)
        )
        return found, difference

    return serve


def test_ngrams_for_a_target_with_sinks(vllm, checkpoint, speculated):
    folder = checkpoint(vllm, "gpt_oss")
    loop = vllm.run("support.speculation_jobs:looping_prompt", checkpoint=folder)
    found, difference = speculated(folder, NGRAM, prompts=[loop, *PROMPTS])
    assert difference < CLOSE
    assert 0 < found["accepted"] < found["drafted"]


def test_draft_of_vllm_for_a_target_with_a_head(vllm, checkpoint, speculated):
    """The draft is the target itself, and vLLM's own class: what it proposes is right."""
    folder = checkpoint(vllm, "granite")
    found, difference = speculated(folder, {"method": "draft_model", "model": folder})
    assert difference < CLOSE
    assert found["draft"] == "GraniteForCausalLM"
    assert found["accepted"] == found["drafted"] > 0


def test_draft_with_a_head_of_its_own(vllm, checkpoint, speculated):
    """The draft is the target itself, a class that vLLM has none of: both run their own head."""
    folder = checkpoint(vllm, "modernbert-decoder", tie_word_embeddings=False, **FULL_ATTENTION)
    config = {"method": "draft_model", "model": folder}
    if tuple(int(part) for part in vllm.version.split(".")) < (0, 32):
        with pytest.raises(JobError, match="gives the attention layers of target and draft the same names"):
            speculated(folder, config)
        return
    found, difference = speculated(folder, config)
    assert difference < CLOSE
    assert found["draft_has_own_head"]
    assert not found["shares_projection"]
    assert found["accepted"] == found["drafted"] > 0


@pytest.mark.parametrize(
    ("name", "builder", "fields"),
    [
        ("granite", "build", {"tie_word_embeddings": True}),
        ("warped_llama", "remote", {"warp_size": 64}),  # a full head
    ],
)
def test_draft_that_shares_the_projection(vllm, checkpoint, speculated, name, builder, fields):
    folder = checkpoint(vllm, name, builder, **fields)
    draft = checkpoint(vllm, "eagle", "support.speculation_jobs:eagle_draft")
    load = {"trust_remote_code": True} if builder == "remote" else {}
    found, difference = speculated(folder, {"method": "eagle", "model": draft}, **load)
    assert difference < CLOSE
    assert found["shares_projection"]
    assert found["follows_projection"]
    assert found["drafted"] > found["accepted"]  # its weights are random


def test_draft_that_shares_the_projection_without_the_plugin(vllm, checkpoint, speculated):
    folder = checkpoint(vllm, "granite", tie_word_embeddings=False)
    draft = checkpoint(vllm, "eagle", "support.speculation_jobs:eagle_draft")
    _, difference = speculated(folder, {"method": "eagle", "model": draft}, env=OFF)
    assert difference > WRONG


def test_multi_token_prediction(vllm, checkpoint, speculated):
    if reason := vllm.run("support.speculation_jobs:no_multi_token_prediction"):
        pytest.skip(reason)
    folder = checkpoint(vllm, "mtp_granite", "support.speculation_jobs:mtp_checkpoint")
    config = {"method": "mtp", "num_speculative_tokens": 1}
    found, difference = speculated(folder, config, trust_remote_code=True)
    assert difference < CLOSE
    assert found["draft"] == "TransformersForMTP"
    assert found["shares_projection"]
    assert not found["draft_has_own_head"]
    assert found["drafted"] > 0
