# SPDX-License-Identifier: Apache-2.0
"""vllm-tf-sinks inspect: what it foretells is what the other tests see when the model is served."""

import json

import pytest
from packaging.version import Version
from support.checkpoints import HEADS
from test_heads import UPSTREAM_IS_RIGHT

OFF = {"VLLM_TF_SINKS": "0"}


def inspect(vllm, folder, *arguments, env=None):
    """The exit status and the report."""
    job = {"arguments": ["inspect", folder, "--json", *arguments]}
    status, printed = vllm.run("support.cli_jobs:command", env=env, **job)
    return status, json.loads(printed)


@pytest.mark.parametrize("name", HEADS)
def test_heads(vllm, checkpoint, name):
    """The verdict on upstream vLLM is that of test_heads, which serves the same checkpoints."""
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    status, report = inspect(vllm, folder, "--max-model-len", "128")
    assert (status, report["outcome"], report["reasons"]) == (0, "right", [])
    faults = [fault for fault in report["alone"] if "sink" not in fault]
    is_right = name in UPSTREAM_IS_RIGHT and (name != "gpt_neox" or Version(vllm.version) >= Version("0.32"))
    assert (not faults) == is_right, faults
    assert report["features"]["LoRA on the head"].startswith("yes")
    assert report["features"]["pipeline parallel"].startswith("yes")
    assert report["features"]["batch-sharded sampling"] == (
        "no: the head needs all logits of a row" if report["head"]["kind"].startswith("full") else "yes"
    )


def test_constants_and_names(vllm, checkpoint):
    _, granite = inspect(vllm, checkpoint(vllm, "granite", tie_word_embeddings=True))
    assert granite["head"]["steps"] == ["lm_head(x)", "x / 7.3"]
    assert granite["head"]["weights"] == [
        {"name": "lm_head.weight", "in_checkpoint": "lm_head.weight", "tied_to": "model.embed_tokens.weight"}
    ]
    _, gemma = inspect(vllm, checkpoint(vllm, "gemma2", tie_word_embeddings=False))
    assert gemma["head"]["steps"] == ["lm_head(x)", "x / 3", "tanh(x)", "x * 3"]
    _, neox = inspect(vllm, checkpoint(vllm, "gpt_neox", tie_word_embeddings=False))
    assert neox["head"]["weights"][0]["in_checkpoint"] == "embed_out.weight"
    _, bert = inspect(vllm, checkpoint(vllm, "bert"))
    assert [step.partition("(")[0] for step in bert["head"]["steps"]] == [
        *("linear", "gelu", "layer_norm", "cls.predictions.decoder")
    ]


def test_sinks(vllm, checkpoint):
    _, report = inspect(vllm, checkpoint(vllm, "mimo_v2_flash"), "--tensor-parallel-size", "2")
    assert report["sinks"] == {
        "layers": [0, 2],
        "of_layers": 3,
        "parameters": [f"model.layers.{index}.self_attn.sinks" for index in (0, 2)],
        "heads": [4],
        "heads_a_rank": [2],
        "dtype": "bfloat16",
    }
    drops = [fault for fault in report["alone"] if fault.startswith("drops the sinks")]
    assert bool(drops) == (Version(vllm.version) < Version("0.30"))


def test_sinks_in_float32_that_stock_vllm_does_not_find(vllm, checkpoint):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="cast", keep_float32=True)
    status, report = inspect(vllm, folder, "--trust-remote-code")
    assert (status, report["sinks"]["dtype"]) == (0, "float32")
    assert report["alone"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("offset_llama", {"sink_form": "doubled"}, "the expression changes the parameter's values"),
        ("warped_llama", {"head_form": "direct"}, "goes through its projection 0 times"),
    ],
)
def test_refused_as_by_the_engine(vllm, checkpoint, name, change, message):
    folder = checkpoint(vllm, name, "remote", **change)
    status, report = inspect(vllm, folder, "--trust-remote-code")
    assert (status, report["outcome"]) == (3, "refused")
    assert any(message in reason for reason in report["reasons"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jetmoe", "with 4 key-value heads, vLLM with 2"),
        ("longcat_flash", "has 6 experts, of which only 4 have weights"),
        ("mamba", "vLLM itself refuses it"),
        ("minimax", "ayer 1"),
    ],
)
def test_refused_when_vllm_has_made_its_layers(vllm, tmp_path, name, message):
    vllm.run("support.small:build", model_type=name, folder=str(tmp_path))
    status, report = inspect(vllm, str(tmp_path))
    assert (status, report["outcome"]) == (3, "refused")
    assert message in report["reasons"][0]
    status, report = inspect(vllm, str(tmp_path), env=OFF)
    assert status == 3 if "vLLM itself" in report["reasons"][0] else 1


def test_experts_that_keep_their_weights_transposed(vllm, tmp_path):
    vllm.run("support.small:build", model_type="aria_text", folder=str(tmp_path))
    status, report = inspect(vllm, str(tmp_path))
    if vllm.run("support.cli_jobs:reads_layout_of_experts"):
        assert (status, report["outcome"]) == (0, "right")
        return
    assert (status, report["outcome"]) == (3, "refused")
    assert "AriaExperts of AriaTextModel keeps its weights transposed" in report["reasons"][0]
    assert inspect(vllm, str(tmp_path), env=OFF)[0] == 1


def test_longest_context(vllm, checkpoint):
    folder = checkpoint(vllm, "roberta")
    status, report = inspect(vllm, folder)
    assert (status, len(report["reasons"])) == (3, 1)
    assert "Set --max-model-len 255" in report["reasons"][0]
    assert inspect(vllm, folder, "--max-model-len", "255")[0] == 0


def test_heads_that_do_not_divide(vllm, checkpoint):
    status, report = inspect(vllm, checkpoint(vllm, "gpt_oss"), "--tensor-parallel-size", "3")
    assert status == 3
    assert "Sizes that work: 1, 2, 4." in report["reasons"][0]


def test_plugin_that_is_off_and_needed(vllm, checkpoint):
    status, report = inspect(vllm, checkpoint(vllm, "granite"), env=OFF)
    assert (status, report["outcome"]) == (1, "wrong")
    assert "VLLM_TF_SINKS=0 turns off the part of the plugin that this model needs" in report["reasons"][0]
    assert "vLLM gives wrong logprobs" in report["reasons"][0]
    assert inspect(vllm, checkpoint(vllm, "bert"), env=OFF)[0] == 3
    assert inspect(vllm, checkpoint(vllm, "llama"), env=OFF)[0] == 0


def test_text(vllm, checkpoint):
    job = {"arguments": ["inspect", checkpoint(vllm, "granite_swa")], "env": {"COLUMNS": "80"}}
    status, printed = vllm.run("support.cli_jobs:command", **job)
    assert status == 0
    assert max(map(len, printed.splitlines())) <= 80
    assert "layers     3 of 3" in printed
    assert "parameter  model.layers.*.self_attn.sinks" in printed
    assert printed.endswith("vLLM serves it with Hugging Face's logprobs.\n")


def test_no_such_model(vllm, tmp_path):
    status, report = inspect(vllm, str(tmp_path))
    assert (status, report["outcome"]) == (1, "error")
