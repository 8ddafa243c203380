# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters of the projection, under the model's own name of it too, for every row that is projected."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.head.build import Head
from vllm_tf_sinks.head.standin import HeadError
from vllm_tf_sinks.head.weights import MODULE, PROJECTION
from vllm_tf_sinks.model_state import state_of


def take_adapters(model: Any, head: Head) -> bool:
    """Let adapters name the head's projection; returns whether vLLM can apply them.

    Raises:
        HeadError: if this vLLM would take another module of the head for its own `lm_head`.
    """
    if vllm_api.lora.adapts_by_name_alone() and any(PROJECTION in name for name, _ in head.model.named_parameters()):
        raise HeadError(
            f"{head.name} cannot be served with LoRA on vLLM {vllm_api.engine.version()}, which takes any module named "
            f"{PROJECTION} for its own. Use vLLM 0.29 or later, or merge the adapter."
        )
    refusal = vllm_api.lora.refusal_of_output_adapters(model, head.projection.out_features)
    if not refusal:
        model.embedding_modules = vllm_api.lora.with_output_embeddings(model.embedding_modules, PROJECTION)
    model.hf_to_vllm_mapper = vllm_api.weights.renaming_first(
        _AdapterNames(model, head, refusal), model.hf_to_vllm_mapper
    )
    return not refusal


class _AdapterNames:
    """Names of an adapter's tensors: a renaming in vLLM's mapper, by which LoRA finds the module of each.

    vLLM refuses an adapter of a module whose last name it does not know, but passes over one whose last
    name it knows from elsewhere (`dense`).
    """

    def __init__(self, model: Any, head: Head, refusal: str) -> None:
        self._model = model
        self._head = head
        self._refusal = refusal

    def rename_source_key(self, name: str) -> tuple[str, None]:
        """`name` under vLLM's name of the projection, if that is what it adapts.

        Raises:
            HeadError: if it adapts what cannot be adapted.
        """
        module, is_adapter, rest = name.partition(".lora_")
        names = state_of(self._model).names
        weight = names(f"{module}.weight") if is_adapter and names else None
        if weight == f"{PROJECTION}.weight":
            if self._refusal:
                raise HeadError(f"{self._head.name} takes no adapter of {module}: {self._refusal}. Merge the adapter.")
            return f"{PROJECTION}.lora_{rest}", None
        if weight is not None and weight.startswith(f"{MODULE}."):
            raise HeadError(
                f"{self._head.name} takes no adapter of {module}: of its output head only the projection "
                f"{self._head.projection.name} can be adapted. Merge the adapter, or train it without {module}."
            )
        return name, None


def with_prompt_rows(model: Any, compute_logits: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`compute_logits` under adapters, with the right one for each row of a prompt too.

    vLLM has one adapter a sampled row in mind, whatever rows it projects.

    Returns:
        A function of hidden states [N, H]: those of N sampled rows, or N rows in sequence of all that
        the forward pass gave.
    """

    def compute_logits_with_adapters(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        manager = getattr(model, "lora_manager", None)  # made once the model is loaded
        if manager is None or (mapping := manager._last_mapping) is None:
            return compute_logits(hidden_states, *args, **kwargs)
        if not _are_of_prompt(hidden_states, len(mapping.prompt_mapping)):
            return compute_logits(hidden_states, *args, **kwargs)
        first = hidden_states.storage_offset() // hidden_states.stride(0)
        adapters = mapping.index_mapping[first : first + len(hidden_states)]
        manager.set_adapter_mapping(replace(mapping, prompt_mapping=adapters))
        try:
            return compute_logits(hidden_states, *args, **kwargs)
        finally:
            manager.set_adapter_mapping(mapping)

    return compute_logits_with_adapters


def _are_of_prompt(hidden_states: Tensor, sampled: int) -> bool:
    """Whether rows are a slice of the forward pass's: sampled ones are picked from there, into memory of their own."""
    return len(hidden_states) != sampled or hidden_states.untyped_storage().nbytes() != hidden_states.nbytes


def embed_flat(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`VocabParallelEmbeddingWithLoRA.forward`, which finds the adapter of each token in a batch [1, N] too."""

    @wraps(original)
    def forward(self: Any, x: Tensor) -> Tensor:
        return original(self, x.flatten()).view(*x.shape, -1) if x.dim() > 1 else original(self, x)

    return forward


# LoRA's kernels -> where they find the adapter of each row, -1 for none
_KERNELS = {
    "add_lora_linear": "token_lora_indices",
    "add_lora_embedding": "token_lora_indices",
    "add_lora_logits": "sampler_indices",
}


def init_for_adapted_rows(original: Callable[..., None]) -> Callable[..., None]:
    """`PunicaWrapperCPU.__init__`, after which rows without an adapter are given none, and not the last slot's."""

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, indices in _KERNELS.items():
            setattr(self, name, _of_adapted_rows(self, getattr(self, name), indices))

    return __init__


def _of_adapted_rows(wrapper: Any, kernel: Callable[..., None], indices: str) -> Callable[..., None]:
    def add_to_adapted_rows(y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        unadapted = getattr(wrapper, indices) < 0
        kernel(y, x.masked_fill(unadapted[:, None], 0), *args, **kwargs)

    return add_to_adapted_rows
