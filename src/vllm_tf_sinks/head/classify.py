# SPDX-License-Identifier: Apache-2.0
"""Decide, by running a head on random hidden states, how it can be run at least cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from vllm_tf_sinks.head.build import Head
from vllm_tf_sinks.head.record import NotRecordable, Recording, Slot, Step, Weight, record
from vllm_tf_sinks.head.standin import HeadError


class Kind(str, Enum):
    """What a head does besides the projection."""

    PROJECTION = "projection only"
    ELEMENTWISE = "elementwise"
    WHOLE = "whole"


@dataclass(frozen=True)
class Plan:
    """How a head is run.

    Attributes:
        before: hidden states [1, N, H] to the projection's input [1, N, P]; None where nothing is done.
        after: logits [..., V] to the head's; in place where `kind` is elementwise. None where nothing is done.
        flat: whether `before` and `after` do all that the head does; else it is run as written.
        weights: names of the parameters and buffers of the ForCausalLM that the head uses.
    """

    kind: Kind
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    flat: bool = True
    weights: frozenset[str] = frozenset()

    def run(self, project: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        """Logits [1, N, V] of hidden states [1, N, H], for a plan that is flat."""
        logits = project(self.before(hidden_states) if self.before else hidden_states)
        return self.after(logits) if self.after else logits

    def describe(self) -> str:
        """The kind, for the log line of a model."""
        return self.kind.value + ("" if self.flat else ", as written")


# torch's elementwise functions of a tensor and numbers -> the same in place
_IN_PLACE = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"), "mul_"),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__itruediv__", "div_"), "div_"),
    **dict.fromkeys(("add", "__add__", "__radd__", "__iadd__", "add_"), "add_"),
    **dict.fromkeys(("sub", "__sub__", "__isub__", "sub_"), "sub_"),
    **dict.fromkeys(("tanh", "tanh_"), "tanh_"),
    **dict.fromkeys(("clamp", "clamp_"), "clamp_"),
}
_CASTS = {"float", "double", "to", "type"}


def classify(head: Head, hidden_size: int) -> Plan:
    """How to run `head`, proved on random hidden states in float64 against the head as written.

    Raises:
        HeadError: naming the class, if the head fails, gives other than finite logits, does not go
            through its projection exactly once, or answers the same input differently.
    """
    try:
        with in_float64(head, hidden_size):
            return _classify(head, [random_numbers(n, hidden_size) for n in (3, 5, 1)])
    except HeadError as error:
        raise HeadError(f"{head.name} cannot be served: {error}") from error


def _classify(head: Head, samples: list[Tensor]) -> Plan:
    expected = [_checked(head, hidden) for hidden in samples]
    try:
        recording = record(head, samples[0])
    except NotRecordable:
        return as_written(head)
    plan = _plan(recording)
    if plan.kind is Kind.WHOLE and head.has_weights_in_float32:
        return as_written(head)  # its casts between dtypes do nothing where all is float64
    project = head.projection.project
    for hidden, logits in zip(samples, expected, strict=True):
        try:
            agrees = torch.equal(plan.run(project, hidden).to(logits.dtype), logits)
        except Exception:  # a step that holds for the recorded number of rows only may raise anything
            agrees = False
        if not agrees:
            return as_written(head)
    return plan


def as_written(head: Head) -> Plan:
    """The plan that holds for any head: its own forward, with every weight it has."""
    tensors = [*head.model.named_parameters(), *head.model.named_buffers()]
    return Plan(Kind.WHOLE, flat=False, weights=frozenset(name for name, _ in tensors))


def _checked(head: Head, hidden: Tensor) -> Tensor:
    """The logits as written, if the head gives the same finite ones twice through one projection."""
    calls = 0
    project = head.projection.project

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return project(x)

    head.projection.project = counted
    try:
        logits, again = head.as_written(hidden.clone()), head.as_written(hidden.clone())
    finally:
        head.projection.project = project
    if calls != 2:
        raise HeadError(f"it goes through its projection {calls / 2:g} times")
    if not logits.isfinite().all():
        raise HeadError("its logits are not finite, as if it computed with the projection's weight itself")
    if not torch.equal(logits, again):
        raise HeadError("it gives other logits for the same hidden states")
    return logits


def _plan(recording: Recording) -> Plan:
    """The plan that a recording amounts to."""
    at = next(i for i, step in enumerate(recording.steps) if step.function is None)
    before, projection, after = (
        list(recording.steps[:at]),
        recording.steps[at],
        list(recording.steps[at + 1 :]),
    )
    while after and _is_last_cast(after[-1]):
        after.pop()
    if not before and not after:
        return Plan(Kind.PROJECTION)
    kind = Kind.WHOLE
    if _is_chain(after, projection.result) and all(map(_in_place, after)):
        after = [Step(getattr(Tensor, _in_place(step)), step.args, step.kwargs, step.result) for step in after]
        if _is_chain(before, 0):
            kind = Kind.ELEMENTWISE
    last = after[-1].result if after else projection.result
    return Plan(
        kind,
        _function("before", before, 0, projection.args[0]) if before else None,
        _function("after", after, projection.result, Slot(last)) if after else None,
        weights=frozenset(weight.full_name for weight in recording.weights),
    )


def _is_chain(steps: list[Step], start: int) -> bool:
    """Whether each step takes the one before it and numbers, elementwise."""
    for step in steps:
        if step.args[:1] != (Slot(start),) or not (_in_place(step) or _is_cast(step)):
            return False
        if any(isinstance(value, (Slot, Weight)) for value in (*step.args[1:], *step.kwargs.values())):
            return False
        start = step.result
    return True


def _in_place(step: Step) -> str:
    return _IN_PLACE.get(step.function.__name__, "")


def _is_cast(step: Step) -> bool:
    return step.function.__name__ in _CASTS


def _is_last_cast(step: Step) -> bool:
    """Whether a head ends in a cast, which makes no difference to vLLM's sampler: it works in float32."""
    return _is_cast(step) and isinstance(step.args[0], Slot)


