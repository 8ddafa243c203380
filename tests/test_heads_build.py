# SPDX-License-Identifier: Apache-2.0
"""What building a model's head costs, leaves alone, and puts where."""

import pytest
from support.fork_server import JobError


def test_projection_only_keeps_the_stock_path(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    on = vllm.run("support.head_jobs:inspected", checkpoint=folder)
    off = vllm.run("support.head_jobs:inspected", checkpoint=folder, env={"VLLM_TF_SINKS": "0"})
    assert on["is_stock"]
    assert on.pop("local_agrees") in (True, None)  # batch-sharded sampling, from vLLM 0.29
    assert off.pop("local_agrees") is None
    assert on == off


def test_transform_has_weights_of_its_own(vllm, checkpoint):
    found = vllm.run("support.head_jobs:inspected", checkpoint=checkpoint(vllm, "modernbert-decoder"))
    assert not found["is_stock"]
    assert sorted(found["output_head"]) == ["output_head.lm_head.dense.weight", "output_head.lm_head.norm.weight"]


def test_batch_sharded_sampling(vllm, checkpoint):
    """An elementwise head has local logits where vLLM can use them, and a full head never."""
    elementwise, full = (
        vllm.run("support.head_jobs:inspected", checkpoint=checkpoint(vllm, name))
        for name in ("granite", "modernbert-decoder")
    )
    can = tuple(int(part) for part in vllm.version.split(".")) >= (0, 29)
    assert elementwise["local_agrees"] is (True if can else None)
    assert full["local_agrees"] is None
    assert elementwise["shape_of_no_rows"] == full["shape_of_no_rows"] == (0, 128)


def test_head_is_no_second_compiled_model(vllm, checkpoint):
    folder = checkpoint(vllm, "granite")
    runs = [
        vllm.run("support.head_jobs:inspected", checkpoint=folder, enforce_eager=False, env={"VLLM_TF_SINKS": value})
        for value in ("0", "1")
    ]
    assert runs[0]["models_seen"] == runs[1]["models_seen"] > 0


def test_no_decoder_is_built(vllm):
    kind, build_s, classify_s = vllm.run("support.head_jobs:built_alone", layers=100)
    assert kind == "elementwise"
    print(f"head of a 100-layer config: built in {build_s:.3f} s, classified in {classify_s:.3f} s")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_shared(vllm, checkpoint, tied):
    folder = checkpoint(vllm, "bert", tie_word_embeddings=tied)
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder)
    assert found["shares_embeddings"] == tied
    assert "bias" in found["lm_head"]
    assert not [name for name in found["output_head"] if "predictions.bias" in name]


def test_head_is_on_the_last_pipeline_rank_only(vllm, checkpoint):
    folder = checkpoint(vllm, "bert", tie_word_embeddings=False)
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder, is_last_rank=False)
    assert not found["has_logits"]
    assert not [name for name in found["parameters"] if "head" in name]


def test_fields_that_transformers_ignores_are_ignored(vllm, checkpoint):
    """A Llama's config may hold a scale and a cap, which vLLM honours and Hugging Face does not."""
    folder = checkpoint(vllm, "llama", logit_scale=3.0, final_logit_softcapping=2.0)
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder)
    assert (found["scale"], found["soft_cap"]) == (1.0, None)


def test_scale_of_none(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "cohere_compass_text", logit_scale=None)
    assert difference(vllm, folder) < 1e-4


def test_head_kept_in_float32(vllm, checkpoint):
    folder = checkpoint(vllm, "warped_llama", "remote", head_form="flat", keep_float32=True)
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder, dtype="bfloat16", trust_remote_code=True)
    assert set(found["lm_head"].values()) == {"torch.float32"}
    assert set(found["output_head"].values()) == {"torch.float32"}
    assert found["head_dtype"] == "torch.float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_that_casts_stays_in_the_dtype_of_the_model(vllm, checkpoint, dtype):
    folder = checkpoint(vllm, "warped_llama", "remote", head_form="flat")
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder, dtype=dtype, trust_remote_code=True)
    assert found["dtype"] == f"torch.{dtype}"


def test_head_dtype_override(vllm, checkpoint, difference):
    overrides = {"head_dtype": "float32"}
    folder = checkpoint(vllm, "granite")
    assert difference(vllm, folder, dtype="bfloat16", hf_overrides=overrides) < 0.5
    found = vllm.run("support.head_jobs:inspected", checkpoint=folder, dtype="bfloat16", hf_overrides=overrides)
    assert found["head_dtype"] == "torch.float32"


def test_revision_of_remote_code(vllm):
    ((args, kwargs),) = vllm.run("support.head_jobs:class_asked_for", revision="main", code_revision="abc")
    assert args == ("modeling.Own", "someone/model")
    assert kwargs == {"revision": "main", "code_revision": "abc"}


def test_checkpoint_without_a_head_weight_is_refused(vllm, checkpoint, tmp_path):
    source = checkpoint(vllm, "modernbert-decoder", tie_word_embeddings=False)
    folder = vllm.run(
        "support.checkpoints:without", folder=str(tmp_path), source=source, fragment="lm_head.dense.weight"
    )
    with pytest.raises(JobError, match=r"not initialized from checkpoint.*output_head\.lm_head\.dense\.weight"):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_tied_config_with_a_weight_of_its_own(vllm, checkpoint, difference, tmp_path):
    """Transformers takes the projection for untied where a checkpoint has a weight for it."""
    source = checkpoint(vllm, "granite", tie_word_embeddings=False)
    folder = vllm.run("support.checkpoints:retagged", folder=str(tmp_path), source=source, tie_word_embeddings=True)
    assert difference(vllm, folder) < 1e-4


@pytest.mark.parametrize("name", ["modernbert-decoder", "roberta", "granite"])
def test_pooling_needs_no_head(vllm, checkpoint, name):
    folder = checkpoint(vllm, name, tie_word_embeddings=False)
    assert vllm.run("support.head_jobs:pooled", checkpoint=folder, prompt=[3, 17, 29, 5, 41]) < 1e-5


EMBEDDINGS = "model.language_model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        # It ignores the cap of its config
        ("gemma3", ("Gemma3ForConditionalGeneration", "lm_head", "projection only", EMBEDDINGS)),
        ("gemma4", ("Gemma4ForConditionalGeneration", "lm_head", "elementwise", EMBEDDINGS)),
        ("llava", ("LlavaForConditionalGeneration", "lm_head", "projection only", EMBEDDINGS)),
        (
            "llama4",  # it nests the ForCausalLM that has the projection
            (
                "Llama4ForConditionalGeneration",
                "language_model.lm_head",
                "projection only",
                "language_model.model.embed_tokens.weight",
            ),
        ),
        ("qwen2_5_vl", ("Qwen2_5_VLForConditionalGeneration", "lm_head", "projection only", EMBEDDINGS)),
    ],
)
def test_multimodal_heads(vllm, model_type, expected):
    assert vllm.run("support.head_jobs:multimodal_kind", model_type=model_type) == expected
