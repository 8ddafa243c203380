# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek V3, so with latent attention (MLA), whose attention has sinks."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
    apply_rotary_pos_emb_interleave,
)


class Config(DeepseekV3Config):
    model_type = "sink_mla"


def eager(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink.to(scores.dtype)], dim=-1).softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(DeepseekV3Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        batch_size, seq_length = hidden_states.shape[:-1]
        query_shape = (batch_size, seq_length, -1, self.qk_head_dim)
        q_states = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_states = q_states.view(query_shape).transpose(1, 2)
        q_pass, q_rot = torch.split(q_states, [self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        compressed_kv = self.kv_a_proj_with_mqa(hidden_states)
        kv_nope, k_rot = torch.split(compressed_kv, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_nope = self.kv_a_layernorm(kv_nope)
        kv_nope = kv_nope.view(batch_size, 1, seq_length, self.kv_lora_rank)
        k_rot = k_rot.view(batch_size, 1, seq_length, self.qk_rope_head_dim)
        cos, sin = position_embeddings
        q_rot, k_rot = apply_rotary_pos_emb_interleave(q_rot, k_rot, cos, sin)
        query_states = torch.cat((q_pass, q_rot), dim=-1)
        key_states, value_states = self.expand_kv(kv_nope, k_rot)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            scaling=self.scaling,
            s_aux=self.sinks,
            **kwargs,
        )
        attn_output = attn_output.reshape(batch_size, seq_length, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class Model(DeepseekV3Model):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = Attention(config, index)


class ForCausalLM(DeepseekV3ForCausalLM):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
