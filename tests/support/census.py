# SPDX-License-Identifier: Apache-2.0
"""Every causal LM class of Transformers: its head alone against the class itself, fed the same hidden states."""

import contextlib

ROWS = 4


def classes() -> list[tuple[str, str]]:
    """Model types and class names of Transformers' causal LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


def check(model_type: str, name: str) -> tuple[str, float]:
    """The kind of the head, and the largest difference of its logits from those of the class, both ways of running it.

    Raises:
        HeadError: if the head is refused.
    """
    import torch
    import transformers

    from vllm_tf_sinks.lm_head.build import build_head
    from vllm_tf_sinks.lm_head.classify import classify

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    config = small_config(model_type, cls)
    with torch.device("meta"):
        model = cls(config).eval()
    base = base_model(model)
    fill_head(model, base)
    head = build_head(cls, config, base)
    hidden = torch.randn(1, ROWS, hidden_size(model, config, head))
    spec = classify(head, hidden.shape[-1])

    projection = model.get_output_embeddings()
    weights = dict(model.named_parameters())
    for path, owner in head.model.named_modules():
        for weight in [w for w in owner._parameters if owner._parameters[w] is not None]:
            owner._parameters[weight] = weights[f"{path}.{weight}" if path else weight]
    head.projection.project, head.projection.dtype = projection, torch.float32

    with torch.no_grad():
        expected = from_hidden_states(model, base, hidden)
        eager = head.run_eagerly(hidden)
        planned = head.run_eagerly(hidden) if not spec.is_traced else spec.run(projection, hidden.clone())
    assert expected.shape == eager.shape == planned.shape
    difference = max((expected - eager).abs().max().item(), (expected - planned).abs().max().item())
    return spec.describe(), difference


HEAD_FIELDS = {
    "vocab_size": 160,
    "pad_token_id": 0,
    "is_decoder": True,
    "logits_scaling": 7.3,
    "logit_scale": 0.37,
    "final_logit_softcapping": 3.0,
    "lm_head_multiplier": 0.37,
    "tie_word_embeddings": False,
}

INDEXER = {
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
}

# What the default config of a model type lacks
MISSING = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    **{name: {"unpadded_vocab_size": 150} for name in ("inkling2_loop_text", "inkling2_text")},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
}


def small_config(model_type: str, cls):
    """The default config with a small vocabulary, and every constant of a head non-trivial."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type.startswith("musicgen"):
        return cls.config_class()
    config = CONFIG_MAPPING[model_type](**MISSING.get(model_type, {}))
    text = config.get_text_config()
    if isinstance(text, cls.config_class) and not isinstance(config, cls.config_class):
        config = text
    for each in {id(c): c for c in (config, text)}.values():
        for field, value in HEAD_FIELDS.items():
            if hasattr(each, field):
                with contextlib.suppress(AttributeError):  # a property
                    setattr(each, field, value)
    if model_type == "dbrx":
        config.attn_config = transformers.models.dbrx.configuration_dbrx.DbrxAttentionConfig(rope_theta=1e4)
    return config


def base_model(model):
    """The module that the class's forward calls for hidden states."""
    import inspect
    import re

    called = re.findall(r"self\.([\w.]+)\(\s", inspect.getsource(inspect.unwrap(type(model).forward)))
    return next(module for path in called if (module := model.get_submodule(path)) and hasattr(module, "config"))


def fill_head(model, base) -> None:
    """Give memory to the parameters and buffers outside the base model."""
    import torch

    inside = {id(p) for p in base.parameters()} | {id(b) for b in base.buffers()}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in inside and parameter.is_meta:
                owner._parameters[name] = torch.nn.Parameter(0.3 * torch.randn(parameter.shape), requires_grad=False)
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) not in inside and buffer.is_meta:
                owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def hidden_size(model, config, head) -> int:
    """The size of the base model's output: where a head transforms it, that of the config."""
    size = getattr(config.get_text_config(), "hidden_size", None)
    return 2 * size if config.model_type == "reformer" else size or head.projection.in_features


def from_hidden_states(model, base, hidden):
    """The logits of the class itself, were `hidden` what its base model gives."""
    import inspect

    from vllm_tf_sinks.lm_head.stubs import Output

    base.forward = lambda *args, **kwargs: Output(hidden)
    parameters = inspect.signature(model.forward).parameters
    flags = {"use_cache": False} if "use_cache" in parameters else {}
    if "inputs_embeds" in parameters:
        return model(inputs_embeds=hidden, **flags).logits
    return model(input_ids=hidden[..., 0].long().abs() % 100, **flags).logits
