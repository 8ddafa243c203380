# SPDX-License-Identifier: Apache-2.0
"""The dry run of a Transformers model: record its calls of attention and the states that it keeps.

The model is as Transformers built it, on the meta device, so that the run computes nothing and needs no memory.
The model runs once with the arguments that vLLM passes, and once with a cache and masks, as in
`generate`. A model that reads values, which meta tensors do not have, runs again on the CPU, with zeros for weights
and its first layers only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_tf_sinks import compat

TOKENS = 5  # unlike any size of a model

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of the attention interface.

    Attributes:
        module: the class name of the attention module.
        layer: its `layer_idx`.
        query, key: number of elements in the queries and in the keys of one token, over all heads.
        head_size: number of elements in one head of the queries.
        has_mask: whether the module passed an attention mask.
        mask: the mask function of that mask, if Transformers made it and the module did not change it.
        arguments: all arguments passed by name.
    """

    module: str
    layer: int | None
    query: int
    key: int
    head_size: int
    has_mask: bool
    mask: Mask | None
    arguments: dict[str, Any]


@dataclass
class DryRun:
    """The result of a dry run.

    Attributes:
        calls: the calls of the attention interface with the arguments that vLLM passes.
        masked_calls: those with a cache and masks.
        states: the states that the model keeps between tokens besides keys and values.
        by_head: whether the model needs attention's output by head, [1, N, heads, size], and not [N, heads * size].
        layers: the number of layers that ran.
        error: the exception that ended the run with vLLM's arguments, or None.
        cached_error: the exception that ended the run with a cache, or None: some models take a cache of another class.
        read_directly: linear layers whose weight a module reads without calling the layer.
    """

    calls: list[Call] = field(default_factory=list)
    masked_calls: list[Call] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    by_head: bool = False
    layers: int = 0
    error: Exception | None = None
    cached_error: Exception | None = None
    read_directly: list[nn.Linear] = field(default_factory=list)


# Methods of a cache -> the state that they update
_STATES = {
    "update_conv_state": "a convolution's state",
    "update_recurrent_state": "a recurrent state",
    "update_indexer": "an indexer's keys",
}
_AS_VLLM, _BY_HEAD, _WITH_MASKS = "vllm_dry_run", "vllm_dry_run_by_head", "vllm_dry_run_with_masks"

_calls: ContextVar[list[Call]] = ContextVar("calls")
_masks: ContextVar[list[tuple[Tensor, Mask]]] = ContextVar("masks")


def perform_dry_run(model: nn.Module, text_config: Any) -> DryRun:
    """Do the dry run of `model`, whose parameters are on the meta device.

    Args:
        model: a Transformers model.
        text_config: its text config, whose attention and experts implementation are replaced during the run.
    """
    with _on_meta(model):
        dry_run = _perform(model, text_config, text_config.num_hidden_layers, "batched_mm")
    if all(error is None or isinstance(error, MODEL_ERRORS) for error in (dry_run.error, dry_run.cached_error)):
        return dry_run
    layers = min(text_config.num_hidden_layers, LAYERS_ON_CPU)
    with _on_cpu(model, text_config.num_hidden_layers, layers):
        return _perform(model, text_config, layers, "eager")


# What a model raises if it lacks an argument; an operation that reads the values of meta tensors raises others
MODEL_ERRORS = (TypeError, AttributeError, ValueError, LookupError)
LAYERS_ON_CPU = 8


def _perform(model: nn.Module, text_config: Any, layers: int, experts: str) -> DryRun:
    dry_run = DryRun(layers=layers)
    _masks.set([])
    with (
        _implementations(text_config, _AS_VLLM, experts, dry_run.calls),
        _recording_direct_reads(model, dry_run.read_directly),
    ):
        dry_run.error = _run(model, _vllm_arguments)
    if dry_run.error is not None:
        calls: list[Call] = []
        with _implementations(text_config, _BY_HEAD, experts, calls):
            dry_run.by_head = _run(model, _vllm_arguments) is None
        if dry_run.by_head:
            dry_run.error, dry_run.calls = None, calls
    if dry_run.error is None:
        with _implementations(text_config, _WITH_MASKS, experts, dry_run.masked_calls):
            dry_run.cached_error = _run(model, partial(_cache_arguments, text_config, dry_run.states))
    return dry_run


