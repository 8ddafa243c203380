# SPDX-License-Identifier: Apache-2.0
"""Find the parameter that an attention module passes to the attention interface as `s_aux`.

A hook may name the parameter. Otherwise the source of the module's class has the expression that it passes, and
the expression is evaluated on the module. The search does not depend on the names of parameters.
"""

import ast
import builtins
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from vllm_tf_sinks import hooks
from vllm_tf_sinks.errors import SinkError

ARGUMENT = "s_aux"


@dataclass(frozen=True)
class Sink:
    """The sink of one attention module.

    Attributes:
        module_name: the name of the attention module, for `model.get_submodule`.
        layer_index: the index of its attention layer in vLLM.
        owner_name: the name of the module that holds the parameter.
        name: the name of the parameter in that module.
        shape: the shape of the parameter, over all ranks.
    """

    module_name: str
    layer_index: int
    owner_name: str
    name: str
    shape: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """The number of its elements, one per query head, over all ranks."""
        return math.prod(self.shape)

    @property
    def parameter_name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.owner_name}.{self.name}"


def find_sinks(model: nn.Module) -> list[Sink]:
    """Find the sinks of all modules of `model` that call vLLM's attention, in the order of the modules.

    Args:
        model: vLLM's model, or another that holds a Transformers model as Transformers built it, on any device.

    Raises:
        SinkError: if a module passes a sink that is not one unchanged parameter, has no `layer_idx`,
            or has the `layer_idx` of another module.
    """
    owners = {
        id(parameter): _Owner(owner_name, owner, name)
        for owner_name, owner in model.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
    }
    sinks: dict[int, Sink] = {}
    for module_name, module in model.named_modules():
        if not dispatches_to_vllm(module) or (owner := _owner(module, owners)) is None:
            continue
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise SinkError(
                f"{type(module).__name__} ({module_name}) passes a sink, but has no layer_idx, by which vLLM finds its "
                "attention layer. Set layer_idx in the model's code."
            )
        if index in sinks:
            raise SinkError(
                f"{sinks[index].module_name} and {module_name} have the same layer_idx {index}, and both pass a sink. "
                "vLLM has one attention layer for them. Give each a layer_idx of its own in the model's code."
            )
        shape = tuple(owner.parameter.shape)
        sinks[index] = Sink(module_name, index, owner.module_name, owner.name, shape)
    return list(sinks.values())


_ADVICE = (
    "vLLM's kernels read the parameter itself, so the output would be wrong. "
    "Let the model pass the parameter, or a cast or reshape of it, as s_aux."
)


def dispatches_to_vllm(module: nn.Module) -> bool:
    """Whether `module` calls vLLM's attention function; an encoder of a multimodal model does not."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return isinstance(implementation, str) and implementation.startswith("vllm")


@dataclass(frozen=True)
class _Owner:
    """The module that holds a parameter, and the parameter's name there."""

    module_name: str
    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @contextmanager
    def holding(self, values: torch.Tensor) -> Iterator[None]:
        """Within the context, the parameter holds `values`."""
        original = self.parameter
        self.module._parameters[self.name] = nn.Parameter(values)
        try:
            yield
        finally:
            self.module._parameters[self.name] = original


