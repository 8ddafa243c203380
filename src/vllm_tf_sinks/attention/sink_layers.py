# SPDX-License-Identifier: Apache-2.0
"""Build the attention layers of a Transformers-backend model with their sinks."""

import logging
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.attention.sink_checks import check_model
from vllm_tf_sinks.attention.sink_finder import Sink, dispatches_to_vllm, find_sinks
from vllm_tf_sinks.attention.sink_loader import Heads, heads_of_rank, sink_parameter
from vllm_tf_sinks.errors import SinkError
from vllm_tf_sinks.model_state import BuildStep, state_of

logger = logging.getLogger("vllm.tf_sinks")


def find_after_pipeline_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base.pipeline_parallel`, to find and check the sinks of this pipeline rank after it.

    It is the last step before vLLM replaces layers. The model is still on the meta device.

    Raises:
        SinkError: if vLLM cannot apply a sink of the model.
    """

    @wraps(original)
    def pipeline_parallel(self: Any) -> None:
        state_of(self).enter(BuildStep.FIND_SINKS)
        original(self)
        with hooks.notifying_refusal(self, "sinks"):
            state = state_of(self)
            state.sinks = find_sinks(self)
            if state.sinks:
                check_model(self, state.sinks)

    return pipeline_parallel


def build_with_sinks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base.create_attention_instances`, to build each attention layer with its sink.

    Raises:
        SinkError: naming the layer, if it cannot be built with its sink.
    """

    @wraps(original)
    def create_attention_instances(self: Any, *args: Any, **kwargs: Any) -> Any:
        state_of(self).enter(BuildStep.LAYERS)
        if not state_of(self).sinks:  # None for a draft, which has no pipeline ranks
            return original(self, *args, **kwargs)
        layers = _SinkLayers(self)
        with compat.attention.attention_layers_built_by(layers.build):
            instances = original(self, *args, **kwargs)
        layers.attach()
        return instances

    return create_attention_instances


class _SinkLayers:
    """Builds the attention layers of one model, some of which take a sink."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.state = state_of(model)
        self.sinks = {sink.layer_index: sink for sink in self.state.sinks or ()}
        # The number of heads may differ from the config's in layers without a sink too
        self.heads = {
            module.layer_idx: self._heads(name, module, model.text_config.num_attention_heads)
            for name, module in model.named_modules()
            if dispatches_to_vllm(module) and hasattr(module, "num_key_value_groups")
        }
        self.heads |= {index: self._allocate(sink) for index, sink in self.sinks.items()}
        self.built: dict[int, nn.Module] = {}

    def _heads(self, name: str, module: Any, num_heads: int) -> Heads:
        group = self.model.tp_group
        return heads_of_rank(name, module, num_heads, group.rank_in_group, group.world_size)

    def _allocate(self, sink: Sink) -> Heads:
        """Allocate this rank's slice of `sink`, in place of the meta tensor or of the slice that vLLM made.

        The slice of vLLM (from 0.30) has the same size in most models, but its loader accepts any tensor that is
        long enough.
        """
        model, owner = self.model, self.model.get_submodule(sink.owner_name)
        heads = self._heads(sink.module_name, model.get_submodule(sink.module_name), sink.num_heads)
        float32 = compat.weights.is_kept_in_float32(model.model, sink.parameter_name)
        dtype = torch.float32 if float32 else model.model_config.dtype
        device = model.device_config.device
        copies = self.state.checkpoint.sinks if self.state.checkpoint else None
        setattr(owner, sink.name, sink_parameter(sink, heads, dtype, device, copies))
        return heads

    def build(self, layer_class: Callable[..., nn.Module], **kwargs: Any) -> Any:
        """Build the attention layer `kwargs["prefix"]` with its heads, and with its sink if it has one.

        Raises:
            SinkError: naming the layer, if its attention backend does not take sinks.
        """
        index = int(re.findall(r"\d+", kwargs["prefix"])[-1])
        if heads := self.heads.get(index):
            kwargs |= {"num_heads": heads.query, "num_kv_heads": heads.key_value}
        if (sink := self.sinks.get(index)) is None:
            return layer_class(**kwargs)
        parameter: nn.Parameter = getattr(self.model.get_submodule(sink.owner_name), sink.name)
        if size := _expanded_head_size(self.model.text_config):
            kwargs["head_size"] = size
        kwargs["sinks"] = sinks = parameter if parameter.dim() == 1 else parameter.view(-1)
        try:
            layer: Any = layer_class(**kwargs)
            if getattr(layer.impl, "sinks", None) is None:
                raise ValueError(f"{layer.attn_backend.get_name()} takes no sinks")
        except (TypeError, ValueError) as error:
            raise SinkError(
                f"Attention layer {kwargs['prefix']} cannot be built with its sink {sink.parameter_name}: "
                f"{str(error).rstrip('.')}. Choose an attention backend that takes sinks: "
                f"{', '.join(compat.attention.backends_with_sinks())}."
            ) from error
        # A kernel reads the parameter itself: a copy would be stale after a reload
        parameter.data = parameter.data.to(compat.attention.sink_dtype(layer.attn_backend.get_name(), parameter.dtype))
        sinks.data = parameter.data.view(-1)
        self.built[index] = layer
        return layer

    def attach(self) -> None:
        """Make each layer with a sink a submodule of its attention module: vLLM and `.to()` walk the module tree.

        Raises:
            SinkError: naming the sink, if vLLM built no layer for it.
        """
        for index, sink in self.sinks.items():
            if (layer := self.built.get(index)) is None:
                raise SinkError(
                    f"vLLM built no attention layer for the sink {sink.parameter_name}. Use a native implementation, "
                    "if this vLLM has one: --model-impl vllm."
                )
            module = self.model.get_submodule(sink.module_name)
            if not hasattr(module, compat.attention.LAYER):
                setattr(module, compat.attention.LAYER, layer)
        name, outcome = type(self.model.model).__name__, f"attention sinks in {len(self.sinks)} layers"
        logger.info("%s: %s", name, outcome)
        hooks.plugins().notify(hooks.Decision(name, "sinks", outcome))


def _expanded_head_size(text_config: Any) -> int:
    """The size of an MLA model's query and key heads with expanded keys; 0 for a model without MLA."""
    if getattr(text_config, "kv_lora_rank", None) is None:
        return 0
    return int(text_config.qk_nope_head_dim + text_config.qk_rope_head_dim)
