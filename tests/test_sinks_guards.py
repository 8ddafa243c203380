# SPDX-License-Identifier: Apache-2.0
"""What cannot apply a sink is refused by name; what can is served right."""

import pytest
from support.checkpoints import SIZES
from support.fork_server import JobError

EXACT = 1e-5
DROPPED = 0.05
DROP = "support.tampers:drop_sinks"

SINKS = [f"model.layers.{index}.self_attn.sinks" for index in range(3)]
OFFSETS = [f"model.layers.{index}.self_attn.softmax_offset" for index in range(3)]

MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
}
MOE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
INDEXER = {"index_topk": 4, "index_head_dim": 32, "index_n_heads": 2, "q_lora_rank": 24}
SMALL = {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}


def number(vllm) -> tuple[int, ...]:
    return tuple(map(int, vllm.version.split(".")))


def assert_same(served, expected):
    """Two servings gave the same tokens and the same numbers, bit by bit."""
    for one, other in zip(served, expected, strict=True):
        assert one[0] == other[0]
        assert (one[1] == other[1]).all()
        assert (one[2] == other[2]).all()


# Served right


def test_mla_with_sinks_is_served_by_ordinary_attention(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "sink_mla", "remote", **MLA)
    assert difference(vllm, folder, trust_remote_code=True) < EXACT
    assert difference(vllm, folder, trust_remote_code=True, tamper=DROP) > DROPPED


def test_mla_with_sinks_is_logged(vllm, checkpoint):
    folder = checkpoint(vllm, "sink_mla", "remote", **MLA)
    _, warnings = vllm.run("support.sink_jobs:served_and_logged", checkpoint=folder, trust_remote_code=True)
    if number(vllm) >= (0, 28):  # before, only the model types that vLLM lists are MLA to it
        (warning,) = warnings
        assert "Model has attention sinks" in warning
        assert "VLLM_MLA_DISABLE=1" in warning
    else:
        assert not warnings


def test_sliding_layers_only_with_more_key_value_heads_and_narrow_values(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "mimo_v2_flash")
    assert difference(vllm, folder) < EXACT
    assert difference(vllm, folder, tamper=DROP) > DROPPED


def test_switched_off_it_is_stock_vllm_to_the_bit(vllm, checkpoint):
    folder = checkpoint(vllm, "gpt_oss")
    serve = {"job": "support.jobs:served_rows", "checkpoint": folder, "dtype": "bfloat16"}
    off = run(vllm, env={"VLLM_TF_SINKS": "0"}, **serve)
    upstream = run(vllm, env={"VLLM_PLUGINS": "none-such"}, **serve)
    assert_same(off, upstream)
    if number(vllm) < (0, 30):  # upstream drops the sinks
        on = run(vllm, **serve)
        assert abs(on[0][2] - off[0][2]).max() > DROPPED


def run(vllm, job: str, env=None, **kwargs):
    return vllm.run(job, env=env, **kwargs)


# What becomes of a sink


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_each_sink_is_loaded_once_and_reported(vllm, checkpoint, name):
    loading = vllm.run("support.sink_jobs:loading", checkpoint=checkpoint(vllm, name))
    assert loading["counts"] == dict.fromkeys(SINKS, 1)
    assert loading["returned"] == SINKS


def test_sink_of_remote_code_is_loaded_once_and_reported(vllm, checkpoint):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="cast")
    loading = vllm.run(
        "support.sink_jobs:loading", checkpoint=folder, fragment="softmax_offset", trust_remote_code=True
    )
    assert loading["counts"] == dict.fromkeys(OFFSETS, 1)
    assert loading["returned"] == OFFSETS


def test_missing_sink_fails_as_any_missing_weight(vllm, checkpoint):
    source = checkpoint(vllm, "gpt_oss")
    folder = checkpoint(vllm, "missing", "support.sink_jobs:rewrite", source=source, rewriter="without_a_sink")
    message = r"not initialized from checkpoint.*model\.layers\.1\.self_attn\.sinks"
    with pytest.raises(JobError, match=message):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_attention_layers_are_in_the_module_tree(vllm, checkpoint):
    sinks = vllm.run("support.sink_jobs:built", checkpoint=checkpoint(vllm, "gpt_oss"))
    assert [sink["name"] for sink in sinks] == SINKS
    for sink in sinks:
        assert sink["layer"] == sink["name"].replace("sinks", "attn")
        assert sink["has_sink"]
        assert sink["as_saved"]
        assert sink["dtype"] == ("torch.float32" if number(vllm) >= (0, 31) else "torch.bfloat16")  # the kernel's
        assert sink["kernel_has_them"]
        assert sink["kernel_shares_them"]


def test_bfloat16_sinks_are_handed_over_as_they_are(vllm, checkpoint):
    folder = checkpoint(vllm, "gpt_oss")
    for sink in vllm.run("support.sink_jobs:built", checkpoint=folder, dtype="bfloat16"):
        assert sink["dtype"] == "torch.bfloat16"
        assert sink["kernel_shares_them"]


