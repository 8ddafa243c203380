# SPDX-License-Identifier: Apache-2.0
"""A version of vLLM that nobody tested: patched where it fits, and each model checked once it is loaded."""

import pytest
from support.fork_server import JobError
from support.parity import ENVIRONMENT
from support.tp_jobs import ENV

EXACT = 1e-4
MEANINGS = "support.meanings"
CAUSE = "This package was not tested on vLLM 0.99.0, which may use the patched functions in another way"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash", "granite", "gemma2", "minicpm3", "bert", "llama"])
def test_renumbered_version_is_right(vllm, checkpoint, difference, name, tied):
    folder = checkpoint(vllm, name, tie_word_embeddings=tied)
    assert difference(vllm, folder, env=ENVIRONMENT, tamper=f"{MEANINGS}:renumber") < EXACT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt_oss", "granite", "modernbert-decoder"])
def test_rounding_is_no_mismatch(vllm, checkpoint, name, dtype):
    folder = checkpoint(vllm, name)
    assert vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:renumber", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "meaning", "message"),
    [
        ("granite", "scale_logits", r"GraniteModel gives other logits than GraniteForCausalLM .* differ by up to \d"),
        ("llama", "scale_logits", r"LlamaModel gives other logits than LlamaForCausalLM"),
        ("bert", "scale_logits", r"BertModel gives other logits than BertLMHeadModel"),
        ("granite", "shift_vocabulary", r"GraniteModel gives other logits than GraniteForCausalLM"),
        ("llama", "lose_projection", r"LlamaModel gives other logits than LlamaForCausalLM"),
        ("gpt_oss", "negate_sinks", r"The sinks in the attention layer 0 of GptOssModel differ .* by up to \d"),
        ("gpt_oss", "lose_sinks", r"The checkpoint gave no values for model\.layers\.0\.self_attn\.sinks of GptOss"),
        ("gpt_oss", "split_late", r"vLLM takes the step FIND_SINKS of building a model after LAYERS"),
        ("granite", "initialise_elsewhere", r"The attention layers of GraniteModel were not compared"),
        ("llama", "load_otherwise", r"A model that is loaded with load_format=\S+ cannot be checked after loading"),
    ],
)
def test_another_meaning_is_refused(vllm, checkpoint, name, meaning, message):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    with pytest.raises(JobError, match=rf"(?s)LoadError: {message}.*{CAUSE}"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:{meaning}")


def test_sinks_that_were_not_looked_for(vllm, checkpoint):
    """A vLLM without sinks of its own has a guard that refuses the model before it is checked."""
    folder = checkpoint(vllm, "gpt_oss")
    checked = rf"LoadError: vLLM built GptOssModel without looking for attention sinks.*{CAUSE}"
    guarded = r"SinkError: GptOssAttention passes a sink \(s_aux\) to Attention, which was built without a sink"
    with pytest.raises(JobError, match=f"(?s){checked}|{guarded}"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:split_elsewhere")


def test_checkpoint_without_a_projection_is_refused(vllm, checkpoint, tmp_path):
    source = checkpoint(vllm, "llama", tie_word_embeddings=False)
    folder = vllm.run("support.checkpoints:without", folder=str(tmp_path), source=source, fragment="lm_head")
    with pytest.raises(JobError, match=r"The checkpoint gave no weight for the projection lm_head of LlamaForCausalLM"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:renumber")


def test_model_that_cannot_be_checked_is_refused(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    with pytest.raises(JobError, match=r"BrokenInstallError: .*0\.99\.0, and cannot check its models after loading: "):
        vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:lose_the_check")


@pytest.mark.parametrize(
    ("tamper", "message"), [("negate_sinks", r"The sinks in"), ("scale_logits", r"gives other logits")]
)
def test_two_ranks(vllm, checkpoint, difference, tamper, message):
    two_ranks = {"job": "support.tp_jobs:served_by_two", "env": ENV}
    folder = checkpoint(vllm, "gpt_oss")
    assert difference(vllm, folder, tamper=f"{MEANINGS}:renumber", **two_ranks) < EXACT
    with pytest.raises(JobError, match=rf"LoadError: .*{message}"):
        difference(vllm, folder, tamper=f"{MEANINGS}:{tamper}", **two_ranks)


def test_model_that_takes_adapters(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "granite")
    assert difference(vllm, folder, tamper=f"{MEANINGS}:renumber", enable_lora=True, max_lora_rank=8) < EXACT


def test_dummy_weights_are_not_checked(vllm, checkpoint):
    folder = checkpoint(vllm, "gpt_oss")
    assert vllm.run("support.jobs:served_rows", checkpoint=folder, tamper=f"{MEANINGS}:renumber", load_format="dummy")


def test_reload_after_the_check(vllm, checkpoint):
    folder = checkpoint(vllm, "granite_swa_scaled")
    outcome = vllm.run("support.untested_jobs:reloaded", checkpoint=folder)
    assert outcome["kept"] == [None]
    assert outcome["log"] == 1
    assert outcome["same"]
