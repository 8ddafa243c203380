# SPDX-License-Identifier: Apache-2.0
"""What a head does, call by call, in words."""

from typing import Any

import torch
from torch import fx

from vllm_tf_sinks.lm_head.build import Head
from vllm_tf_sinks.lm_head.classify import in_float64, random_numbers
from vllm_tf_sinks.lm_head.trace import NotTraceable, name_of, trace

_OPERATORS = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"), "*"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__itruediv__", "div_"), "/"),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "add_"), "+"),
    **dict.fromkeys(("sub", "__sub__", "__isub__", "sub_"), "-"),
}


def describe(head: Head, hidden_size: int) -> list[str]:
    """The calls of `head` with its constants, each a line.

    x is the result of the line before, or the hidden states in the first line. xN is the result of line N where
    that is not the line before, and x0 the hidden states.
    """
    try:
        with in_float64(head, hidden_size):
            graph = trace(head, random_numbers(3, hidden_size))
    except NotTraceable as error:
        return [f"{head.name}.forward, run eagerly: {error}"]
    hidden_states, *calls = (node for node in graph.nodes if node.op not in ("get_attr", "output"))
    names = {hidden_states: "x0"}
    previous, lines = hidden_states, []
    for number, call in enumerate(calls, 1):
        lines.append(_line(call, {**names, previous: "x"}))
        names[call] = f"x{number}"
        previous = call
    return lines


def _line(call: fx.Node, names: dict[fx.Node, str]) -> str:
    """One call, where the results of earlier ones have `names`."""
    arguments = [_word(value, names) for value in call.args]
    if call.op == "call_module":
        return f"{call.target}({', '.join(arguments)})"
    name = name_of(call.target)
    if call.target is getattr:
        return ".".join(arguments)
    if (operator := _OPERATORS.get(name)) and len(arguments) == 2 and not call.kwargs:
        return f"{arguments[0]} {operator} {arguments[1]}"
    arguments += [f"{key}={_word(value, names)}" for key, value in call.kwargs.items()]
    return f"{name.strip('_')}({', '.join(arguments)})"


def _word(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names.get(value) or str(value.target)  # a weight is called by its name in the model
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is torch.float64:  # as the head asks its input for it
        return "dtype of the hidden states"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_word(each, names) for each in value)}]"
    return str(value)
