# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a checkpoint that belong to a head go in vLLM's model."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.head.build import Head, tied_to
from vllm_tf_sinks.head.classify import Plan
from vllm_tf_sinks.head.standin import HeadError
from vllm_tf_sinks.model_state import CheckpointTensors, state_of

MODULE = "output_head"  # the attribute of vLLM's model that holds a head's own weights
PROJECTION = "lm_head"  # and the one that holds its projection


class Names:
    """Maps names of a checkpoint's tensors to those of vLLM's model."""

    def __init__(self, head: Head, plan: Plan, is_tied: bool, embedding: str) -> None:
        """Names for a head that does as `plan` says.

        Args:
            head: the head.
            plan: what it uses.
            is_tied: whether its projection is tied to the input embeddings.
            embedding: the name of these in the base model.
        """
        name = head.projection.name
        self._embedding = f".{embedding}"
        self._prefix = f"{name}."
        # Whatever the ForCausalLM has besides base model and projection: used, or loaded for nothing
        self._names: dict[str, str | None] = {
            weight: f"{MODULE}.{weight}" if weight in plan.weights else None
            for weight, _ in [*head.model.named_parameters(), *head.model.named_buffers()]
        }
        self._layers = {weight.rpartition(".")[0] for weight in plan.weights}
        if head.projection.has_bias and is_tied and (alias := tied_to(head.model, f"{name}.bias")):
            self._names[alias] = f"{PROJECTION}.bias"
        # Stateful renamings follow the order of a whole checkpoint, which vLLM's own mapper sees
        conversions = get_model_conversion_mapping(head.model)
        self._renamings = [each for each in conversions if type(each) is WeightRenaming]
        ignored = getattr(head.model, "_keys_to_ignore_on_load_unexpected", None) or []
        self._ignored = [_sparing(re.compile(pattern), head.base_weights) for pattern in ignored]

    def __call__(self, name: str) -> str | None:
        """The name in vLLM's model, or None for a tensor that Transformers does not use either."""
        current = self._current(name)
        if current in self._names:
            return self._names[current]
        if current.startswith(self._prefix):
            return f"{PROJECTION}.{current.removeprefix(self._prefix)}"
        if any(pattern.search(name) for pattern in self._ignored):
            return None
        return f"{MODULE}.{current}" if current.rpartition(".")[0] in self._layers else name

    def is_foreign(self, name: str) -> bool:
        """Whether `name`, which is in vLLM's model, is in a layer of the head that has no weight called so."""
        return name.startswith(f"{MODULE}.") and name not in self._names.values()

    def is_embedding(self, name: str) -> bool:
        """Whether `name`, which is in a checkpoint, is the input embeddings'."""
        return f".{self._current(name)}".endswith(self._embedding)

    def _current(self, name: str) -> str:
        """The name that Transformers gives today to what a checkpoint calls `name`."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name


def keep_own_weights(model: Any) -> None:
    """Let vLLM ignore unexpected tensors of a checkpoint only, as Transformers does, and not the model's own."""
    names = [name for name, _ in model.model.named_parameters()]
    rules = model.hf_to_vllm_mapper.orig_to_new_regex
    narrowed = {_sparing(pattern, names) if new is None else pattern: new for pattern, new in rules.items()}
    rules.clear()
    rules.update(narrowed)


def _sparing(pattern: re.Pattern[str], names: list[str]) -> re.Pattern[str]:
    """What matches as `pattern` does, but for one of `names`: GPT-2's "attn.bias" matches its `c_attn.bias` too."""
    spared = {".".join(name.rsplit(".", 2)[-2:]) for name in names if pattern.search(name)}
    if not spared:
        return pattern
    return re.compile(rf"^(?!.*(?:{'|'.join(map(re.escape, sorted(spared)))})$).*(?:{pattern.pattern})")


def materialise(head: Head, plan: Plan, dtype: torch.dtype, device: torch.device) -> bool:
    """Give the weights that the head uses memory on `device`; returns whether there are any.

    They are in `dtype`, but for those that Transformers keeps in float32. The rest stays on the
    meta device, where no tensor of a checkpoint is missed.
    """
    for path, owner in head.model.named_modules():
        for name, parameter in list(owner._parameters.items()):
            full_name = f"{path}.{name}" if path else name
            if parameter is None:
                continue
            if full_name not in plan.weights:
                owner._parameters[name] = None
                continue
            kept = torch.float32 if head.keeps_in_float32(full_name) else dtype
            data = torch.empty(parameter.shape, dtype=kept, device=device)
            owner._parameters[name] = nn.Parameter(data, requires_grad=False)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    return bool(plan.weights)


