# SPDX-License-Identifier: Apache-2.0
"""Trace what a head does to hidden states: a `torch.fx` graph of torch calls, free of Hugging Face's wrapper."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vllm_tf_sinks.lm_head.build import Head

# What turns a tensor's numbers into Python's: the calls would depend on the input
_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}

_SCALINGS = {"mul", "__mul__", "__rmul__", "div", "__truediv__"}


class NotTraceable(Exception):
    """A head whose calls are not the same for every input, or have no form in a graph."""


def trace(head: Head, hidden_states: Tensor) -> fx.Graph:
    """The torch calls by which `head` turns hidden states [1, N, H] into logits.

    Returns:
        A graph of call_function nodes. Its placeholder is the hidden states, its one call_module node is the
        projection, and each use of a weight is a get_attr node of its own.

    Raises:
        NotTraceable: if a call depends on the numbers of a tensor, uses a tensor that is neither
            computed from the hidden states nor a weight, or gives several tensors.
        HeadError: if the head fails.
    """
    tracer = _Tracer(head, hidden_states)
    project = head.projection.project
    head.projection.project = lambda x: tracer.project(project, x)
    try:
        with tracer:
            logits = head.run_eagerly(hidden_states)
    finally:
        head.projection.project = project
    return tracer.finished(logits)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove each call whose result is not used, in-place and random ones too: the proof shows if one mattered."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def name_of(function: Any) -> str:
    """The name of a function, or "" where it has none: what is no call in a graph has a string for a target."""
    return str(getattr(function, "__name__", ""))


class _Tracer(TorchFunctionMode):
    """Adds a node to a graph for each torch call that takes a tensor which descends from the hidden states."""

    def __init__(self, head: Head, hidden_states: Tensor) -> None:
        super().__init__()
        self._graph = fx.Graph()
        self._obstacle = ""
        self._projection = head.projection.name
        # By the tensor's id, which is unique only while it lives: so the tensor is kept, too
        self._nodes = {id(hidden_states): (hidden_states, self._graph.placeholder("hidden_states"))}
        self._weights = {
            id(tensor): f"{path}.{name}" if path else name
            for path, owner in head.model.named_modules()
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]
            if tensor is not None
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._add_call(func, args, kwargs, result)
        except NotTraceable as error:  # the head would take an exception here for one of its own
            self._obstacle = str(error)
        return result

    def project(self, project: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Project `x` [..., P] to logits [..., V], as one node."""
        with torch._C.DisableTorchFunction():
            logits = project(x)
        if (node := self._node_of(x)) is not None:
            self._nodes[id(logits)] = logits, self._graph.call_module(self._projection, (node,))
        return logits

    def finished(self, logits: Tensor) -> fx.Graph:
        """The graph that computes `logits`.

        Raises:
            NotTraceable: if there is none.
        """
        if self._obstacle:
            raise NotTraceable(self._obstacle)
        if (node := self._node_of(logits)) is None:
            raise NotTraceable("the logits are not computed from the hidden states")
        self._graph.output(node)
        eliminate_dead_code(self._graph)
        if not self._graph.find_nodes(op="call_module"):
            raise NotTraceable("the logits are not computed from the projection")
        return self._graph

    def _add_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not any(self._node_of(leaf) is not None for leaf in tree_leaves((args, kwargs))):
            return
        if not isinstance(result, Tensor):
            _check_result(function, result)
            return
        arguments, named = map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        node = self._unchanged(function, args, result)
        if node is None:
            node = self._graph.call_function(*_as_call(function, arguments), named)
        self._nodes[id(result)] = result, node

    def _node_of(self, value: Any) -> fx.Node | None:
        """The node that computes the tensor `value`, if it descends from the hidden states."""
        return self._nodes[id(value)][1] if id(value) in self._nodes else None

    def _argument(self, value: Any) -> Any:
        """What stands in the graph for an argument of a call.

        Raises:
            NotTraceable: if nothing can.
        """
        if isinstance(value, np.generic):  # generated code has no literal for NumPy's numbers
            return value.item()
        if not isinstance(value, Tensor):
            return value
        if (node := self._node_of(value)) is not None:
            return node
        if name := self._weights.get(id(value)):
            return self._graph.get_attr(name)
        raise NotTraceable(f"it uses a tensor of shape {tuple(value.shape)} that is no weight")

    def _unchanged(self, function: Any, args: tuple[Any, ...], result: Tensor) -> fx.Node | None:
        """The node whose value `result` is, where the call did nothing to its first argument, or None."""
        first, name = (args[0] if args else None), name_of(function)
        if not isinstance(first, Tensor) or (node := self._node_of(first)) is None:
            return None
        by_one = name in _SCALINGS and args[1:] and isinstance(args[1], (int, float)) and args[1] == 1
        is_in_place = result is first and name.endswith("_")
        if by_one and result.dtype == first.dtype:
            return node
        return node if _same(first, result) and not is_in_place else None


def _check_result(function: Any, result: Any) -> None:
    """Check that a call that gave no tensor gave something that holds for every input, such as a shape.

    Raises:
        NotTraceable: if it did not.
    """
    if name_of(function) in _READS:
        raise NotTraceable(f"it reads numbers by {name_of(function)}")
    if any(isinstance(each, Tensor) for each in tree_leaves(result)):
        raise NotTraceable(f"{name_of(function)} gives several tensors")
    if result is None:
        raise NotTraceable(f"{name_of(function)} changes a tensor in place")


def _as_call(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`function` and its arguments as generated code can name them."""
    if name_of(function) == "__get__":  # the getter of a property, which has no name itself
        return getattr, (args[0], function.__self__.__name__)
    # Tensor.__pow__ calls itself torch._tensor.pow, which does not exist
    if getattr(function, "__qualname__", "").startswith("TensorBase."):
        function = getattr(Tensor, name_of(function), function)
    return function, args


def _same(before: Tensor, after: Tensor) -> bool:
    """Whether `after` is the very memory of `before` in the same shape: a call that did nothing."""
    return (
        before.data_ptr() == after.data_ptr()
        and before.shape == after.shape
        and before.stride() == after.stride()
        and before.dtype == after.dtype
    )
