# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: right through vLLM's own quantisation methods, or refused by name."""

import numpy as np
import pytest
from support.fork_server import JobError
from support.jobs import PROMPTS

CLOSE = 1e-2  # a sum that differs in its last bit may round an input the other way: one step of 255
WRONG = 1.0
OFF = {"VLLM_TF_SINKS": "0"}
JOBS = "support.quantised_jobs"

BODY = r"layers?\.\d"
# what is quantised, what the config says is quantised and is not
CASES = {
    "granite": ({"tie_word_embeddings": True}, BODY, ["Linear"], ["lm_head"]),
    "granite with its head": ({"tie_word_embeddings": False}, f"{BODY}|lm_head", ["Linear", "re:.*lm_head"], []),
    "gpt_oss": ({}, r"self_attn\.._proj", ["Linear"], ["lm_head", r"re:.*\.mlp\..*"]),
    # Names of the checkpoint, which are not vLLM's: of a layer of the base model, and of the projection
    "roberta with its head": (
        {"tie_word_embeddings": False},
        rf"{BODY}(?!\.output)|decoder",
        ["Linear", "lm_head.decoder"],
        ["lm_head.dense", *(f"roberta.encoder.layer.{layer}.output.dense" for layer in range(3))],
    ),
}


@pytest.fixture
def quantised(vllm, checkpoint):
    """Make a quantised checkpoint of a case or of the same arguments."""

    def make(name, fields, layers, targets, ignore):
        source = checkpoint(vllm, name, **fields)
        arguments = {"source": source, "layers": layers, "targets": targets, "ignore": ignore}
        return checkpoint(vllm, name, f"{JOBS}:quantise", **arguments)

    return make


def difference(vllm, folder, **run):
    """How far the rows are from those of the stored integers, by Hugging Face."""
    served = vllm.run("support.jobs:served_rows", checkpoint=folder, **run)
    sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
    expected = vllm.run(f"{JOBS}:reference_rows", checkpoint=folder, sequences=sequences)
    return max(
        np.abs(np.concatenate([prompt_rows, decode_rows]) - reference[:-1]).max()
        for (_, decode_rows, prompt_rows), reference in zip(served, expected, strict=True)
    )


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_those_of_the_stored_integers(vllm, quantised, case):
    folder = quantised(case.partition(" ")[0], *CASES[case])
    assert difference(vllm, folder) < CLOSE


@pytest.mark.parametrize("case", ["granite", "granite with its head"])
def test_quantised_model_passes_the_check_of_an_untested_version(vllm, quantised, case):
    folder = quantised("granite", *CASES[case])
    assert difference(vllm, folder, tamper="support.meanings:renumber") < CLOSE


def test_logprobs_are_wrong_without_the_head(vllm, quantised):
    folder = quantised("granite", *CASES["granite with its head"])
    assert difference(vllm, folder, env=OFF) > WRONG


def test_quantised_projection_tied_to_embeddings_is_refused(vllm, quantised):
    folder = quantised("granite", {"tie_word_embeddings": True}, BODY, ["Linear", "re:.*lm_head"], [])
    with pytest.raises(JobError, match=r"GraniteForCausalLM ties its projection lm_head .* quantises lm_head"):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_projection_tied_to_quantised_embeddings_is_refused(vllm, checkpoint):
    source = checkpoint(vllm, "granite", tie_word_embeddings=True)
    folder = checkpoint(vllm, "granite", f"{JOBS}:with_embeddings_in_four_bits", source=source)
    with pytest.raises(JobError, match="GraniteForCausalLM ties its projection lm_head to its input embeddings"):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_quantised_layer_before_the_projection_is_refused(vllm, quantised):
    folder = quantised("modernbert-decoder", {"tie_word_embeddings": False}, r"dense", ["Linear"], ["decoder"])
    with pytest.raises(JobError, match=r"lm_head\.dense\.weight_scale, but ModernBertDecoderForCausalLM does not"):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_mxfp4_is_refused_by_vllm_in_its_own_words(vllm, checkpoint, tmp_path):
    folder = str(tmp_path)
    fields = {"quantization_config": {"quant_method": "mxfp4"}}
    vllm.run("support.checkpoints:retagged", folder=folder, source=checkpoint(vllm, "gpt_oss"), **fields)
    with pytest.raises(JobError, match="Transformers modeling backend does not support MXFP4"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, dtype="bfloat16")
