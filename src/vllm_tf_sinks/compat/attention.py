# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layers, backends and KV caches."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm_tf_sinks.compat import engine

if TYPE_CHECKING:
    import torch

LAYER = "attn"  # the attribute of a Transformers attention module for its attention layer in vLLM


def layers_take_sinks() -> str:
    """A reason if this vLLM finds plain sinks itself, and raises if one does not reach its layer (from 0.30); or ""."""
    import vllm.model_executor.models.transformers as backend

    return "vLLM checks sinks itself" if hasattr(backend, "check_sinks") else ""


def no_mla_function() -> str:
    """A reason if there is no MLA attention function to guard, or ""."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "vllm_mla" not in ALL_ATTENTION_FUNCTIONS:
        return "this vLLM has no MLA in the Transformers backend"
    return layers_take_sinks()


def sink_without_plugin(module: Any) -> Any:
    """The sink that upstream vLLM finds in an attention module: a parameter, or None.

    Raises:
        ValueError: if vLLM finds that the module passes a sink, but does not find its parameter.
    """
    if not layers_take_sinks():
        return None
    from vllm.model_executor.models.transformers.fusers import AttentionFuser

    fuser = AttentionFuser.match(None, module)
    return fuser.sinks(module) if fuser else None


@contextmanager
def attention_layers_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Within the context, the Transformers backend calls `build(Attention, **kw)` in place of `Attention(**kw)`."""
    from vllm.model_executor.models.transformers import base

    def builder(layer_class: type) -> Callable[..., Any]:
        return lambda **kwargs: build(layer_class, **kwargs)

    names = ("Attention", "EncoderOnlyAttention")
    builders: dict[str, Any] = {name: builder(getattr(base, name)) for name in names}
    with patch.multiple(base, **builders):
        yield


def check_layer_names(vllm_config: Any) -> None:
    """Check that a model is not the draft of another model of this backend.

    Up to vLLM 0.31 the attention layers of both have the same names.

    Raises:
        ValueError: naming the model, if the layers of another model have these names.
    """
    taken = vllm_config.compilation_config.static_forward_context
    if any(re.fullmatch(r"\d+\.attn", name) for name in taken):
        name = ", ".join(vllm_config.model_config.architectures)
        raise ValueError(
            f"{name} cannot be the draft of another model of the Transformers backend: vLLM {engine.version()} gives "
            "the attention layers of target and draft the same names. Use a draft with a native implementation, or "
            "vLLM 0.32 or later."
        )


def attention_layers(model: Any) -> dict[int, Any]:
    """The attention layers of `model` in vLLM on this rank, by layer index."""
    instances: dict[int, Any] | None = getattr(model, "attention_instances", None)  # up to vLLM 0.29
    if instances is not None:
        return instances
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    held = [(module, getattr(module, LAYER, None)) for module in model.model.modules()]
    return {module.layer_idx: layer for module, layer in held if isinstance(layer, AttentionLayerBase)}


def arguments_of_attention() -> tuple[str, ...]:
    """Names of the arguments that modules must pass on to vLLM's attention function: up to 0.29 the table of layers."""
    from vllm.model_executor.models.transformers.base import Base

    return ("attention_instances",) if hasattr(Base, "create_attention_instances") else ()


def is_ordinary_attention(layer: Any) -> bool:
    """Whether an attention layer is vLLM's `Attention`: a decoder's, without MLA or an indexer."""
    from vllm.model_executor.layers.attention import Attention

    return type(layer) is Attention


def fixed_scale(layer: Any) -> float | None:
    """The factor by which an attention layer multiplies logits; None if each call passes it (up to vLLM 0.29)."""
    return getattr(layer.impl, "scale", None) if layers_take_sinks() else None


def sink_dtype(backend_name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype in which an attention backend reads the sinks of a model that has them in `dtype`.

    FlashInfer reads float32, and copies a parameter of another dtype. The CPU kernel reads bfloat16, and from vLLM
    0.31 float32 too. Other backends read the parameter in its own dtype.
    """
    import torch

    if backend_name == "FLASHINFER":
        return torch.float32
    if backend_name != "CPU_ATTN" or dtype == torch.bfloat16:
        return dtype
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    takes_float32 = "float32" in CPUAttentionBackendImpl.forward.__code__.co_names
    return torch.float32 if takes_float32 else torch.bfloat16


def backends_with_sinks() -> list[str]:
    """Names of this vLLM's attention backends that take sinks and that this platform can import."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():  # its only backend takes sinks, but supports_sink() returns False
        return ["CPU_ATTN"]
    names = []
    for backend in AttentionBackendEnum:
        try:
            supported = backend.get_class().supports_sink()
        except Exception:  # importing a backend of other hardware may raise anything
            continue
        if supported:
            names.append(backend.name)
    return names


def misread_cache(model: Any) -> str:
    """The dtype of the KV cache, if ordinary attention on the CPU would misread it; or "".

    The CPU's kernels read the dtypes that their backend lists. They read any other as the model's dtype, which is
    right only if both have the same size. Other platforms choose a backend by the dtype of the cache. vLLM 0.33
    refuses such a cache.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or model.model_config.use_mla:
        return ""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    name: str = model.cache_config.cache_dtype
    dtype = getattr(torch, name, None)
    fits = isinstance(dtype, torch.dtype) and dtype.itemsize == model.model_config.dtype.itemsize
    return "" if fits or name in CPUAttentionBackend.supported_kv_cache_dtypes else name


def forget_mla_block_size(cache_config: Any) -> None:
    """Replace the block size that the CPU platform sets for MLA, which its ordinary attention does not take.

    Other platforms choose the block size after vLLM has built the model.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and cache_config.block_size % 32:
        cache_config.block_size = 128
