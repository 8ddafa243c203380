# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that differs between the supported versions, probed, in one place.

Importing this module imports nothing of vLLM; each function imports what it asks about.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    import torch

BACKEND = "vllm.model_executor.models.transformers"
SUPPORTED = SpecifierSet(">=0.27.1,<0.34", prereleases=True)


def version() -> str:
    """The version of the vLLM that this process runs."""
    from vllm.version import __version__

    return str(__version__)


def unsupported_version() -> str:
    """Why this vLLM is outside the supported range, or ""."""
    if version() == "dev" or Version(version()).base_version in SUPPORTED:
        return ""
    return f"vLLM {version()} is outside the supported range {SUPPORTED}"


def declare_variable(name: str, value: Callable[[], str]) -> None:
    """Make an environment variable known to vLLM.

    vLLM then does not warn about it, hands it to Ray workers, and makes `value()` part of the key
    of its compile cache.
    """
    from vllm import envs

    envs.environment_variables[name] = value


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


@contextmanager
def attention_layers_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Within the context the Transformers backend builds `Attention(**kw)` as `build(Attention, **kw)`."""
    from vllm.model_executor.models.transformers import base

    originals = {name: getattr(base, name) for name in ("Attention", "EncoderOnlyAttention")}

    def builder(layer_class: type) -> Callable[..., Any]:
        return lambda **kwargs: build(layer_class, **kwargs)

    try:
        for name, layer_class in originals.items():
            setattr(base, name, builder(layer_class))
        yield
    finally:
        for name, layer_class in originals.items():
            setattr(base, name, layer_class)


def attention_attribute() -> str:
    """The attribute of a Transformers attention module that holds its vLLM attention layer."""
    return "attn"


def sink_dtype(backend_name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype in which an attention backend is handed sinks that are kept in `dtype`.

    The CPU kernel takes bfloat16 only up to vLLM 0.30 and bfloat16 or float32 since; from then on
    `forward` casts what is neither, once, which a reload would not renew. Other backends take the
    parameter itself, or make their own copy in the post-load step (FlashInfer).
    """
    import torch

    if backend_name != "CPU_ATTN" or dtype == torch.bfloat16:
        return dtype
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    takes_float32 = "float32" in CPUAttentionBackendImpl.forward.__code__.co_names
    return torch.float32 if takes_float32 else torch.bfloat16


def backends_with_sinks() -> list[str]:
    """Names of the attention backends of this vLLM that take sinks and can be imported here."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    names = []
    for backend in AttentionBackendEnum:
        try:
            supported = backend.get_class().supports_sink()
        except Exception:  # a backend of other hardware may fail to import in any way
            continue
        if supported:
            names.append(backend.name)
    return names
