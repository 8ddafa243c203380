# SPDX-License-Identifier: Apache-2.0
"""Load the tensors of a head from a checkpoint into vLLM's model."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping

from vllm_tf_sinks import compat
from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head.build import Head, tied_to
from vllm_tf_sinks.lm_head.classify import HeadSpec
from vllm_tf_sinks.model_state import CheckpointTensors, state_of

MODULE = "output_head"  # the attribute of vLLM's model for the ForCausalLM of a head
PROJECTION = "lm_head"  # the attribute of vLLM's model for the projection


class Names:
    """Maps the names of a checkpoint's tensors to their names in vLLM's model."""

    def __init__(self, head: Head, spec: HeadSpec, is_tied: bool, embedding: str) -> None:
        """Make the mapping for a head.

        Args:
            head: the head.
            spec: how the head is run, which has the weights that it uses.
            is_tied: whether its projection is tied to the input embeddings.
            embedding: the name of the input embeddings' weight in the base model.
        """
        name = head.projection.name
        self._embedding = f".{embedding}"
        self._prefix = f"{name}."
        # Every tensor of the ForCausalLM outside its base model and projection; None for those that it does not use
        self._names: dict[str, str | None] = {
            weight: f"{MODULE}.{weight}" if weight in spec.weights else None
            for weight, _ in [*head.model.named_parameters(), *head.model.named_buffers()]
        }
        self._layers = {weight.rpartition(".")[0] for weight in spec.weights}
        if head.projection.has_bias and is_tied and (alias := tied_to(head.model, f"{name}.bias")):
            self._names[alias] = f"{PROJECTION}.bias"
        # Stateful renamings need the order of the whole checkpoint: vLLM's mapper applies them
        conversions = get_model_conversion_mapping(head.model)
        self._renamings = [each for each in conversions if type(each) is WeightRenaming]
        ignored = getattr(head.model, "_keys_to_ignore_on_load_unexpected", None) or []
        self._ignored = [_except_for(re.compile(pattern), head.base_weights) for pattern in ignored]

    def __call__(self, name: str) -> str | None:
        """The name in vLLM's model, or None for a tensor that the model does not use."""
        current = self._current(name)
        if current in self._names:
            return self._names[current]
        if current.startswith(self._prefix):
            return f"{PROJECTION}.{current.removeprefix(self._prefix)}"
        if any(pattern.search(name) for pattern in self._ignored):
            return None
        return f"{MODULE}.{current}" if current.rpartition(".")[0] in self._layers else name

    def is_unexpected(self, name: str) -> bool:
        """Whether `name`, a name in vLLM's model, is in a layer of the head that has no such weight."""
        return name.startswith(f"{MODULE}.") and name not in self._names.values()

    def is_embedding(self, name: str) -> bool:
        """Whether `name`, a name in a checkpoint, is the weight of the input embeddings."""
        return f".{self._current(name)}".endswith(self._embedding)

    def _current(self, name: str) -> str:
        """The current name in Transformers of the tensor `name` of a checkpoint, which may have an older name."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name


def narrow_ignored_weights(model: Any) -> None:
    """Narrow vLLM's patterns for ignored tensors of a checkpoint, so that none matches a parameter of the model.

    Transformers applies these patterns (`_keys_to_ignore_on_load_unexpected`) to unexpected tensors only.
    """
    names = [name for name, _ in model.model.named_parameters()]
    rules = model.hf_to_vllm_mapper.orig_to_new_regex
    narrowed = {_except_for(pattern, names) if new is None else pattern: new for pattern, new in rules.items()}
    rules.clear()
    rules.update(narrowed)


def _except_for(pattern: re.Pattern[str], names: list[str]) -> re.Pattern[str]:
    """`pattern`, without a match of any of `names`: GPT-2's "attn.bias" also matches its `c_attn.bias`."""
    excluded = {".".join(name.rsplit(".", 2)[-2:]) for name in names if pattern.search(name)}
    if not excluded:
        return pattern
    return re.compile(rf"^(?!.*(?:{'|'.join(map(re.escape, sorted(excluded)))})$).*(?:{pattern.pattern})")


