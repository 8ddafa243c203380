# SPDX-License-Identifier: Apache-2.0
"""A Llama whose head adds a bias of its own, `lm_head.bias`, after a projection without one, `lm_head.decoder`."""

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel


class Config(LlamaConfig):
    model_type = "biased_llama"


class Model(LlamaModel):
    config_class = Config


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden):
        return torch.tanh(self.decoder(hidden)) + self.bias


class ForCausalLM(LlamaForCausalLM):
    config_class = Config
    _tied_weights_keys = None

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = Head(config)

    def get_output_embeddings(self):
        return self.lm_head.decoder

    def set_output_embeddings(self, new):
        self.lm_head.decoder = new

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs.last_hidden_state))
