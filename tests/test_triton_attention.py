# SPDX-License-Identifier: Apache-2.0
"""Sinks in vLLM's Triton attention kernels, as GPUs run them, here in Triton's interpreter."""

import pytest
from support.comparison import from_hugging_face, furthest, references
from support.feature_jobs import BUDGET
from support.tp_jobs import ENV

EXACT = 5e-5  # float32, over prompts of 70 tokens
DROPPED = 0.05  # at the least, without the sinks
ROUNDED = 0.05  # float16; Hugging Face's own is off by 0.02
TRITON = "support.triton_jobs:with_triton_attention"
SERVE = {"job": TRITON, "runs": "support.jobs:served_rows"}
SERVE_BY_TWO = {"job": TRITON, "runs": "support.tp_jobs:served_by_two", "env": ENV}


@pytest.fixture(autouse=True)
def _has_triton(vllm):
    if reason := vllm.run("support.triton_jobs:why_no_triton"):
        pytest.skip(reason)


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"])
def test_prompt_and_decode(vllm, checkpoint, difference, name):
    """Prompts are one kernel's, tokens that are decoded another's, which splits the softmax into segments."""
    folder = checkpoint(vllm, name, exact_sinks=False)  # read in float32, not rounded
    assert difference(vllm, folder, **SERVE) < EXACT
    assert difference(vllm, folder, has_sinks=False, **SERVE) > DROPPED


# Prompts have 5 to 70 tokens, so that one window is shorter than all, the other than one
@pytest.mark.parametrize(("name", "window"), [("granite_swa", 4), ("gpt_oss", 64)])
def test_chunks_prefix_hits_and_windows(vllm, checkpoint, name, window):
    # Every expert is active: a router that rounds would choose another one for a row now and then
    experts = {"num_experts_per_tok": 4} if name == "gpt_oss" else {}
    folder = checkpoint(vllm, name, sliding_window=window, **experts)
    tamper = {"drop": "support.tampers:drop_triton_sinks"}
    served = vllm.run(TRITON, runs="support.feature_jobs:served", checkpoint=folder, **tamper)
    assert served["largest_step"] == BUDGET  # longer prompts were computed in chunks
    assert [hits for *_, hits in served["cached"]] == [64, 32, 0, 0]
    first, cached, dropped = (served[part] for part in ("first", "cached", "dropped"))
    assert max(furthest(first, references(vllm, folder, first))) < EXACT
    assert max(furthest(cached, references(vllm, folder, cached))) < EXACT
    assert furthest(dropped, references(vllm, folder, dropped))[1] > DROPPED


def test_float16(vllm, checkpoint, difference):
    """Within rounding. Triton's interpreter gets bfloat16 wrong, and a Llama's attention in it as well."""
    folder = checkpoint(vllm, "granite_swa", exact_sinks=False)
    assert difference(vllm, folder, dtype="float16", **SERVE) < ROUNDED
    assert difference(vllm, folder, dtype="float16", has_sinks=False, **SERVE) > 10 * ROUNDED


def test_heads_of_two_ranks(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "gpt_oss")
    assert difference(vllm, folder, **SERVE_BY_TWO) < EXACT
    assert difference(vllm, folder, has_sinks=False, **SERVE_BY_TWO) > DROPPED


def test_drafts(vllm, checkpoint):
    """Several tokens of a request are decoded at once."""
    folder = checkpoint(vllm, "gpt_oss")
    loop = vllm.run("support.speculation_jobs:looping_prompt", checkpoint=folder)
    drafts = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}

    def serve(**options):
        run = {"runs": "support.speculation_jobs:speculated", "checkpoint": folder, "prompts": [loop], **options}
        found = vllm.run(TRITON, speculative_config=drafts, **run)
        return found["accepted"], from_hugging_face(vllm, folder, found["rows"], [loop])

    accepted, difference = serve()
    assert accepted > 0
    assert difference < EXACT
    assert serve(has_sinks=False)[1] > DROPPED


def test_sinks_that_are_loaded_into_a_running_engine(vllm, checkpoint):
    first, second = (checkpoint(vllm, "granite_swa", seed=seed) for seed in (0, 1))
    job = "support.reload_jobs:reloaded_in_place"
    found = vllm.run(TRITON, runs=job, checkpoint=first, other=second, fragment="sinks")
    assert found["same_memory"]
    assert from_hugging_face(vllm, second, found["warm"]) < EXACT
    assert from_hugging_face(vllm, first, found["warm"]) > DROPPED