def materialise(head: Head, spec: HeadSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Allocate the weights that the head uses on `device`; returns whether there are any.

    They are in `dtype`, or in float32 if Transformers keeps them in it. Parameters that the head does not use become
    None, so that vLLM does not miss their tensors in the checkpoint.
    """
    for path, owner in head.model.named_modules():
        for name, parameter in list(owner._parameters.items()):
            full_name = f"{path}.{name}" if path else name
            if parameter is None:
                continue
            if full_name not in spec.weights:
                owner._parameters[name] = None
                continue
            own_dtype = torch.float32 if head.keeps_in_float32(full_name) else dtype
            data = torch.empty(parameter.shape, dtype=own_dtype, device=device)
            owner._parameters[name] = nn.Parameter(data, requires_grad=False)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    return bool(spec.weights)


def renamed(weights: Iterable[tuple[str, torch.Tensor]], names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint with their names in vLLM's model, without those that the model does not use."""
    for name, weight in weights:
        if (new := names(name)) is not None:
            yield new, weight


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]], original: Callable[..., set[str]]) -> set[str]:
    """Load tensors by their names in vLLM's model, and return the names that were loaded.

    Three kinds of tensors do not go to vLLM's own loader: the projection's bias, which that registers again at each
    load; another bias of the head whose name ends with `lm_head.bias`, which it mistakes for the projection's; and the
    weight of a tied projection, which it skips. Transformers unties a projection if the checkpoint has a weight for it
    that differs from the embeddings, and so does this function.

    Args:
        model: vLLM's model.
        weights: the tensors, by their names in vLLM's model.
        original: `CausalMixin.load_weights`, which loads the other tensors.

    Raises:
        HeadError: naming the class, if the checkpoint has a bias for a projection without one, or a quantised
            weight of another layer of the head; or if a reload would untie the projection.
    """
    state = state_of(model)
    assert state.head
    assert state.names
    head, names, is_tied = state.head, state.names, state.is_tied
    loaded: set[str] = set()
    other_biases: list[tuple[str, torch.Tensor]] = []
    projection = embedding = None

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal projection, embedding
        for name, weight in weights:
            if state.checkpoint:
                _copy_projection(state.checkpoint, name, weight, is_tied and names.is_embedding(name))
            if name == f"{PROJECTION}.bias":
                _load_bias(model, head, weight)
                loaded.add(name)
            elif name == f"{PROJECTION}.weight" and is_tied:
                projection = weight
                loaded.add(name)
            elif names.is_unexpected(name):
                raise HeadError(
                    f"The checkpoint has {name.removeprefix(f'{MODULE}.')}, but {head.name} does not: only the "
                    "projection of a head can be quantised. Exclude its other layers when you quantise the model."
                )
            elif name.endswith(f"{PROJECTION}.bias"):
                other_biases.append((name, weight))
            else:
                if is_tied and names.is_embedding(name):
                    embedding = weight
                yield name, weight

    loaded |= original(model, others())
    if other_biases:
        loaded |= compat.weights.load_weights_of_base(model, other_biases)
    if projection is not None and (embedding is None or not torch.equal(projection, embedding)):
        _untie(model, head, projection)
    elif embedding is not None and model.lm_head.weight.is_meta:
        # In a reload vLLM prepares a layer for its kernel only if the layer itself was loaded
        model.lm_head.weight.weight_loader(model.lm_head.weight, embedding)
    return loaded


def _copy_projection(checkpoint: CheckpointTensors, name: str, weight: torch.Tensor, is_tied_embedding: bool) -> None:
    """Copy the tensor to `checkpoint` if it is the projection's; the embeddings' if the projection has none."""
    if name == f"{PROJECTION}.bias":
        checkpoint.bias = weight.detach().to("cpu", copy=True)
    elif name == f"{PROJECTION}.weight" or (is_tied_embedding and checkpoint.projection is None):
        checkpoint.projection = weight.detach().to("cpu", copy=True)


def _load_bias(model: Any, head: Head, weight: torch.Tensor) -> None:
    if (bias := model.lm_head.bias) is None:
        raise HeadError(
            f"The checkpoint has a bias for the projection of {head.name}, which has none. Use the config that belongs "
            "to the checkpoint."
        )
    # In a reload, vLLM's loader assumes that a layer with one loaded weight has all of its weights loaded, and would
    # overwrite the tied embeddings. The loader that it wraps fills only the bias.
    loader = inspect.unwrap(bias.weight_loader) if state_of(model).is_tied else bias.weight_loader
    loader(bias, weight)


def _untie(model: Any, head: Head, weight: torch.Tensor) -> None:
    """Give the model a projection with `weight` [V, H], untied from the embeddings.

    Raises:
        HeadError: naming the class, in a reload.
    """
    if model.lm_head.weight.is_meta:
        raise HeadError(
            f"The projection of {head.name} is tied to the input embeddings in this engine, but the new weights untie "
            "it. Start an engine with them."
        )
    vocabulary, size = weight.shape
    name = head.projection.name
    projection = compat.heads.make_lm_head(model, name, vocabulary, size, model.model_config.dtype)
    compat.weights.record_for_reload(projection)
    projection.weight.weight_loader(projection.weight, weight)
    projection.bias = model.lm_head.bias
    model.lm_head = projection
    state_of(model).is_tied = False
    compat.weights.load_lm_head(model)