def renamed(weights: Iterable[tuple[str, torch.Tensor]], names: Names) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint under their names in vLLM's model, without those that are not used."""
    for name, weight in weights:
        if (new := names(name)) is not None:
            yield new, weight


def load(model: Any, weights: Iterable[tuple[str, torch.Tensor]], original: Callable[..., set[str]]) -> set[str]:
    """Load tensors under their names in vLLM's model, and return the names that were loaded.

    Three of them vLLM's own loader would misplace or drop: the projection's bias, which it registers
    anew at each load; another bias of the head whose name ends like that; and the weight of a tied
    projection, which it skips. Transformers takes a tied projection that a checkpoint has a weight of
    its own for, and another one, for an untied one.

    Args:
        model: vLLM's model.
        weights: the tensors.
        original: `CausalMixin.load_weights`, which loads the rest.

    Raises:
        HeadError: if there is a bias for a projection without, a quantised weight of another layer of the head,
            or a running engine whose projection is tied is given another weight for it.
    """
    state = state_of(model)
    assert state.head
    assert state.names
    head, names, is_tied = state.head, state.names, state.is_tied
    loaded: set[str] = set()
    mistakable: list[tuple[str, torch.Tensor]] = []
    projection = embedding = None

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal projection, embedding
        for name, weight in weights:
            if state.checkpoint:
                _keep(state.checkpoint, name, weight, is_tied and names.is_embedding(name))
            if name == f"{PROJECTION}.bias":
                _load_bias(model, head, weight)
                loaded.add(name)
            elif name == f"{PROJECTION}.weight" and is_tied:
                projection = weight
                loaded.add(name)
            elif names.is_foreign(name):
                raise HeadError(
                    f"The checkpoint has {name.removeprefix(f'{MODULE}.')}, which {head.name} has not: the "
                    "layers of a head before its projection are run unquantised. Exclude them when you quantise it."
                )
            elif name.endswith(f"{PROJECTION}.bias"):
                mistakable.append((name, weight))
            else:
                if is_tied and names.is_embedding(name):
                    embedding = weight
                yield name, weight

    loaded |= original(model, others())
    if mistakable:
        loaded |= vllm_api.weights.load_weights_of_base(model, mistakable)
    if projection is not None and (embedding is None or not torch.equal(projection, embedding)):
        _untie(model, head, projection)
    elif embedding is not None and model.lm_head.weight.is_meta:
        # A reload prepares a layer for its kernel only where it was loaded itself
        model.lm_head.weight.weight_loader(model.lm_head.weight, embedding)
    return loaded


def _keep(checkpoint: CheckpointTensors, name: str, weight: torch.Tensor, is_tied_embedding: bool) -> None:
    """Keep a copy of `weight` if the projection is loaded from it. A weight of its own comes before that of the tie."""
    if name == f"{PROJECTION}.bias":
        checkpoint.bias = weight.detach().to("cpu", copy=True)
    elif name == f"{PROJECTION}.weight" or (is_tied_embedding and checkpoint.projection is None):
        checkpoint.projection = weight.detach().to("cpu", copy=True)


def _load_bias(model: Any, head: Head, weight: torch.Tensor) -> None:
    if (bias := model.lm_head.bias) is None:
        raise HeadError(f"The checkpoint has a bias for the projection of {head.name}, which has none.")
    # In a reload vLLM takes a layer with one weight loaded for a layer that all are loaded of, and writes
    # over the embeddings what it has for the tied one. The loader beneath its own fills the bias alone.
    loader = inspect.unwrap(bias.weight_loader) if state_of(model).is_tied else bias.weight_loader
    loader(bias, weight)


def _untie(model: Any, head: Head, weight: torch.Tensor) -> None:
    """Give the model a projection of its own, with `weight` [V, H]."""
    if model.lm_head.weight.is_meta:
        raise HeadError(
            f"The projection of {head.name} is tied to the input embeddings in this engine, and the weights "
            "that it is to reload untie it. Start an engine with them."
        )
    vocabulary, size = weight.shape
    name = head.projection.name
    projection = vllm_api.heads.make_lm_head(model, name, vocabulary, size, model.model_config.dtype)
    vllm_api.weights.record_for_reload(projection)
    projection.weight.weight_loader(projection.weight, weight)
    projection.bias = model.lm_head.bias
    model.lm_head = projection
    state_of(model).is_tied = False
    vllm_api.weights.load_lm_head(model)
