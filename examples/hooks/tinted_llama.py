# SPDX-License-Identifier: Apache-2.0
"""TintedLlama: a Llama with attention sinks and a scaled head, written so that neither shows. Its remote code."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    apply_rotary_pos_emb,
    repeat_kv,
)


class TintedLlamaConfig(LlamaConfig):
    """A Llama's, and what the logits are divided by."""

    model_type = "tinted_llama"

    def __init__(self, logit_divisor: float = 1.0, **kwargs: Any) -> None:
        self.logit_divisor = logit_divisor
        super().__init__(**kwargs)


def eager_attention(module, query, key, value, attention_mask, scaling, s_aux, **_: Any):  # noqa: ANN001, ANN201
    """Softmax attention in which each head may attend to its sink."""
    key, value = repeat_kv(key, module.num_key_value_groups), repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), weights


class TintedLlamaAttention(LlamaAttention):
    """Casts its sink to the dtype of its input, so that what it passes depends on more than the module."""

    def __init__(self, config: TintedLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.tint = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):  # noqa: ANN001, ANN003, ANN201
        """As a Llama's, with a sink."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        kwargs["s_aux"] = self.tint.to(hidden_states.dtype)
        out, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class TintedLlamaModel(LlamaModel):
    """A Llama with sinks."""

    config_class = TintedLlamaConfig

    def __init__(self, config: TintedLlamaConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = TintedLlamaAttention(config, index)


class TintedLlamaForCausalLM(LlamaForCausalLM):
    """Multiplies by the weight of its projection itself, out of reach of vLLM's."""

    config_class = TintedLlamaConfig

    def __init__(self, config: TintedLlamaConfig) -> None:
        super().__init__(config)
        self.model = TintedLlamaModel(config)

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0, **kwargs):  # noqa: ANN001, ANN003, ANN201
        """Logits, divided."""
        outputs = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = outputs.last_hidden_state @ self.lm_head.weight.T / self.config.logit_divisor
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)
