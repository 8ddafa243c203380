# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layers, their kernels and caches."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_tf_sinks.swap import swapped
from vllm_tf_sinks.vllm_api import engine

if TYPE_CHECKING:
    import torch

LAYER = "attn"  # the attribute of a Transformers attention module that holds its vLLM attention layer


def layers_take_sinks() -> str:
    """Says that this vLLM finds plain sinks itself and raises where one did not reach its layer, or ""."""
    import vllm.model_executor.models.transformers as backend

    return "vLLM checks sinks itself" if hasattr(backend, "check_sinks") else ""


def no_mla_function() -> str:
    """Says that there is no MLA attention function to guard, or ""."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "vllm_mla" not in ALL_ATTENTION_FUNCTIONS:
        return "this vLLM has no MLA in the Transformers backend"
    return layers_take_sinks()


def sink_by_itself(module: Any) -> Any:
    """The sink that vLLM finds in an attention module without us: a parameter, or None.

    Raises:
        ValueError: where it finds that the module passes one, and not which.
    """
    if not layers_take_sinks():
        return None
    from vllm.model_executor.models.transformers.fusers import AttentionFuser

    fuser = AttentionFuser.match(None, module)
    return fuser.sinks(module) if fuser else None


@contextmanager
def attention_layers_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Within the context the Transformers backend builds `Attention(**kw)` as `build(Attention, **kw)`."""
    from vllm.model_executor.models.transformers import base

    def builder(layer_class: type) -> Callable[..., Any]:
        return lambda **kwargs: build(layer_class, **kwargs)

    names = ("Attention", "EncoderOnlyAttention")
    with swapped(vars(base), {name: builder(getattr(base, name)) for name in names}):
        yield


def check_layer_names(vllm_config: Any) -> None:
    """Check that a model is not the draft of another of this backend, whose layers have the same names (up to 0.31).

    Raises:
        ValueError: if it is.
    """
    taken = vllm_config.compilation_config.static_forward_context
    if any(re.fullmatch(r"\d+\.attn", name) for name in taken):
        name = ", ".join(vllm_config.model_config.architectures)
        raise ValueError(
            f"{name} cannot be the draft of another model of the Transformers backend: vLLM {engine.version()} names "
            "the attention layers of target and draft alike. Use a draft that vLLM has a class for, or vLLM 0.32."
        )


def attention_layers(model: Any) -> dict[int, Any]:
    """Layer index -> the attention layer of vLLM that serves it, on this rank."""
    instances: dict[int, Any] | None = getattr(model, "attention_instances", None)  # up to vLLM 0.29
    if instances is not None:
        return instances
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    held = [(module, getattr(module, LAYER, None)) for module in model.model.modules()]
    return {module.layer_idx: layer for module, layer in held if isinstance(layer, AttentionLayerBase)}


def handed_to_attention() -> tuple[str, ...]:
    """What this vLLM hands a model for its attention function to find layers in: up to 0.29 a table of them."""
    from vllm.model_executor.models.transformers.base import Base

    return ("attention_instances",) if hasattr(Base, "create_attention_instances") else ()


def is_ordinary_attention(layer: Any) -> bool:
    """Whether an attention layer is a decoder's, over keys and values as they are."""
    from vllm.model_executor.layers.attention import Attention

    return type(layer) is Attention


def fixed_scale(layer: Any) -> float | None:
    """The scale by which an attention layer multiplies logits; None where each call says (up to vLLM 0.29)."""
    return getattr(layer.impl, "scale", None) if layers_take_sinks() else None


def sink_dtype(backend_name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype in which an attention backend reads sinks of a model that has them in `dtype`.

    FlashInfer reads float32, and copies what is not. The CPU kernel reads bfloat16 only up to vLLM
    0.30, and bfloat16 or float32 since. Other backends read the parameter as it is.
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
    """Names of the attention backends of this vLLM that take sinks and can be imported on this platform."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():  # has one, which takes sinks but does not announce them
        return ["CPU_ATTN"]
    names = []
    for backend in AttentionBackendEnum:
        try:
            supported = backend.get_class().supports_sink()
        except Exception:  # a backend of other hardware may fail to import in any way
            continue
        if supported:
            names.append(backend.name)
    return names


def misread_cache(model: Any) -> str:
    """The dtype of a KV cache that ordinary attention on the CPU would misread, or "".

    Its kernels take the dtypes that the backend names. Anything else they read as if it were the model's
    dtype, which is right only where that has the same size. Other platforms choose a backend by it, and
    vLLM 0.33 refuses it.
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
    """Undo the block size that the CPU platform sets for MLA, which its ordinary attention does not take.

    Other platforms choose the block size after the model is built.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and cache_config.block_size % 32:
        cache_config.block_size = 128
