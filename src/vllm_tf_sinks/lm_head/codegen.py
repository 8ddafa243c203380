# SPDX-License-Identifier: Apache-2.0
"""Turn the traced graph of a head into plain functions: one before the projection, one after."""

from collections.abc import Callable, Iterable
from types import MethodType, SimpleNamespace

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from vllm_tf_sinks.lm_head.trace import NotTraceable


def split(graph: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """The part of a traced graph before its projection, and the part after: each a graph of one tensor.

    Raises:
        NotTraceable: if the part after takes another value than the logits from before.
    """
    hidden_states, *nodes = graph.nodes
    output, (projection,) = nodes.pop(), graph.find_nodes(op="call_module")
    at = nodes.index(projection)
    return (
        _part(nodes[:at], hidden_states, projection.args[0]),
        _part(nodes[at + 1 :], projection, output.args[0]),
    )


def _part(nodes: Iterable[fx.Node], argument: fx.Node, result: fx.Node) -> fx.Graph:
    """A graph of copies of `nodes`, which computes `result` from `argument`."""
    part = fx.Graph()
    copies = {argument: part.placeholder("x")}
    try:
        for node in nodes:
            copies[node] = part.node_copy(node, copies.__getitem__)
        part.output(copies[result])
    except KeyError as error:
        raise NotTraceable("what is done to the logits takes another value from before the projection") from error
    return part


def to_function(graph: fx.Graph, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function of one tensor that computes `graph`, and frees each value after its last use.

    A GraphModule copies references to parameters, which a reload may replace, and wraps each call. This
    function reads each weight at each call, as an attribute of the module of `model` that owns it.

    Args:
        graph: a graph of one tensor. It is changed.
        model: the ForCausalLM that the get_attr nodes name weights of.

    Raises:
        NotTraceable: if `torch.fx` has no code for a call.
    """
    _ask_input_for_dtype(graph)
    owners = _shorten_paths(graph, model)
    try:
        code = graph.python_code(root_module="self")
        exec(code.src, code.globals)
    except Exception as error:  # a function without a name, or a constant without a literal, may raise anything
        raise NotTraceable(f"torch.fx generates no code for it: {error}") from error
    return MethodType(code.globals["forward"], owners)


def _ask_input_for_dtype(graph: fx.Graph) -> None:
    """Replace float64, the dtype of the traced samples, by the dtype of the input: a head casts to it."""
    (x,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(x):
        dtype = graph.call_function(getattr, (x, "dtype"))
    for node in graph.nodes:
        node.args = map_aggregate(node.args, lambda value: dtype if value is torch.float64 else value)
        node.kwargs = map_aggregate(node.kwargs, lambda value: dtype if value is torch.float64 else value)
    if not dtype.users:
        graph.erase_node(dtype)


def _shorten_paths(graph: fx.Graph, model: nn.Module) -> SimpleNamespace:
    """Let get_attr nodes start at the module that owns the weight.

    From the ForCausalLM each module on the way would cost a call of `nn.Module.__getattr__`: for a BERT,
    16 of them each time that logits are computed.

    Returns:
        An object with the owners as attributes.
    """
    owners = SimpleNamespace()
    names: dict[nn.Module, str] = {}
    for node in graph.find_nodes(op="get_attr"):
        path, _, weight = node.target.rpartition(".")
        owner = model.get_submodule(path)
        name = names.setdefault(owner, f"owner_{len(names)}")
        setattr(owners, name, owner)
        node.target = f"{name}.{weight}"
    return owners