def _owner(module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
    """Find the parameter that `module` passes as its sink, by a hook or by its source; None if it passes none."""
    if (result := hooks.plugins().call("attention_sink", module=module)) is None:
        return _trace(module, owners)
    if (owner := owners.get(id(result.value))) is None:
        raise SinkError(
            f"The hook attention_sink of the plugin {result.plugin!r} returned a {type(result.value).__name__} for "
            f"{type(module).__name__}, which is not a parameter of the model. Return one of the model's parameters."
        )
    return owner


def _trace(module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
    """Find the parameter that `module` passes as its sink, by the source of its class; None if it passes none."""
    found: dict[int, tuple[_Owner, str]] = {}
    for passed in _sink_expressions(type(module)):  # type: ignore[arg-type]  # classes are hashable
        try:
            owner = passed.owner(module, owners)
        except Exception as error:  # an expression of a remote class may raise anything
            where = f"{type(module).__name__}.{passed.function.__name__}"
            raise SinkError(
                f"{where} passes the sink {passed.text!r}, which is not one parameter: {error}. {_ADVICE}"
            ) from error
        if owner is not None:
            found[id(owner)] = (owner, passed.text)
    if len(found) > 1:
        texts = ", ".join(repr(text) for _, text in found.values())
        raise SinkError(f"{type(module).__name__} passes more than one sink: {texts}. {_ADVICE}")
    return next((owner for owner, _ in found.values()), None)


@dataclass(frozen=True)
class _SinkExpression:
    """An expression that a method passes as `s_aux`."""

    function: Callable[..., Any]
    tree: ast.FunctionDef
    expression: ast.expr

    @property
    def text(self) -> str:
        return ast.unparse(self.expression)

    @property
    def arguments(self) -> set[str]:
        """The names of the method's parameters, without `self`."""
        args = self.tree.args
        names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]
        return set(names[1:])

    def owner(self, module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
        """Find the parameter whose values `module` passes; None if it passes None.

        Raises:
            ValueError: if the value comes from no parameter or several, or differs from the parameter's values.
        """
        with _requiring_grad(module):
            value = self.evaluate(module)
        if value is None:
            return None
        if (owner := owners.get(id(_leaf(value)))) is None:
            raise ValueError("its tensor is not a parameter of the model")
        values = _test_values(owner.parameter)
        with owner.holding(values), torch.device("cpu"):
            passed = self.evaluate(module).detach().flatten().float()
        if not torch.equal(passed, values.flatten()):
            raise ValueError("the expression changes the parameter's values")
        return owner

    @cached_property
    def program(self) -> CodeType:
        """The code that computes the expression: the statements on which it depends, and an assignment of its value.

        It is compiled once for all layers.

        Raises:
            ValueError: if the expression depends on an argument of the method.
        """
        statements, unknown = _slice(self.tree, self.expression)
        if arguments := unknown & self.arguments:
            raise ValueError(f"it depends on arguments of the method ({', '.join(sorted(arguments))})")
        assign = ast.Assign(targets=[ast.Name(_RESULT, ast.Store())], value=self.expression)
        tree = ast.fix_missing_locations(ast.Module([*statements, assign], type_ignores=[]))
        return compile(tree, f"<{self.function.__qualname__}>", "exec")

    def evaluate(self, module: nn.Module) -> Any:
        """The value of the expression on `module`."""
        closure = inspect.getclosurevars(self.function).nonlocals
        names = {**self.function.__globals__, **closure, self.tree.args.args[0].arg: module}
        exec(self.program, names)
        return names[_RESULT]


_RESULT = "__passed_as_sink"


@cache
def _sink_expressions(cls: type[nn.Module]) -> tuple[_SinkExpression, ...]:
    """The expressions that the methods of `cls` pass as `s_aux`, without a method's own argument passed on."""
    expressions = []
    for function in _methods(cls):
        if not _mentions_argument(function.__code__):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):  # without source, the dry run or the guard finds the sink
            continue
        if not isinstance(tree := ast.parse(source).body[0], ast.FunctionDef):
            continue
        for expression in _bindings(tree):
            each = _SinkExpression(function, tree, expression)
            if not (isinstance(expression, ast.Name) and expression.id in each.arguments):
                expressions.append(each)
    return tuple(expressions)


def _mentions_argument(code: CodeType) -> bool:
    """Whether a function's constants have `s_aux`, as a keyword or a key; faster than to read its source."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and _mentions_argument(constant):
            return True
        if constant == ARGUMENT or (isinstance(constant, tuple) and ARGUMENT in constant):
            return True
    return False


def _methods(cls: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions that `cls` defines or inherits, without those of torch."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        unwrapped = inspect.unwrap(function) if inspect.isfunction(function) else None
        if inspect.isfunction(unwrapped) and not unwrapped.__module__.startswith("torch."):
            yield unwrapped


def _bindings(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions that `tree` binds to `s_aux`: as a keyword argument, in a dict, or by `d["s_aux"] = ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == ARGUMENT:
            yield node.value
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == ARGUMENT:
                    yield value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                key = target.slice if isinstance(target, ast.Subscript) else None
                if isinstance(key, ast.Constant) and key.value == ARGUMENT:
                    yield node.value


def _slice(tree: ast.FunctionDef, expression: ast.expr) -> tuple[list[ast.stmt], set[str]]:
    """The statements of `tree` on which `expression` depends, and the names that they read but do not assign."""
    needed = _loads(expression)
    statements = _sliced(tree.body, needed, expression.lineno)
    return statements, {name for name in needed if not hasattr(builtins, name)}


def _sliced(body: list[ast.stmt], needed: set[str], before: int) -> list[ast.stmt]:
    """The statements of `body` above line `before` that assign a name in `needed`; adds the names that they read."""
    kept: list[ast.stmt] = []
    for statement in reversed(body):
        if statement.lineno >= before:
            continue
        if isinstance(statement, ast.If):
            branches = [_sliced(branch, needed, before) for branch in (statement.body, statement.orelse)]
            if any(branches):
                needed |= _loads(statement.test)
                kept.insert(0, ast.If(statement.test, branches[0] or [ast.Pass()], branches[1]))
        elif _stores(statement) & needed:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
                raise ValueError(f"it depends on {ast.unparse(statement)!r}")
            kept.insert(0, statement)
            needed |= _loads(statement)
    return kept


def _loads(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _stores(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@contextmanager
def _requiring_grad(module: nn.Module) -> Iterator[None]:
    """Within the context, every float parameter of `module` requires a gradient: autograd then records its uses."""
    frozen = [p for p in module.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _leaf(value: Any) -> nn.Parameter:
    """Find the one parameter from which `value` was computed, by its autograd graph.

    Raises:
        ValueError: if `value` is not a tensor, or was computed from no parameter or several.
    """
    if isinstance(value, nn.Parameter):
        return value
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"it is a {type(value).__name__}, not a tensor")
    leaves: dict[int, torch.Tensor] = {}
    nodes = [value.grad_fn]
    while nodes:
        if (node := nodes.pop()) is None:
            continue
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions]
    if len(leaves) != 1:
        raise ValueError(f"it is computed from {len(leaves)} parameters")
    (leaf,) = leaves.values()
    if not isinstance(leaf, nn.Parameter):
        raise ValueError("it is computed from a tensor that is not a parameter")
    return leaf


def _test_values(parameter: nn.Parameter) -> torch.Tensor:
    """Integers of both signs in the shape of `parameter`, which float16 and bfloat16 hold exactly; in float32."""
    values = torch.arange(parameter.numel(), device="cpu") % 251 - 125
    return values.to(torch.float32).view(parameter.shape)
