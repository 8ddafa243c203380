# SPDX-License-Identifier: Apache-2.0
"""What vllm-tf-sinks cannot see in a TintedLlama, told through its hooks.

Install this package beside vllm-tf-sinks, and `vllm serve` any checkpoint of a TintedLlama as usual.
"""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from vllm_tf_sinks import hookimpl
from vllm_tf_sinks.hooks import Decision


@hookimpl
def attention_sink(module: nn.Module) -> nn.Parameter | None:
    """Its attention hands a cast of `tint` to the interface, by a dtype that only a call knows."""
    tint: nn.Parameter | None = getattr(module, "tint", None)
    return tint


@hookimpl
def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Checkpoints of a TintedLlama forget to name the class with the head in their `auto_map`."""
    if config.model_type != "tinted_llama":
        return None
    from tinted_llama import TintedLlamaForCausalLM

    return TintedLlamaForCausalLM


@hookimpl
def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor] | None:
    """Its forward multiplies by the weight of `lm_head`; calling `lm_head` does the same on every rank's shard."""
    if model.config.model_type != "tinted_llama":
        return None
    return lambda hidden_states: model.lm_head(hidden_states) / model.config.logit_divisor


@hookimpl
def decided(decision: Decision) -> None:
    """Say it where an operator looks."""
    verb = "refuses" if decision.refused else "serves"
    print(f"vllm-tf-sinks {verb} {decision.model}, {decision.subject}: {decision.outcome}")
