# SPDX-License-Identifier: Apache-2.0
"""A Llama whose output head has names and a shape of its own."""

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel


class Config(LlamaConfig):
    model_type = "warped_llama"

    def __init__(self, head_form="flat", warp_scale=0.6, warp_size=48, keep_float32=False, **kwargs):
        self.head_form = head_form
        self.keep_float32 = keep_float32
        self.warp_scale = warp_scale
        self.warp_size = warp_size
        super().__init__(**kwargs)


class Model(LlamaModel):
    config_class = Config


class NormLinear(nn.Linear):
    """A projection by rows of length 1."""

    def forward(self, input):
        return torch.nn.functional.linear(input, torch.nn.functional.normalize(self.weight), self.bias)


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.warp = nn.Linear(config.hidden_size, config.warp_size)
        self.warp_norm = nn.LayerNorm(config.warp_size)
        linear = NormLinear if config.head_form == "norm" else nn.Linear
        self.vocabulary = linear(config.warp_size, config.vocab_size, bias=True)
        self.scale = config.warp_scale
        self.form = config.head_form

    def forward(self, hidden):
        dtype = hidden.dtype
        x = hidden.to(torch.float32)
        hidden = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype).to(self.warp.weight.dtype)
        x = self.warp_norm(torch.nn.functional.silu(self.warp(hidden)))
        if self.form == "direct":  # does not go through the projection
            return torch.nn.functional.linear(x, self.vocabulary.weight, self.vocabulary.bias)
        if self.form == "random":  # other logits for the same input
            x = x + torch.rand_like(x)
        if self.form == "reading" and x.abs().max() > 1e9:  # depends on the numbers, so that no recording holds
            x = x * 0
        return torch.tanh(self.vocabulary(x) * self.scale) * 4.0


class ForCausalLM(LlamaForCausalLM):
    config_class = Config
    _tied_weights_keys = None

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        del self.lm_head
        self.final = nn.ModuleDict({"out": Head(config)})
        if config.keep_float32:
            self._keep_in_fp32_modules_strict = {"final"}

    def get_output_embeddings(self):
        return self.final["out"].vocabulary

    def set_output_embeddings(self, new):
        self.final["out"].vocabulary = new

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.final["out"](outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits)