def _run(model: nn.Module, arguments: Callable[[], dict[str, Any]]) -> Exception | None:
    """Run `model` on TOKENS tokens, and return the exception that it raised, or None."""
    try:
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        positions = torch.arange(TOKENS)[None]
        given = {"use_cache": False, **arguments()}
        model.forward(input_ids=tokens, position_ids=positions, return_dict=False, **given)
    except Exception as error:  # the code of any model
        return error
    return None


def _vllm_arguments() -> dict[str, Any]:
    """The arguments with which vLLM calls a model, besides tokens and positions."""
    return {name: {} for name in compat.attention.arguments_of_attention()}


def _cache_arguments(text_config: Any, states: set[str]) -> dict[str, Any]:
    """The arguments that pass a model a cache, which adds each state that the model updates to `states`."""

    def recording(name: str) -> Callable[..., Any]:
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            states.add(_STATES[name])
            return getattr(super(cls, self), name)(*args, **kwargs)

        return update

    methods = {name: recording(name) for name in _STATES if hasattr(DynamicCache, name)}
    cls = type("RecordingCache", (DynamicCache,), methods)
    return {"past_key_values": cls(config=text_config), "use_cache": True}


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Within the context, the buffers of `model` are on the meta device, where its parameters are."""

    def to_meta(tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    modules = list(model.modules())
    buffers = [module._buffers for module in modules]
    with (
        _without_compilation(modules),
        _replaced(buffers, to_meta),
        torch.device("meta"),
        torch.no_grad(),
        _ShapeCache(),
    ):
        yield


@contextmanager
def _recording_direct_reads(model: nn.Module, found: list[nn.Linear]) -> Iterator[None]:
    """Add to `found` each linear layer of `model` whose weight is read within the context without a call of it."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    called: set[int] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(id(layer))) for layer in layers]
    reads = _WeightReads({id(layer.weight): layer for layer in layers})
    try:
        with reads:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    found += [layer for layer in reads.layers if id(layer) not in called]


class _WeightReads(TorchFunctionMode):
    """Records the layers whose weight is an argument of a torch function."""

    def __init__(self, by_weight: dict[int, nn.Linear]) -> None:
        super().__init__()
        self.by_weight = by_weight
        self.layers: set[nn.Linear] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.layers.update(self.by_weight[id(value)] for value in args if id(value) in self.by_weight)
        return func(*args, **kwargs or {})


class _ShapeCache(TorchFunctionMode):
    """Caches the shapes of results over all layers: an elementwise operation on meta tensors takes 200 us."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # reading a tensor's shape is a torch function too
            key = (func, _shapes([args, *kwargs.items()], tensors))
            try:
                known = self.results.get(key)
            except TypeError:  # an argument is not hashable
                tensors, known = [], None
            if known is not None:
                return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device="meta")
        result = func(*args, **kwargs)
        is_new = isinstance(result, Tensor) and not result._is_view() and all(result is not t for t in tensors)
        if tensors and is_new and result.is_meta:
            self.results[key] = result
        return result


def _shapes(value: Any, tensors: list[Tensor]) -> Any:
    """The properties of an argument on which a result's shape can depend; adds its tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(each, tensors) for each in value)
    return type(value), value  # 1 and 1.0 are equal, but lead to different dtypes


