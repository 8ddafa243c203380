# SPDX-License-Identifier: Apache-2.0
"""Find the parameter that an attention module passes to the attention interface as `s_aux`.

A plugin may say so. Else the source of the module's class says what is passed; evaluating it on the
module says which parameter that is. Names of parameters play no part.
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

ARGUMENT = "s_aux"


class SinkError(ValueError):
    """A sink that cannot be served correctly."""


@dataclass(frozen=True)
class Sink:
    """Where the sink of one attention module is.

    Attributes:
        module_name: the attention module, as `model.get_submodule` takes it.
        layer_index: the layer of vLLM that serves it.
        owner_name: the module that holds the parameter.
        name: the parameter's name in its owner.
        shape: its shape, over all ranks.
    """

    module_name: str
    layer_index: int
    owner_name: str
    name: str
    shape: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        """How many numbers it has, over all ranks."""
        return math.prod(self.shape)

    @property
    def parameter_name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.owner_name}.{self.name}"


def find_sinks(model: nn.Module) -> list[Sink]:
    """The sinks of every module of `model` that dispatches to vLLM's attention, in the model's order.

    Args:
        model: vLLM's model around a Transformers model that is still as Transformers built it, on
            the meta device or not.

    Raises:
        SinkError: if a module passes a sink that is not one unchanged parameter, has no `layer_idx`,
            or has that of another.
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
                f"{type(module).__name__} ({module_name}) passes a sink, but has no layer_idx by which "
                "vLLM would find its attention layer."
            )
        if index in sinks:
            raise SinkError(
                f"{sinks[index].module_name} and {module_name} both pass a sink to vLLM's attention in "
                f"layer {index}, which has one attention layer."
            )
        shape = tuple(owner.parameter.shape)
        sinks[index] = Sink(module_name, index, owner.module_name, owner.name, shape)
    return list(sinks.values())


_ADVICE = (
    "vLLM's kernels take the parameter itself, so the output would be wrong: "
    "let the model pass the parameter, or a cast or reshape of it, as s_aux."
)


def dispatches_to_vllm(module: nn.Module) -> bool:
    """Whether `module` looks up vLLM's attention function: the encoders of a multimodal model do not."""
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
        """Let the parameter hold `values` for a while."""
        original = self.parameter
        self.module._parameters[self.name] = nn.Parameter(values)
        try:
            yield
        finally:
            self.module._parameters[self.name] = original


def _owner(module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
    """Where the parameter is that `module` passes as its sink, by a hook's word or by its source, or None."""
    if (answer := hooks.plugins().ask("attention_sink", module=module)) is None:
        return _trace(module, owners)
    if (owner := owners.get(id(answer.value))) is None:
        raise SinkError(
            f"The plugin {answer.plugin!r} of vllm-tf-sinks says that {type(module).__name__} passes as its sink what "
            f"is no parameter of the model: {type(answer.value).__name__}."
        )
    return owner


def _trace(module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
    """Where the parameter is that `module` passes as its sink, or None where it passes none."""
    found: dict[int, tuple[_Owner, str]] = {}
    for passed in _passed(type(module)):  # type: ignore[arg-type]  # classes are hashable
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
class _Passed:
    """An expression that a method passes as `s_aux`."""

    function: Callable[..., Any]
    tree: ast.FunctionDef
    expression: ast.expr

    @property
    def text(self) -> str:
        return ast.unparse(self.expression)

    @property
    def arguments(self) -> set[str]:
        """The method's parameters, but for `self`."""
        args = self.tree.args
        names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]
        return set(names[1:])

    def owner(self, module: nn.Module, owners: dict[int, _Owner]) -> _Owner | None:
        """Where the one parameter is whose values `module` passes, or None where it passes None.

        Raises:
            ValueError: if it is not one parameter of the model, or if its values are changed.
        """
        with _requiring_grad(module):
            value = self.evaluate(module)
        if value is None:
            return None
        if (owner := owners.get(id(_leaf(value)))) is None:
            raise ValueError("its tensor is no parameter of the model")
        numbers = _numbers(owner.parameter)
        with owner.holding(numbers), torch.device("cpu"):
            passed = self.evaluate(module).detach().flatten().float()
        if not torch.equal(passed, numbers.flatten()):
            raise ValueError("the expression changes the parameter's values")
        return owner

    @cached_property
    def program(self) -> CodeType:
        """What assigns the expression's value, after the statements before it that it depends on: one for all layers.

        Raises:
            ValueError: if it depends on what the method is called with.
        """
        statements, unknown = _slice(self.tree, self.expression)
        if arguments := unknown & self.arguments:
            raise ValueError(f"it depends on what the method is called with ({', '.join(sorted(arguments))})")
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
def _passed(cls: type[nn.Module]) -> tuple[_Passed, ...]:
    """What the methods of `cls` pass as `s_aux`, but for a method that passes its own argument on."""
    passed = []
    for function in _methods(cls):
        if not _names_argument(function.__code__):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):  # no source: its sinks show in the rehearsal, or are caught by the guard
            continue
        if not isinstance(tree := ast.parse(source).body[0], ast.FunctionDef):
            continue
        for expression in _bindings(tree):
            each = _Passed(function, tree, expression)
            if not (isinstance(expression, ast.Name) and expression.id in each.arguments):
                passed.append(each)
    return tuple(passed)


def _names_argument(code: CodeType) -> bool:
    """Whether `s_aux` is a keyword or a key in a function, as far as its constants tell: sources are slow to get."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and _names_argument(constant):
            return True
        if constant == ARGUMENT or (isinstance(constant, tuple) and ARGUMENT in constant):
            return True
    return False


def _methods(cls: type[nn.Module]) -> Iterator[FunctionType]:
    """The functions that `cls` defines or inherits, short of those of torch."""
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        unwrapped = inspect.unwrap(function) if inspect.isfunction(function) else None
        if inspect.isfunction(unwrapped) and not unwrapped.__module__.startswith("torch."):
            yield unwrapped


def _bindings(tree: ast.AST) -> Iterator[ast.expr]:
    """What is bound to `s_aux` in `tree`: as a keyword, in a dict display, or as an entry of a dict."""
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
    """The statements of `tree` that `expression` depends on, and the names that they leave unassigned."""
    needed = _loads(expression)
    statements = _sliced(tree.body, needed, expression.lineno)
    return statements, {name for name in needed if not hasattr(builtins, name)}


def _sliced(body: list[ast.stmt], needed: set[str], before: int) -> list[ast.stmt]:
    """The statements of `body` above line `before` that assign what is `needed`, to which they add."""
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
    """Record gradients for every parameter of `module`, so that a value can be traced to its leaf."""
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
    """The one parameter that `value` was computed from, by its gradient graph.

    Raises:
        ValueError: if it is no tensor, or was computed from none or several parameters.
    """
    if isinstance(value, nn.Parameter):
        return value
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"it is a {type(value).__name__}, no tensor")
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
        raise ValueError("it is computed from a tensor that is no parameter")
    return leaf


def _numbers(parameter: nn.Parameter) -> torch.Tensor:
    """Numbers of both signs in the shape of `parameter` that every float dtype holds exactly."""
    numbers = torch.arange(parameter.numel(), device="cpu") % 251 - 125
    return numbers.to(torch.float32).view(parameter.shape)
