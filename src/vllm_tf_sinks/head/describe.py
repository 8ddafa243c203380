# SPDX-License-Identifier: Apache-2.0
"""What a head does, step by step, in words."""

from typing import Any

import torch

from vllm_tf_sinks.head.build import Head
from vllm_tf_sinks.head.classify import in_float64, random_numbers
from vllm_tf_sinks.head.record import NotRecordable, Slot, Step, Weight, record

_OPERATORS = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"), "*"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__itruediv__", "div_"), "/"),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "add_"), "+"),
    **dict.fromkeys(("sub", "__sub__", "__isub__", "sub_"), "-"),
}


def describe(head: Head, hidden_size: int) -> list[str]:
    """The steps of `head` with its constants, each a line; x is what the line before gives, or the hidden states."""
    try:
        with in_float64(head, hidden_size):
            recording = record(head, random_numbers(3, hidden_size))
    except NotRecordable as error:
        return [f"{head.name}.forward as written: {error}"]
    return [_line(step, head.projection.name) for step in recording.steps]


def _line(step: Step, projection: str) -> str:
    def word(value: Any) -> str:
        if isinstance(value, Slot):
            return "x" if value.number == step.result - 1 else f"x{value.number}"
        if isinstance(value, Weight):
            return value.full_name
        if isinstance(value, float):
            return f"{value:.6g}"
        if value is torch.float64:  # as the head asks its input for it
            return "dtype of the hidden states"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(word, value))}]"
        return str(value)

    arguments = list(map(word, step.args))
    if step.function is None:
        return f"{projection}({', '.join(arguments)})"
    name = step.function.__name__
    if (operator := _OPERATORS.get(name)) and len(arguments) == 2 and not step.kwargs:
        return f"{arguments[0]} {operator} {arguments[1]}"
    arguments += [f"{key}={word(value)}" for key, value in step.kwargs.items()]
    return f"{name.strip('_')}({', '.join(arguments)})"
