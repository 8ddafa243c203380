# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's LoRA: adapters of embeddings, and rows without an adapter on CPUs."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor


def embed_flat(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `VocabParallelEmbeddingWithLoRA.forward`, to flatten token ids [1, N] before it and reshape its output.

    It indexes the adapter of each token by the first dimension.
    """

    @wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        return original(self, x.flatten()).view(*x.shape, -1) if x.dim() > 1 else original(self, x)

    return forward


# LoRA's kernels -> the attribute with the adapter of each row, which is -1 for none
_KERNELS = {
    "add_lora_linear": "token_lora_indices",
    "add_lora_embedding": "token_lora_indices",
    "add_lora_logits": "sampler_indices",
}


def init_for_adapted_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `PunicaWrapperCPU.__init__`, to make its kernels change no row without an adapter.

    vLLM indexes the adapters by -1 for such a row, which is the last one.
    """

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, indices in _KERNELS.items():
            setattr(self, name, _for_adapted_rows(self, getattr(self, name), indices))

    return __init__


def _for_adapted_rows(wrapper: Any, kernel: Callable[..., None], indices: str) -> Callable[..., None]:
    def add_to_adapted_rows(y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        unadapted = getattr(wrapper, indices) < 0
        kernel(y, x.masked_fill(unadapted[:, None], 0), *args, **kwargs)

    return add_to_adapted_rows
