# SPDX-License-Identifier: Apache-2.0
"""Record what a head does to hidden states as a short list of steps, free of Hugging Face's wrapper."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm_tf_sinks.head.build import Head

# What turns a tensor's numbers into Python's: steps would depend on the input
_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__"}

_SCALINGS = {"mul", "__mul__", "__rmul__", "div", "__truediv__"}


class NotRecordable(Exception):
    """A head whose steps are not the same for every input."""


@dataclass(frozen=True)
class Slot:
    """The value of an earlier step, by number: 0 is the hidden states."""

    number: int


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the head, read anew at each call: a reload may replace it."""

    owner: torch.nn.Module
    name: str
    full_name: str


@dataclass(frozen=True)
class Step:
    """One call: `function(*args, **kwargs)`, whose result becomes slot `result`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int

    @property
    def slots(self) -> set[int]:
        """The numbers of the slots that it takes."""
        return {value.number for value in _flat([self.args, self.kwargs]) if isinstance(value, Slot)}


@dataclass(frozen=True)
class Recording:
    """The steps of a head, in order. The projection is the step whose function is None."""

    steps: tuple[Step, ...]
    result: int

    @property
    def weights(self) -> list[Weight]:
        """The weights that the steps use."""
        return [v for step in self.steps for v in _flat([step.args, step.kwargs]) if isinstance(v, Weight)]


def record(head: Head, hidden_states: torch.Tensor) -> Recording:
    """The steps by which `head` turns hidden states [1, N, H] into logits.

    Raises:
        NotRecordable: if a step depends on the numbers of a tensor, uses a tensor that is neither
            computed from the hidden states nor a weight, or gives several tensors.
        HeadError: if the head fails.
    """
    recorder = _Recorder(head, hidden_states)
    project = head.projection.project
    head.projection.project = lambda x: recorder.projection(project, x)
    try:
        with recorder:
            logits = head.as_written(hidden_states)
    finally:
        head.projection.project = project
    if recorder.obstacle:
        raise NotRecordable(recorder.obstacle)
    if (result := recorder.slots.get(id(logits))) is None:
        raise NotRecordable("the logits are not computed from the hidden states")
    steps = _live(recorder.steps, result)
    if not any(step.function is None for step in steps):
        raise NotRecordable("the logits are not computed from the projection")
    return Recording(steps, result)


class _Recorder(TorchFunctionMode):
    """Notes each torch call that takes a tensor which descends from the hidden states."""

    def __init__(self, head: Head, hidden_states: torch.Tensor) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.slots = {id(hidden_states): 0}
        self.alive: list[Any] = [hidden_states]  # ids are unique only among the living
        self.obstacle = ""
        self.weights = {
            id(tensor): Weight(owner, name, f"{path}.{name}" if path else name)
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
        self._note(func, args, kwargs, result)
        return result

    def projection(self, project: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Note the projection as one step."""
        with torch._C.DisableTorchFunction():
            result = project(x)
        self._note(None, (x,), {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [t for t in _flat([args, kwargs]) if isinstance(t, torch.Tensor)]
        if not any(id(t) in self.slots for t in tensors):
            return
        if not isinstance(result, torch.Tensor):
            if getattr(func, "__name__", "") in _READS:
                self.obstacle = f"it reads numbers by {func.__name__}"
            elif any(isinstance(r, torch.Tensor) for r in _flat(result)):
                self.obstacle = f"{func.__name__} gives several tensors"
            elif result is None:
                self.obstacle = f"{func.__name__} changes a tensor in place"
            return
        if strangers := [t for t in tensors if id(t) not in self.slots and id(t) not in self.weights]:
            self.obstacle = f"it uses a tensor of shape {tuple(strangers[0].shape)} that is no weight"
            return
        self.alive.append(result)
        if func is not None and (source := self._unchanged(func, args, result)) is not None:
            self.slots[id(result)] = source
            return
        number = len(self.steps) + 1
        self.steps.append(Step(func, self._named(args), self._named(kwargs), number))
        self.slots[id(result)] = number

    def _unchanged(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> int | None:
        """The slot whose value `result` is, where the call did nothing to its first argument, or None."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or (slot := self.slots.get(id(first))) is None:
            return None
        by_one = func.__name__ in _SCALINGS and args[1:] and isinstance(args[1], (int, float)) and args[1] == 1
        is_in_place = result is first and func.__name__.endswith("_")
        if by_one and result.dtype == first.dtype:
            return slot
        return slot if _same(first, result) and not is_in_place else None

    def _named(self, value: Any) -> Any:
        """`value` with its tensors replaced by slots and weights."""
        if isinstance(value, torch.Tensor):
            return Slot(self.slots[id(value)]) if id(value) in self.slots else self.weights[id(value)]
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._named(v) for v in value)
        if isinstance(value, dict):
            return {k: self._named(v) for k, v in value.items()}
        return value


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` is the very memory of `before` in the same shape: a call that did nothing."""
    return (
        before.data_ptr() == after.data_ptr()
        and before.shape == after.shape
        and before.stride() == after.stride()
        and before.dtype == after.dtype
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _live(steps: list[Step], result: int) -> tuple[Step, ...]:
    """The steps that `result` needs."""
    needed, live = {result}, []
    for step in reversed(steps):
        if step.result in needed:
            live.append(step)
            needed |= step.slots
    return tuple(reversed(live))
