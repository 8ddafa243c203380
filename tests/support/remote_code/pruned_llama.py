# SPDX-License-Identifier: Apache-2.0
"""A Llama that predicts the first tokens of its vocabulary only, as Apertus 1.5 does."""

from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel


class Config(LlamaConfig):
    model_type = "pruned_llama"

    def __init__(self, output_vocab_size=96, scale=1.0, **kwargs):
        self.output_vocab_size = output_vocab_size
        self.scale = scale
        super().__init__(**kwargs)


class Model(LlamaModel):
    config_class = Config


class ForCausalLM(LlamaForCausalLM):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.output_vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0, **kwargs):
        outputs = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs.last_hidden_state) * self.config.scale)
