# SPDX-License-Identifier: Apache-2.0
"""A tiny random checkpoint of any causal LM type of Transformers: every constant of its config non-trivial."""

import dataclasses
import json
from pathlib import Path

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE = 128, 4, 2, 32  # the CPU attention kernel takes few head sizes
VOCABULARY, POSITIONS, WINDOW = 128, 256, 4
EXPERTS, ACTIVE_EXPERTS = 4, 2

# What a field of a config is set to, whichever config has it
FIELDS = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_query_groups"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), KEY_VALUE_HEADS),
    **dict.fromkeys(("head_dim", "dim_head", "swa_head_dim", "kv_channels", "attention_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("attention_head_size", "linear_head_dim", "linear_key_head_dim", "d_head"), HEAD_SIZE),
    **dict.fromkeys(("linear_value_head_dim", "index_head_dim", "mamba_head_dim", "mamba_d_head"), HEAD_SIZE),
    "mamba_headdim": 2 * HIDDEN // HEADS,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 2 * HIDDEN // HEAD_SIZE),
    **dict.fromkeys(("mamba_d_ssm", "lru_width"), 2 * HIDDEN),
    "index_n_heads": 2,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "dff", "dim_ff", "n_inner", "d_inner"), 192),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 192),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 192),
    **dict.fromkeys(("first_dense_intermediate_size", "mlp_only_intermediate_size"), 192),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), ACTIVE_EXPERTS),
    "zero_expert_num": 2,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "encoder_hash_byte_group_vocab": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), POSITIONS),
    **dict.fromkeys(("rel_extent", "position_bias_max_distance"), POSITIONS),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "keep_window_size", "floor_scale", "log_scaling_n_floor"), WINDOW),
    "local_attention": 2 * WINDOW,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_SIZE // 2),
    "qk_head_dim": HEAD_SIZE,
    "rotary_dim": HEAD_SIZE // 2,
    "is_decoder": True,
    "lm_head_bias": True,
    # Constants of heads
    "logits_scaling": 7.3,
    "logit_scale": 0.37,
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 3.0),
    "lm_head_multiplier": 0.37,
    "logits_mup_width_multiplier": 1.7,
    "dim_model_base": 48,
    # And of the rest
    "attention_multiplier": 0.11,
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "scale_emb"), 1.7),
    "residual_multiplier": 0.7,
    "scale_depth": 1.7,
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 30,
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 1.3),
    "moe_routed_scaling_factor": 1.3,
    "clip_qkv": 1.5,
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), 0.8),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 0.8),
    # Sizes that only some have
    **dict.fromkeys(("laurel_rank", "gated_norm_rank", "adapter_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("router_hidden_size", "mamba_d_state", "ssm_state_size", "state_size", "time_step_rank"), 16),
    **dict.fromkeys(("mamba_dt_rank", "d_rel", "hc_lowrank", "loop_gate_rank"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 48),
    **dict.fromkeys(("index_topk", "index_topk_blocks"), WINDOW),
}
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "num_layers_per_stack"),
)
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "attention_layers")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