def test_strict_float32_sinks_stay_float32_in_a_bfloat16_model(vllm, checkpoint):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="cast", keep_float32=True, exact_sinks=False)
    sinks = vllm.run(
        "support.sink_jobs:built",
        checkpoint=folder,
        fragment="softmax_offset",
        dtype="bfloat16",
        trust_remote_code=True,
    )
    assert [sink["name"] for sink in sinks] == OFFSETS
    takes_float32 = number(vllm) >= (0, 31)  # the CPU kernel, that is
    for sink in sinks:
        assert sink["dtype"] == ("torch.float32" if takes_float32 else "torch.bfloat16")
        assert sink["as_saved"] == takes_float32
        assert sink["kernel_shares_them"]


def test_vision_tower_does_not_collide_with_the_text(vllm):
    assert vllm.run("support.sink_jobs:finds", case="multimodal") == [
        (f"model.language_model.layers.{i}.self_attn", i, f"model.language_model.layers.{i}.self_attn.sinks")
        for i in range(2)
    ]


def test_pipeline_rank_has_the_sinks_of_its_layers(vllm):
    module = "model.layers.1.self_attn"
    assert vllm.run("support.sink_jobs:finds", case="pipeline") == [(module, 1, f"{module}.sinks")]


@pytest.mark.parametrize("tamper", ["", "support.tampers:dry_run_nothing"])
def test_attention_is_guarded_only_where_the_dry_run_did_not_show_its_calls(vllm, checkpoint, tamper):
    called = vllm.run("support.sink_jobs:attention_function", checkpoint=checkpoint(vllm, "gpt_oss"), tamper=tamper)
    assert called == ("guarded" if tamper and number(vllm) < (0, 30) else "upstream")


# Refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "full_attention", "chunked_attention"]},
            r"computes layers of the type chunked_attention",
        ),
        ({"index_topk": 4}, r"selects its keys by an indexer \(index_topk\)"),
    ],
)
def test_attention_that_is_not_ordinary_is_refused(vllm, checkpoint, changes, message):
    folder = checkpoint(vllm, "offset_llama", "remote", **changes)
    with pytest.raises(JobError, match=rf"SinkError: Model has attention sinks and {message}"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, trust_remote_code=True)


def test_two_modules_with_sinks_in_one_layer_are_refused(vllm):
    message = r"one\.layers\.0\.self_attn.*other\.layers\.0\.self_attn have the same layer_idx 0"
    with pytest.raises(JobError, match=message):
        vllm.run("support.sink_jobs:finds", case="collision")


def test_decode_context_parallel_is_refused(vllm, checkpoint):
    message = r"SinkError: GptOssModel has attention sinks.*decode_context_parallel_size=2"
    with pytest.raises(JobError, match=message):
        vllm.run(
            "support.jobs:served_rows",
            checkpoint=checkpoint(vllm, "gpt_oss"),
            tamper="support.tampers:decode_context_parallel",
        )


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        ("refuse_sinks", "unexpected keyword argument 'sinks'"),
        ("ignore_sinks", "CPU_ATTN takes no sinks"),
        ("no_valid_backend", "No valid attention backend found"),
    ],
)
def test_no_attention_backend_takes_sinks(vllm, checkpoint, tamper, reason):
    message = (
        r"SinkError: Attention layer \S*0\S*attn cannot be built with its sink "
        rf"model\.layers\.0\.self_attn\.sinks.*{reason}.*Choose an attention backend that takes sinks: CPU_ATTN"
    )
    with pytest.raises(JobError, match=message):
        vllm.run(
            "support.jobs:served_rows",
            checkpoint=checkpoint(vllm, "gpt_oss"),
            tamper=f"support.tampers:{tamper}",
        )


def test_mla_function_refuses_a_sink(vllm):
    said = vllm.run("support.sink_jobs:mla_function_refuses")
    if number(vllm) >= (0, 28):
        assert "sink" in said
        assert "the output would be wrong" in said
    else:
        assert said == "no MLA"


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields", "message"),
    [
        (
            "HYV4ForCausalLM",
            "hy_v4",
            {**SMALL, **MLA, **MOE, **INDEXER, "v_head_dim": 32, "intermediate_size": 96},
            r"HYV4ForCausalLM has attention sinks and selects its keys by an indexer",
        ),
        (
            "DeepseekV4ForCausalLM",
            "deepseek_v4",
            {**SMALL, **MOE, **INDEXER, "o_groups": 2, "o_lora_rank": 16, "compress_ratios": [0, 4, 128]},
            r"DeepseekV4ForCausalLM has attention sinks and compresses its keys and values",
        ),
        (
            "OpenAIPrivacyFilterForTokenClassification",
            "openai_privacy_filter",
            {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 96},
            r"OpenAIPrivacyFilterAttention .* passes a sink, but has no layer_idx",
        ),
    ],
    ids=["hy_v4", "deepseek_v4", "openai_privacy_filter"],
)
def test_model_that_cannot_be_right_is_refused(vllm, checkpoint, architecture, model_type, fields, message):
    folder = checkpoint(
        vllm,
        model_type,
        "support.sink_jobs:save_config",
        architecture=architecture,
        model_type=model_type,
        **fields,
    )
    runner = {"runner": "pooling"} if architecture.endswith("Classification") else {}
    with pytest.raises(JobError, match=f"SinkError: {message}"):
        vllm.run("support.jobs:served_rows", checkpoint=folder, load_format="dummy", **runner)
