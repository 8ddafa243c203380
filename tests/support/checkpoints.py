# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints, every constant of their configs non-trivial."""

import shutil
from pathlib import Path

REMOTE_CODE = Path(__file__).resolve().parent / "remote_code"

# head size 32: the CPU attention kernel does not take every size
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
GRANITE = {"embedding_multiplier": 1.7, "residual_multiplier": 0.7, "attention_multiplier": 0.11}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# head size 32 again, for configs without a head_dim
ENCODER = {
    **{
        name: SIZES[name]
        for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    },
    "hidden_size": 64,
    "num_attention_heads": 2,
    "is_decoder": True,
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {**SIZES}),
    "gpt_oss": ("GptOss", {**SIZES, **WINDOW, **MOE}),
    "granite_swa": ("GraniteSWA", {**SIZES, **WINDOW, **GRANITE, "logits_scaling": 1.0}),
    "granitemoe_swa": ("GraniteMoeSWA", {**SIZES, **WINDOW, **GRANITE, **MOE, "logits_scaling": 1.0}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **SIZES,
            **WINDOW,
            "v_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}

HEADS: dict[str, tuple[str, dict]] = {
    "granite": ("Granite", {**SIZES, **GRANITE, "logits_scaling": 7.3}),
    "granitemoe": ("GraniteMoe", {**SIZES, **GRANITE, **MOE, "logits_scaling": 7.3}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**SIZES, **GRANITE, **MOE, "shared_intermediate_size": 48, "logits_scaling": 7.3},
    ),
    "granite_swa_scaled": ("GraniteSWA", {**SIZES, **WINDOW, **GRANITE, "logits_scaling": 7.3}),
    "hyperclovax": (
        "HyperCLOVAX",
        {**SIZES, **GRANITE, "logits_scaling": 0.37, "use_post_norm": True},
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **SIZES,
            "dim_model_base": 24,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 32,
            "num_key_value_heads": 4,
            "scale_emb": 1.3,
            "scale_depth": 1.7,
        },
    ),
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.37}),
    "cohere_compass_text": (
        "CohereCompassText",
        {
            **{name: size for name, size in SIZES.items() if name != "head_dim"},
            "hidden_size": 256,  # its rotary sections are for heads of 128
            "num_attention_heads": 2,
            "logit_scale": 0.37,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ),
    "gemma2": ("Gemma2", {**SIZES, **WINDOW, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 30}),
    "gemma3_text": ("Gemma3Text", {**SIZES, **WINDOW, "final_logit_softcapping": 3.0}),
    "nanochat": ("NanoChat", {**SIZES, "final_logit_softcapping": 3.0}),
    "vaultgemma": ("VaultGemma", {**SIZES, **WINDOW, "final_logit_softcapping": 3.0}),
    "modernbert-decoder": ("ModernBertDecoder", {**ENCODER, "decoder_bias": True, "local_attention": 8}),
    "bert": ("Bert", ENCODER),
    "camembert": ("Camembert", ENCODER),
    "electra": ("Electra", {**ENCODER, "embedding_size": 48}),
    "ernie": ("Ernie", ENCODER),
    "roberta": ("Roberta", ENCODER),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", ENCODER),
    "roc_bert": ("RoCBert", ENCODER),
    "xlm-roberta": ("XLMRoberta", ENCODER),
    "xmod": ("Xmod", {**ENCODER, "default_language": "en_XX"}),
    "data2vec-text": ("Data2VecText", ENCODER),
    "gpt_neox": ("GPTNeoX", {**ENCODER, "rotary_pct": 0.5}),
    "opt": ("OPT", {**ENCODER, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("Phi", {**SIZES, "partial_rotary_factor": 0.5}),
    "llama": ("Llama", SIZES),
}
CONFIGS.update(HEADS)


def build(name: str, folder: str, exact_sinks: bool = True, seed: int = 0, **changes) -> str:
    """Save a random `name` to `folder` and return that.

    Args:
        exact_sinks: make the sinks multiples of 0.25, which bfloat16 holds exactly.
        changes: fields of the config that differ from the table's.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    prefix, fields = CONFIGS[name]
    fields = {**fields, **changes}
    config = getattr(transformers, f"{prefix}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, exact_sinks)
    model.save_pretrained(folder)
    return folder


def randomise(model, exact_sinks: bool = True) -> None:
    """Fill every parameter with numbers large enough that each one shows in the logits."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name or "offset" in name:
                values = torch.empty_like(parameter).uniform_(-2, 6)
                parameter.copy_((values * 4).round() / 4 if exact_sinks else values)
            elif parameter.dim() == 1 and "norm" in name and "weight" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))


def remote(name: str, folder: str, exact_sinks: bool = True, **changes) -> str:
    """Save a random model of the remote code `name` to `folder`, with its code beside it."""
    import sys

    import torch

    sys.path.insert(0, str(REMOTE_CODE))
    module = __import__(name)
    torch.manual_seed(0)
    config = module.Config(**{**SIZES, **changes})
    config.auto_map = {
        "AutoConfig": f"{name}.Config",
        "AutoModel": f"{name}.Model",
        "AutoModelForCausalLM": f"{name}.ForCausalLM",
    }
    config.architectures = ["ForCausalLM"]
    model = module.ForCausalLM(config)
    randomise(model, exact_sinks)
    model.save_pretrained(folder)
    shutil.copy(REMOTE_CODE / f"{name}.py", folder)
    return folder


def without(folder: str, source: str, fragment: str) -> str:
    """Copy `source` to `folder` but for the tensors whose name has `fragment`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = Path(folder) / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if fragment not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def retagged(folder: str, source: str, **fields) -> str:
    """Copy `source` to `folder` with other fields in its config."""
    import json

    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def add_tokenizer(folder: str) -> None:
    """Save a tokenizer of the words "0" to "127" beside a checkpoint: pooling and grammars insist on one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(token): token for token in range(SIZES["vocab_size"])}, unk_token="0"))
    special = {"unk_token": "0", "pad_token": "0", "eos_token": str(SIZES["eos_token_id"])}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
