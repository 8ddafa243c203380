# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the projection: their tensors' names, and the adapter of each row of logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from vllm_tf_sinks import compat
from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head.build import Head
from vllm_tf_sinks.lm_head.weights import MODULE, PROJECTION
from vllm_tf_sinks.model_state import state_of


def map_adapters(model: Any, head: Head) -> bool:
    """Map the names in adapters of the head's projection to vLLM's; returns whether vLLM can apply such adapters.

    Raises:
        HeadError: naming the class, if this vLLM would adapt another module of the head as its `lm_head`.
    """
    if compat.lora.adapts_by_name_alone() and any(PROJECTION in name for name, _ in head.model.named_parameters()):
        raise HeadError(
            f"{head.name} cannot be served with LoRA on vLLM {compat.engine.version()}, which adapts every module "
            f"whose name contains {PROJECTION}. Use vLLM 0.29 or later, or merge the adapter."
        )
    refusal = compat.lora.refusal_of_output_adapters(model, head.projection.out_features)
    if not refusal:
        model.embedding_modules = compat.lora.with_output_embeddings(model.embedding_modules, PROJECTION)
    model.hf_to_vllm_mapper = compat.weights.renaming_first(
        _AdapterNames(model, head, refusal), model.hf_to_vllm_mapper
    )
    return not refusal


class _AdapterNames:
    """Renames an adapter's tensors in vLLM's mapper, by which LoRA finds the module of each tensor.

    vLLM refuses an adapter of a module whose last name is unknown, but ignores one of a module of the head whose last
    name also occurs in the base model (`dense`).
    """

    def __init__(self, model: Any, head: Head, refusal: str) -> None:
        self._model = model
        self._head = head
        self._refusal = refusal

    def rename_source_key(self, name: str) -> tuple[str, None]:
        """Return `name`, with vLLM's name of the projection if it is a tensor of the projection's adapter.

        Raises:
            HeadError: naming the class and the module, if vLLM cannot adapt that module.
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
    """Wrap `compute_logits`, to apply to each row of a prompt its own adapter.

    vLLM's mapping has the adapter of each sampled row only, but prompt logprobs need all rows.

    Returns:
        A function of hidden states [N, H] to logits [N, V]. The hidden states are those of the N sampled rows, or a
        slice of N rows of the forward pass's output.
    """

    def compute_logits_with_adapters(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        manager = getattr(model, "lora_manager", None)  # made once the model is loaded
        if manager is None or (mapping := compat.lora.current_mapping(manager)) is None:
            return compute_logits(hidden_states, *args, **kwargs)
        if not _is_slice_of_output(hidden_states, len(mapping.prompt_mapping)):
            return compute_logits(hidden_states, *args, **kwargs)
        first = hidden_states.storage_offset() // hidden_states.stride(0)
        adapters = mapping.index_mapping[first : first + len(hidden_states)]
        manager.set_adapter_mapping(replace(mapping, prompt_mapping=adapters))
        try:
            return compute_logits(hidden_states, *args, **kwargs)
        finally:
            manager.set_adapter_mapping(mapping)

    return compute_logits_with_adapters


def _is_slice_of_output(hidden_states: Tensor, sampled: int) -> bool:
    """Whether rows are a slice of the forward pass's output; vLLM copies sampled rows to memory of their own."""
    return len(hidden_states) != sampled or hidden_states.untyped_storage().nbytes() != hidden_states.nbytes
