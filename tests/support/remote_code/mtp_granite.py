# SPDX-License-Identifier: Apache-2.0
"""A Granite with a layer for multi-token prediction, as Transformers 5.20 and vLLM 0.33 know them."""

from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM, GraniteModel


class Config(GraniteConfig):
    model_type = "mtp_granite"
    num_mtp_layers: int = 1


class Model(GraniteModel):
    config_class = Config


class ForCausalLM(GraniteForCausalLM):
    config_class = Config
    _keys_to_ignore_on_load_unexpected = (r"model\.layers\.3\..*",)