def _function(name: str, steps: list[Step], argument: int, result: Slot) -> Callable[[Tensor], Tensor]:
    """A plain function of one tensor that does `steps`, without a wrapper around any.

    It lets go of each value after its last use, as the code that was recorded does of what it does not name.
    """
    names: dict[str, Any] = {}

    def source(value: Any) -> str:
        if isinstance(value, Slot):
            return f"v{value.number}"
        if isinstance(value, Weight):
            return f"{bound(value.owner)}.{value.name}"
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            inner = "".join(f"{source(each)}, " for each in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if value is torch.float64:  # the dtype of the samples, as a head asks its input for it
            return "dtype"
        return bound(value)

    def bound(value: Any) -> str:
        names[key := f"c{len(names)}"] = value
        return key

    last_use = {slot: step for step in steps for slot in step.slots if slot != result.number}
    lines = [f"def {name}(v{argument}):", f"    dtype = v{argument}.dtype"]
    for step in steps:
        arguments = [source(a) for a in step.args] + [f"{k}={source(v)}" for k, v in step.kwargs.items()]
        lines.append(f"    v{step.result} = {bound(step.function)}({', '.join(arguments)})")
        lines += [f"    del v{slot}" for slot in sorted(step.slots) if last_use.get(slot) is step]
    lines.append(f"    return {source(result)}")
    exec("\n".join(lines), names)
    function: Callable[[Tensor], Tensor] = names[name]
    return function


@contextmanager
def in_float64(head: Head, hidden_size: int) -> Iterator[None]:
    """Give the head random weights and a random projection in float64 on the CPU, and take them away again.

    The vocabulary's columns repeat those of 61 random ones, so that a large vocabulary costs nothing.
    """
    projection = head.projection
    columns = torch.arange(projection.out_features, device="cpu") % 61
    weight = random_numbers(projection.in_features, 61)[0]
    bias = random_numbers(projection.out_features)[0, 0] if projection.has_bias else None

    def project(x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            x = x.to(torch.float64)
        logits = (x @ weight)[..., columns]
        return logits if bias is None else logits + bias

    parameters = [
        (owner, name, p) for owner in head.model.modules() for name, p in owner._parameters.items() if p is not None
    ]
    original = projection.project, projection.dtype, projection.device
    try:
        for owner, name, parameter in parameters:
            values = random_numbers(*parameter.shape).view(parameter.shape) * 0.3
            owner._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
        projection.project, projection.dtype, projection.device = project, torch.float64, torch.device("cpu")
        with torch.device("cpu"), torch.no_grad():
            yield
    finally:
        projection.project, projection.dtype, projection.device = original
        for owner, name, parameter in parameters:
            owner._parameters[name] = parameter


def random_numbers(*shape: int) -> Tensor:
    """Standard normal numbers [1, *shape] in float64, the same ones at each start."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(1, *shape, generator=generator, dtype=torch.float64, device="cpu")
