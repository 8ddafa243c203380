# SPDX-License-Identifier: Apache-2.0
"""Run a head on random hidden states, and decide how to run it at least cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, fx

from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head.build import Head
from vllm_tf_sinks.lm_head.codegen import split, to_function
from vllm_tf_sinks.lm_head.trace import NotTraceable, eliminate_dead_code, name_of, trace


class Kind(str, Enum):
    """What a head does besides the projection."""

    PROJECTION = "projection only"
    ELEMENTWISE = "elementwise"
    FULL = "full"


@dataclass(frozen=True)
class HeadSpec:
    """How a head is run.

    Attributes:
        before: maps hidden states [1, N, H] to the projection's input [1, N, P]; None if there is nothing to do.
        after: maps the projection's logits [..., V] to the head's, in place if `kind` is elementwise; or None.
        is_traced: whether `before` and `after` do all that the head does. If not, the head runs eagerly.
        weights: names of the parameters and buffers of the ForCausalLM that the head uses.
    """

    kind: Kind
    before: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    is_traced: bool = True
    weights: frozenset[str] = frozenset()

    def run(self, project: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        """Logits [1, N, V] of hidden states [1, N, H], for a head that is traced."""
        logits = project(self.before(hidden_states) if self.before else hidden_states)
        return self.after(logits) if self.after else logits

    def describe(self) -> str:
        """The kind, for the log line of a model."""
        return self.kind.value + ("" if self.is_traced else ", eager")


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


def classify(head: Head, hidden_size: int) -> HeadSpec:
    """How to run `head`. The traced head must equal the eager one on random hidden states in float64.

    Raises:
        HeadError: naming the class, if the head fails, gives logits that are not finite, does not call
            its projection exactly once, or gives other logits for the same input.
    """
    try:
        with in_float64(head, hidden_size):
            return _classify(head, [random_numbers(n, hidden_size) for n in (3, 5, 1)])
    except HeadError as error:
        raise HeadError(f"{head.name} cannot be served: {error}") from error


def _classify(head: Head, samples: list[Tensor]) -> HeadSpec:
    expected = [_checked(head, hidden) for hidden in samples]
    try:
        spec = _traced_spec(head, samples[0])
    except NotTraceable:
        return eager_spec(head)
    if spec.kind is Kind.FULL and head.has_weights_in_float32:
        return eager_spec(head)  # its casts between dtypes do nothing where all is float64
    project = head.projection.project
    for hidden, logits in zip(samples, expected, strict=True):
        try:
            agrees = torch.equal(spec.run(project, hidden).to(logits.dtype), logits)
        except Exception:  # a call that holds for the traced number of rows only may raise anything
            agrees = False
        if not agrees:
            return eager_spec(head)
    return spec


def eager_spec(head: Head) -> HeadSpec:
    """The spec that is right for any head: its own forward, with every weight."""
    tensors = [*head.model.named_parameters(), *head.model.named_buffers()]
    return HeadSpec(Kind.FULL, is_traced=False, weights=frozenset(name for name, _ in tensors))


def _checked(head: Head, hidden: Tensor) -> Tensor:
    """The eager logits [1, N, V], if two runs give the same finite ones through one projection."""
    calls = 0
    project = head.projection.project

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return project(x)

    head.projection.project = counted
    try:
        logits, again = head.run_eagerly(hidden.clone()), head.run_eagerly(hidden.clone())
    finally:
        head.projection.project = project
    if calls != 2:
        raise HeadError(f"it goes through its projection {calls / 2:g} times")
    if not logits.isfinite().all():
        raise HeadError("its logits are not finite, as if it computed with the projection's weight itself")
    if not torch.equal(logits, again):
        raise HeadError("it gives other logits for the same hidden states")
    return logits


def _traced_spec(head: Head, hidden_states: Tensor) -> HeadSpec:
    """The spec of a trace of `head` on hidden states [1, N, H]. The caller proves it on others.

    Raises:
        NotTraceable: if the trace fails, or does not make two functions.
    """
    graph = trace(head, hidden_states)
    before, after = split(graph)
    _drop_last_casts(after)
    if not _calls(before) and not _calls(after):
        return HeadSpec(Kind.PROJECTION)
    kind = Kind.FULL
    if _is_chain(after) and all(map(_in_place, _calls(after))):
        for node in _calls(after):
            node.target = getattr(Tensor, _in_place(node))
        if _is_chain(before):
            kind = Kind.ELEMENTWISE
    return HeadSpec(
        kind,
        to_function(before, head.model) if _calls(before) else None,
        to_function(after, head.model) if _calls(after) else None,
        weights=frozenset(node.target for node in graph.find_nodes(op="get_attr")),
    )


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes between the placeholder and the output."""
    return list(graph.nodes)[1:-1]


def _drop_last_casts(graph: fx.Graph) -> None:
    """Drop the casts that a head ends in, which make no difference to vLLM's sampler: it works in float32."""
    output = graph.output_node()
    result = output.all_input_nodes[0]
    while _is_cast(result):
        result = result.all_input_nodes[0]
    output.args = (result,)
    eliminate_dead_code(graph)


def _is_chain(graph: fx.Graph) -> bool:
    """Whether each call takes the result of the one before it and numbers, elementwise."""
    (previous,) = graph.find_nodes(op="placeholder")
    for node in _calls(graph):
        others = (*node.args[1:], *node.kwargs.values())
        if node.args[:1] != (previous,) or any(isinstance(value, fx.Node) for value in others):
            return False
        if not _in_place(node) and not _is_cast(node):
            return False
        previous = node
    return True


def _in_place(node: fx.Node) -> str:
    """The name of the method of a tensor that does what `node` does in place, or ""."""
    return _IN_PLACE.get(name_of(node.target), "")


def _is_cast(node: fx.Node) -> bool:
    return name_of(node.target) in _CASTS


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
