# SPDX-License-Identifier: Apache-2.0
"""Refuse a model whose sinks vLLM cannot apply, before vLLM allocates memory or at the first forward."""

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_tf_sinks import compat
from vllm_tf_sinks.attention.dry_run import Call
from vllm_tf_sinks.attention.sink_finder import ARGUMENT, Sink
from vllm_tf_sinks.attention.sink_loader import check_divisible
from vllm_tf_sinks.errors import SinkError
from vllm_tf_sinks.model_state import BuildStep, state_of

logger = logging.getLogger("vllm.tf_sinks")

# The layer types of a Transformers config that vLLM's `Attention` layer computes
ORDINARY_LAYERS = {"full_attention", "sliding_attention"}

# config.model_type of models with sinks -> what their attention does to its keys, but vLLM's layers do not
UNSUPPORTED_ATTENTION = {
    "deepseek_v4": "compresses its keys and values",
    "deepseek_v41": "compresses its keys and values",
    "hy_v4": "selects its keys by an indexer",
}


def refuse_by_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base._patch_config`, the first step of building a model, to refuse the types in `UNSUPPORTED_ATTENTION`.

    Raises:
        SinkError: naming the model.
    """

    @wraps(original)
    def _patch_config(self: Any) -> None:
        state_of(self).enter(BuildStep.CONFIG)
        name = ", ".join(self.config.architectures or [self.text_config.model_type])
        if what := UNSUPPORTED_ATTENTION.get(self.text_config.model_type):
            raise _unsupported_attention(name, what)
        original(self)

    return _patch_config


def _unsupported_attention(name: str, what: str) -> SinkError:
    return SinkError(
        f"{name} has attention sinks and {what}, which vLLM's attention layer does not do. Use a native "
        "implementation, if this vLLM has one: --model-impl vllm."
    )


def check_model(model: Any, sinks: list[Sink]) -> None:
    """Check that vLLM can apply every sink of a Transformers-backend model. An MLA model loses its MLA.

    Raises:
        SinkError: naming the model class, if its heads do not divide over the ranks, under decode
            context parallel, or if its layers are not full or sliding-window attention.
    """
    name = type(model.model).__name__
    parallel = model.parallel_config
    for sink in sinks:
        check_divisible(sink, parallel.tensor_parallel_size)
    if (size := getattr(parallel, "decode_context_parallel_size", 1)) > 1:
        raise SinkError(
            f"{name} has attention sinks, which vLLM's attention does not pass to kernels under "
            f"decode_context_parallel_size={size}. Set it to 1."
        )
    layer_types = getattr(model.text_config, "layer_types", None) or []
    if unsupported := sorted(set(layer_types) - ORDINARY_LAYERS):
        raise _unsupported_attention(name, f"computes layers of the type {', '.join(unsupported)}")
    if hasattr(model.text_config, "index_topk"):
        raise _unsupported_attention(name, "selects its keys by an indexer (index_topk)")
    if model.model_config.use_mla:
        _disable_mla(model)


def _disable_mla(model: Any) -> None:
    """Serve an MLA model by vLLM's `Attention`, which takes sinks, on its expanded keys and values."""
    name = type(model.model).__name__
    logger.warning(
        "%s has attention sinks, which vLLM's MLA layers do not take. Ordinary attention on expanded keys and values "
        "serves it instead (VLLM_MLA_DISABLE=1), and needs a larger KV cache.",
        name,
    )
    os.environ["VLLM_MLA_DISABLE"] = "1"
    if model.model_config.use_mla:  # vLLM has read the variable already
        raise SinkError(
            f"{name} has attention sinks, which vLLM's MLA layers do not take. Set VLLM_MLA_DISABLE=1, so that "
            "ordinary attention serves it."
        )
    compat.attention.forget_mla_block_size(model.cache_config)


def guard_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backend's attention function, to raise a SinkError if a sink would not reach the kernel."""

    @wraps(original)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(ARGUMENT) is not None:
            _check_layer(type(module).__name__, kwargs["attention_instances"][module.layer_idx])
        return original(module, *args, **kwargs)

    _guarded[attention] = original
    return attention


_guarded: dict[Callable[..., Any], Callable[..., Any]] = {}  # guard -> the attention function that it wraps


def remove_guard(model: Any, calls: list[Call]) -> None:
    """Check the sinks in `calls`, all calls of attention that `model` makes, and remove the guard from it.

    After this check the guard would find nothing, and costs a microsecond a call. The function does nothing if
    attention is not guarded, or if another plugin wrapped the guard.

    Raises:
        SinkError: naming the module, if it passes a sink to a layer that was built without one.
    """
    guarded = model.text_config._attn_implementation
    if (original := _guarded.get(ALL_ATTENTION_FUNCTIONS.get(guarded))) is None:
        return
    layers = compat.attention.attention_layers(model)
    for call in calls:
        if call.arguments.get(ARGUMENT) is not None and call.layer in layers:
            _check_layer(call.module, layers[call.layer])
    ALL_ATTENTION_FUNCTIONS.register(f"{guarded}_unguarded", original)
    model.text_config._attn_implementation = f"{guarded}_unguarded"


def _check_layer(module: str, layer: Any) -> None:
    if not getattr(layer, "has_sink", False):
        raise SinkError(
            f"{module} passes a sink (s_aux) to {type(layer).__name__}, which was built without a sink, so the output "
            "would be wrong. The source of the module does not show which parameter the sink is. Name it by the hook "
            "attention_sink."
        )
