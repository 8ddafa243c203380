# SPDX-License-Identifier: Apache-2.0
"""A Llama whose attention has a sink, named and passed in as many ways as remote code may find."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    apply_rotary_pos_emb,
    repeat_kv,
)


class Config(LlamaConfig):
    model_type = "offset_llama"

    def __init__(self, sink_form="cast", keep_float32=False, has_plan=True, **kwargs):
        self.sink_form = sink_form
        self.has_plan = has_plan
        self.keep_float32 = keep_float32
        super().__init__(**kwargs)


def eager(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


class OffsetAttention(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.softmax_offset = nn.Parameter(torch.empty(config.num_attention_heads))  # the sink

    def project(self, hidden_states, position_embeddings):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *apply_rotary_pos_emb(query, key, *position_embeddings), value


class Cast(OffsetAttention):
    """An expression over a plain attribute."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            s_aux=self.softmax_offset.float()[None],
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Plain(OffsetAttention):
    """The attribute itself, as vLLM from 0.30 knows it."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            s_aux=self.softmax_offset,
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Local(OffsetAttention):
    """A local variable, None on the odd layers."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.has_offset = layer_idx % 2 == 0

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        offset = None
        if self.has_offset:
            raw = self.softmax_offset
            offset = raw.to(torch.float32)
        query, key, value = self.project(hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, s_aux=offset, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Holder(OffsetAttention):
    """A value reached by another path, of another shape, and passed in a dict."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        del self.softmax_offset
        self.extra = nn.Module()
        self.extra.offset = nn.Parameter(torch.empty(1, config.num_attention_heads, 1, 1))

    @property
    def current_offset(self):
        return getattr(self.extra, "off" + "set")

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        more = {"s_aux": self.current_offset.flatten()}
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **more, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Doubled(OffsetAttention):
    """An expression that changes the values: no kernel can take the parameter for it."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        out, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            s_aux=self.softmax_offset * 2,
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


class Computed(OffsetAttention):
    """A sink that depends on the input."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        offset = self.softmax_offset + hidden_states.mean()
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, s_aux=offset, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _attend_hidden(attend, module, *args, **kwargs):
    return attend(module, *args, **kwargs, s_aux=module.softmax_offset)


class Hidden(OffsetAttention):
    """A sink that the source of the class does not show."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.project(hidden_states, position_embeddings)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

        def attend(*args, **kwargs):
            return _attend_hidden(attention_interface, *args, **kwargs)

        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


FORMS = {cls.__name__.lower(): cls for cls in (Cast, Plain, Local, Holder, Doubled, Computed, Hidden)}


class Model(LlamaModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        if config.keep_float32:
            self._keep_in_fp32_modules_strict = {"offset"}
        if not config.has_plan:
            self._tp_plan = {}
        for index, layer in enumerate(self.layers):
            layer.self_attn = FORMS[config.sink_form](config, index)


class ForCausalLM(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
