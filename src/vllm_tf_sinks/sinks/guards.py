# SPDX-License-Identifier: Apache-2.0
"""Refuse what cannot apply a sink correctly, before anything is allocated or at the first forward."""

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.guards.rehearsal import Call
from vllm_tf_sinks.sinks.find import ARGUMENT, Sink, SinkError
from vllm_tf_sinks.sinks.shard import check_divisible

logger = logging.getLogger("vllm.tf_sinks")

# The layers of a Transformers model that vLLM's ordinary attention computes
ORDINARY_LAYERS = {"full_attention", "sliding_attention"}

# Sink models that do something to their keys which vLLM's attention layers do not: config.model_type -> what
STRANGE_ATTENTION = {
    "deepseek_v4": "compresses its keys and values",
    "deepseek_v41": "compresses its keys and values",
    "hy_v4": "selects its keys by an indexer",
}


def refuse_by_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Base._patch_config`, the first step of building, which also refuses what the config gives away.

    Raises:
        SinkError: naming the model, if it is one of `STRANGE_ATTENTION`.
        ValueError: if the CPU would misread the model's KV cache, whether or not it has sinks.
    """

    @wraps(original)
    def _patch_config(self: Any) -> None:
        name = ", ".join(self.config.architectures or [self.text_config.model_type])
        if what := STRANGE_ATTENTION.get(self.text_config.model_type):
            raise _not_ordinary(name, what)
        if cache := vllm_api.attention.misread_cache(self):
            raise ValueError(
                f"{name} would be wrong with kv_cache_dtype={cache}, which attention on the CPU reads as "
                f"{self.model_config.dtype}. Use kv_cache_dtype=auto."
            )
        original(self)

    return _patch_config


def _not_ordinary(name: str, what: str) -> SinkError:
    return SinkError(
        f"{name} has attention sinks and {what}, which vLLM's attention layer does not do. Use a native "
        "implementation, if this vLLM has one: --model-impl vllm."
    )


def check_model(model: Any, sinks: list[Sink]) -> None:
    """Check that every sink of a Transformers-backend model can be applied.

    Raises:
        SinkError: naming the model class, if its heads do not divide over the ranks, under decode
            context parallel, or if its attention is more than ordinary attention over all keys.
    """
    name = type(model.model).__name__
    parallel = model.parallel_config
    for sink in sinks:
        check_divisible(sink, parallel.tensor_parallel_size)
    if (size := getattr(parallel, "decode_context_parallel_size", 1)) > 1:
        raise SinkError(
            f"{name} has attention sinks, which no kernel applies under "
            f"decode_context_parallel_size={size}. Set it to 1."
        )
    layer_types = getattr(model.text_config, "layer_types", None) or []
    if strange := sorted(set(layer_types) - ORDINARY_LAYERS):
        raise _not_ordinary(name, f"computes layers of the type {', '.join(strange)}")
    if hasattr(model.text_config, "index_topk"):
        raise _not_ordinary(name, "selects its keys by an indexer (index_topk)")
    if model.model_config.use_mla:
        _leave_mla(model)


def _leave_mla(model: Any) -> None:
    """Send an MLA model to ordinary attention, on its expanded keys and values: it takes sinks."""
    name = type(model.model).__name__
    logger.warning(
        "%s has attention sinks, which vLLM's MLA layers do not take: it is served by ordinary attention "
        "on expanded keys and values (VLLM_MLA_DISABLE=1), which needs a larger KV cache.",
        name,
    )
    os.environ["VLLM_MLA_DISABLE"] = "1"
    if model.model_config.use_mla:  # vLLM has read the variable already
        raise SinkError(
            f"{name} has attention sinks, which vLLM's MLA layers do not take. Set VLLM_MLA_DISABLE=1 to "
            "serve it by ordinary attention."
        )
    vllm_api.attention.forget_mla_block_size(model.cache_config)


def guard_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backend's attention function, which raises where a sink would not reach the kernel."""

    @wraps(original)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(ARGUMENT) is not None:
            _check_layer(type(module).__name__, kwargs["attention_instances"][module.layer_idx])
        return original(module, *args, **kwargs)

    _guarded[attention] = original
    return attention


_guarded: dict[Callable[..., Any], Callable[..., Any]] = {}  # a guard -> the attention function within


def leave_guard(model: Any, calls: list[Call]) -> None:
    """Check that each sink in `calls`, all the calls of attention that `model` makes, reaches its kernel.

    From then on the model calls attention without the guard, which would cost a microsecond a call and
    find nothing. Does nothing where attention is not guarded, or another plugin stands before the guard.

    Raises:
        SinkError: naming the module, if one passes a sink to a layer that was built without.
    """
    guarded = model.text_config._attn_implementation
    if (original := _guarded.get(ALL_ATTENTION_FUNCTIONS.get(guarded))) is None:
        return
    layers = vllm_api.attention.attention_layers(model)
    for call in calls:
        if call.arguments.get(ARGUMENT) is not None and call.layer in layers:
            _check_layer(call.module, layers[call.layer])
    ALL_ATTENTION_FUNCTIONS.register(f"{guarded}_unguarded", original)
    model.text_config._attn_implementation = f"{guarded}_unguarded"


def _check_layer(module: str, layer: Any) -> None:
    if not getattr(layer, "has_sink", False):
        raise SinkError(
            f"{module} passes a sink (s_aux) to {type(layer).__name__}, which was built without, so the output would "
            "be wrong: its source does not show which parameter that is."
        )