MLA = {"num_key_value_heads": HEADS, "head_dim": HEAD_SIZE // 2}
INDEXER = {
    "indexer_budget": 2 * WINDOW,
    "indexer_compress_ratio": WINDOW,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_SIZE,
}
# Its window layers have heads of their own, which no field of the config names
DOTS3_NOTE = {
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": HEAD_SIZE,
    "swa_qk_nope_head_dim": HEAD_SIZE // 2,
    "swa_v_head_dim": HEAD_SIZE // 2,
}
INKLING2 = {
    "unpadded_vocab_size": VOCABULARY - 8,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 1.0,
    "n_layers_per_attn_res_block": 1,
    "mlp_gate_softcap": 1.5,
    "mlp_up_softcap": 2.0,
}

# Only where the rules make no model, or one that leaves something out
OTHERS: dict[str, dict] = {
    "apertus1p5_text": {"output_vocab_size": VOCABULARY - 8},
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "expert_swiglu_limit_list": [0.0, 0.7],
        "share_expert_swiglu_limit_list": [0.0, 0.5],
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "hidden_size": 256,  # its rotary sections are for heads of 128
        "num_attention_heads": 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KEY_VALUE_HEADS, "clip_qkv": 1.5, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {"n_shared_experts": 1},
    **dict.fromkeys(("dots3_note", "dots3_note_text"), DOTS3_NOTE),
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "ergo": {"global_attention_scale": 1.3},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "got_ocr2": {
        "text_config": {
            "model_type": "qwen2",
            **{name: FIELDS[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
            **{name: FIELDS[name] for name in ("num_attention_heads", "num_key_value_heads")},
            "num_hidden_layers": 2,
        },
        "image_token_index": VOCABULARY - 1,
    },
    "gemma4_text": {"num_experts": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        **INKLING2,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": INKLING2,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kolibri1_1": {
        "layer_types": ["sliding_attention", "indexed_attention", "indexed_attention"],
        "index_pool_size": 2 * WINDOW,
        "index_compression": 2,
        "index_num_heads": 2,
        "index_num_local_tokens": 2,
        "index_num_sink_tokens": 1,
        "mlp_only_layers": [0],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    **{name: {"attention_chunk_size": POSITIONS} for name in ("llama4", "llama4_text")},
    "moshi": {"sliding_window": POSITIONS},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), INDEXER),
    "reformer": {"axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


# Fields that checkpoints do without, and vLLM's own config class of that type refuses
NOT_SAVED = {"deepseek_v4": ["mlp_layer_types"]}

# What cannot be read or served here
_PROCESSOR = "a multimodal class, whose processor needs torchvision; its text model is a type of its own"
NOT_BUILT = {
    "blt": "several models of bytes and patches in one config, which vLLM does not read",
    **dict.fromkeys(("fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2"), _PROCESSOR),
    "moss_transcribe_diarize": "a multimodal class of audio, whose config vLLM reads as another class",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "a draft, which runs on another model's states"),
}

UNTIED_ONLY = {"dbrx"}  # its config refuses tie_word_embeddings, though its class declares it


def model_types() -> dict[str, str]:
    """Model type -> class name, of Transformers' causal LM mapping, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def small_config(model_type: str, tied: bool, **changes):
    """The config of a tiny model of `model_type`, a text model's where the class takes that."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = getattr(transformers, model_types()[model_type])
    config_class = CONFIG_MAPPING[model_type]
    if cls.config_class in config_class.sub_configs.values():
        config_class = cls.config_class
    fields = _fields(config_class, {**OTHERS.get(model_type, {}), **changes})
    return config_class(**fields, tie_word_embeddings=tied)


def _fields(config_class, others: dict) -> dict:
    from transformers import AutoConfig

    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {name: value for name, value in {**FIELDS, **TOKENS}.items() if name in known}
    fields |= {name: 0 for name in known - set(TOKENS) if name.endswith("_token_id")}
    if "kv_lora_rank" in known:
        fields |= {name: value for name, value in MLA.items() if name in known}
    if "n_group" in known:
        fields |= {"n_group": 2, "topk_group": 1}
    parts = {name: part for name, part in config_class.sub_configs.items() if dataclasses.is_dataclass(part)}
    fields |= {name: part(**_fields(part, {})) for name, part in parts.items() if part is not AutoConfig}
    fields |= others
    fields |= _layers(config_class, known, fields)
    return fields


def _layers(config_class, known: set[str], fields: dict) -> dict:
    """As many layers as the config has kinds of, and at least two."""
    given = [len(fields[name]) for name in PER_LAYER if name in fields][:1]
    default = config_class(**fields, **{name: given[0] for name in LAYERS if given and name in known})
    kinds = {
        name: list(dict.fromkeys(getattr(default, name)))
        for name in PER_LAYER
        if name in known and getattr(default, name)
    }
    kinds |= {name: fields[name] for name in PER_LAYER if name in fields}
    count = max(2, *map(len, kinds.values()), 0)
    layers = {name: fields.get(name, count) for name in LAYERS if name in known}
    return layers | {name: (values * count)[:count] for name, values in kinds.items()}


def ways() -> dict[str, list[bool]]:
    """For each model type whether its projection is tied to the input embeddings: both, where the class allows."""
    import transformers

    classes = {name: getattr(transformers, cls) for name, cls in model_types().items()}
    return {
        name: [False, True] if cls._tied_weights_keys and name not in UNTIED_ONLY else [False]
        for name, cls in classes.items()
    }


def build(model_type: str, folder: str, tied: bool = False, **changes) -> dict:
    """Save a random model of `model_type` to `folder`, and say what is in it."""
    import torch
    import transformers

    from support.checkpoints import randomise

    torch.manual_seed(0)
    cls = getattr(transformers, model_types()[model_type])
    model = cls(small_config(model_type, tied, **changes)).eval()
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    for module in model.modules():
        if getattr(module, "padding_idx", None) is not None and isinstance(module, torch.nn.Embedding):
            module.weight.data[module.padding_idx] = 0  # as trained: some classes make it zero when they load it
    model.save_pretrained(folder)
    path = Path(folder) / "config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in saved.items() if k not in NOT_SAVED.get(model_type, ())}))
    return {"head": _head(model), "sinks": _sink_layers(model)}


def _head(model) -> str:
    """The kind of a model's head."""
    from vllm_tf_sinks.errors import HeadError
    from vllm_tf_sinks.lm_head.build import build_head
    from vllm_tf_sinks.lm_head.classify import classify

    try:
        head = build_head(type(model), model.config, model.base_model)
        size = getattr(model.config.get_text_config(), "hidden_size", head.projection.in_features)
        return classify(head, size).describe()
    except HeadError:
        return "refused"


def _sink_layers(model) -> int:
    """How many attention layers have a sink."""
    from vllm_tf_sinks.attention.sink_finder import find_sinks

    model.config.get_text_config()._attn_implementation = "vllm"
    return len(find_sinks(model))