@contextmanager
def _on_cpu(model: nn.Module, layers: int, kept: int) -> Iterator[None]:
    """Within the context, `model` has `kept` of its `layers`, and expanded zeros, without memory, as parameters."""

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)

    def parameter(original: Tensor) -> Tensor:
        return nn.Parameter(zeros(original), requires_grad=False)

    def buffer(original: Tensor) -> Tensor:
        return zeros(original) if original.is_meta else original.to("cpu")

    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    originals = [dict(stack._modules) for stack in stacks]
    for stack in stacks:
        stack._modules = dict(list(stack._modules.items())[:kept])
    modules = list(model.modules())
    try:
        with (
            _without_compilation(modules),
            torch.device("cpu"),
            _replaced([module._parameters for module in modules], parameter),
            _replaced([module._buffers for module in modules], buffer),
            torch.no_grad(),
            _ZeroMatmuls(),
        ):
            yield
    finally:
        for stack, original_modules in zip(stacks, originals, strict=True):
            stack._modules = original_modules


class _ZeroMatmuls(TorchFunctionMode):
    """Returns zeros of the right shape for each matrix product, without computing it."""

    FUNCTIONS = (
        F.linear,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.FUNCTIONS:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return torch.zeros_like(func(*args, **kwargs), device="cpu")


@contextmanager
def _replaced(namespaces: list[dict[str, Any]], replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the context, each dict of `namespaces` holds `replace(value)` for each value; restored afterwards."""
    originals = [dict(namespace) for namespace in namespaces]
    try:
        for namespace in namespaces:
            namespace.update({name: replace(value) for name, value in namespace.items() if value is not None})
        yield
    finally:
        for namespace, original in zip(namespaces, originals, strict=True):
            namespace.clear()
            namespace.update(original)


@contextmanager
def _without_compilation(modules: list[Any]) -> Iterator[None]:
    """Run `modules` without vLLM's compilation, and restore their attributes afterwards: some cache tables there."""
    with _replaced([vars(module) for module in modules], lambda tensor: tensor):
        for module in modules:
            if getattr(module, "do_not_compile", None) is False:
                module.do_not_compile = True
        yield


@contextmanager
def _implementations(text_config: Any, attention: str, experts: str, calls: list[Call]) -> Iterator[None]:
    """Add the calls of the attention interface to `calls`; run experts by the implementation named `experts`."""
    chosen = {"_attn_implementation": attention, "_experts_implementation": experts}
    original: dict[str, Any] = {name: getattr(text_config, name, None) for name in chosen}
    token = _calls.set(calls)
    try:
        for name, value in chosen.items():
            setattr(text_config, name, value)
        yield
    finally:
        _calls.reset(token)
        for name in chosen:
            setattr(text_config, name, original[name])


def _attention_by_head(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Record the call, and return zeros [1, N, heads, size] for queries [1, heads, N, size]."""
    mask = next((made_from for made, made_from in _masks.get() if made is attention_mask), None)
    layer = getattr(module, "layer_idx", None)
    _calls.get().append(
        Call(
            module=type(module).__name__,
            layer=layer if isinstance(layer, int) else None,
            query=query.shape[1] * query.shape[-1],
            key=key.shape[1] * key.shape[-1],
            head_size=query.shape[-1],
            has_mask=attention_mask is not None,
            mask=mask,
            arguments=kwargs,
        )
    )
    return query.new_zeros(1, query.shape[-2], query.shape[1], value.shape[-1]), None


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Do the same with the output [N, heads * size], which is the shape of vLLM's."""
    return _attention_by_head(*args, **kwargs)[0][0].flatten(1), None


def _mask(*, q_length: int, kv_length: int, mask_function: Mask, **_: Any) -> Tensor:
    """Make a meta mask [1, 1, q, kv], by which `_attention_by_head` finds its mask function."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    _masks.get().append((mask, mask_function))
    return mask


ALL_ATTENTION_FUNCTIONS.register(_AS_VLLM, _attention)
for _implementation in (_BY_HEAD, _WITH_MASKS):
    ALL_ATTENTION_FUNCTIONS.register(_implementation, _attention_by_head)
ALL_MASK_ATTENTION_FUNCTIONS.register(_WITH_MASKS, _mask)
