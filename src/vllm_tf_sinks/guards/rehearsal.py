# SPDX-License-Identifier: Apache-2.0
"""Run a Transformers model once without weights, and note what it asks of attention and of its cache.

The model is still as Transformers built it, whole and on the meta device: nothing is computed and no
memory is needed. It runs once as vLLM will call it, and once with a cache and true masks, as
Transformers itself would. A model that looks at values, which the meta device has none of, runs
its first layers on the CPU, with zeros for weights.
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

from vllm_tf_sinks import vllm_api

TOKENS = 5  # no size of a model, so that it is told from them

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """One call of the attention interface.

    Attributes:
        module: the class of the attention module.
        layer: its `layer_idx`.
        query, key: width of the queries and of the keys of one token, over all heads.
        head_size: the width of one head of the queries.
        masked: whether an attention mask was passed.
        mask: what that mask was made from, if Transformers made it and the module left it alone.
        arguments: everything passed by name.
    """

    module: str
    layer: int | None
    query: int
    key: int
    head_size: int
    masked: bool
    mask: Mask | None
    arguments: dict[str, Any]


@dataclass
class Rehearsal:
    """What came of it.

    Attributes:
        calls: the calls of the attention interface, as vLLM calls the model.
        masked: the same with a cache and masks.
        states: what the model keeps between tokens besides keys and values.
        by_head: whether the model takes attention's output by head only, which vLLM's function gives flat.
        layers: how many of the model's layers took part.
        error: what ended it before the model's output as vLLM calls it, or None.
        cached_error: the same as Transformers calls it: some models take a cache of another kind.
    """

    calls: list[Call] = field(default_factory=list)
    masked: list[Call] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    by_head: bool = False
    layers: int = 0
    error: Exception | None = None
    cached_error: Exception | None = None


# Methods of a cache -> what they keep
_STATES = {
    "update_conv_state": "a convolution's state",
    "update_recurrent_state": "a recurrent state",
    "update_indexer": "an indexer's keys",
}
_AS_VLLM, _BY_HEAD, _WITH_MASKS = "vllm_rehearsal", "vllm_rehearsal_by_head", "vllm_rehearsal_with_masks"

_calls: ContextVar[list[Call]] = ContextVar("calls")
_masks: ContextVar[list[tuple[Tensor, Mask]]] = ContextVar("masks")


def rehearse(model: nn.Module, text_config: Any) -> Rehearsal:
    """Run `model`, which is on the meta device but for its buffers, as vLLM and as Transformers would."""
    with _on_meta(model):
        rehearsal = _rehearse(model, text_config, text_config.num_hidden_layers, "batched_mm")
    if all(error is None or isinstance(error, GENUINE) for error in (rehearsal.error, rehearsal.cached_error)):
        return rehearsal
    layers = min(text_config.num_hidden_layers, LAYERS_ON_CPU)
    with _on_cpu(model, text_config.num_hidden_layers, layers):
        return _rehearse(model, text_config, layers, "eager")


# Errors of a model that is not given what it asks for, and not of an operation that looks at values
GENUINE = (TypeError, AttributeError, ValueError, LookupError)
LAYERS_ON_CPU = 8


def _rehearse(model: nn.Module, text_config: Any, layers: int, experts: str) -> Rehearsal:
    rehearsal = Rehearsal(layers=layers)
    _masks.set([])
    with _implementations(text_config, _AS_VLLM, experts, rehearsal.calls):
        rehearsal.error = _run(model, _as_vllm)
    if rehearsal.error is not None:
        calls: list[Call] = []
        with _implementations(text_config, _BY_HEAD, experts, calls):
            rehearsal.by_head = _run(model, _as_vllm) is None
        if rehearsal.by_head:
            rehearsal.error, rehearsal.calls = None, calls
    if rehearsal.error is None:
        with _implementations(text_config, _WITH_MASKS, experts, rehearsal.masked):
            rehearsal.cached_error = _run(model, partial(_with_cache, text_config, rehearsal.states))
    return rehearsal


def _run(model: nn.Module, arguments: Callable[[], dict[str, Any]]) -> Exception | None:
    """Run `model` on tokens without values; returns what it raised."""
    try:
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        positions = torch.arange(TOKENS)[None]
        given = {"use_cache": False, **arguments()}
        model.forward(input_ids=tokens, position_ids=positions, return_dict=False, **given)
    except Exception as error:  # whatever a model raises that is not given what it asks for
        return error
    return None


def _as_vllm() -> dict[str, Any]:
    """Arguments that vLLM's own call has."""
    return {name: {} for name in vllm_api.attention.handed_to_attention()}


def _with_cache(text_config: Any, states: set[str]) -> dict[str, Any]:
    """Arguments that hand a model a cache, which notes what is kept in it."""

    def noting(name: str) -> Callable[..., Any]:
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            states.add(_STATES[name])
            return getattr(super(cls, self), name)(*args, **kwargs)

        return update

    methods = {name: noting(name) for name in _STATES if hasattr(DynamicCache, name)}
    cls = type("NotingCache", (DynamicCache,), methods)
    return {"past_key_values": cls(config=text_config), "use_cache": True}


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Have the buffers of `model` on the meta device, as its parameters are."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    modules = list(model.modules())
    buffers = [module._buffers for module in modules]
    with _as_written(modules), _exchanged(buffers, moved), torch.device("meta"), torch.no_grad(), _OncePerShape():
        yield


class _OncePerShape(TorchFunctionMode):
    """Compute what shape a result has once for all layers: an elementwise operation on meta takes 200 us of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[Any, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        with torch._C.DisableTorchFunction():  # asking a tensor for its shape is such a call, too
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
    """What the shape of a result can depend on in an argument; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(each, tensors) for each in value)
    return type(value), value  # 1 and 1.0 are equal, but make other dtypes


@contextmanager
def _on_cpu(model: nn.Module, layers: int, kept: int) -> Iterator[None]:
    """Have zeros for the parameters of `model`, which take no memory, and `kept` of its `layers`."""

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)

    def parameter(original: Tensor) -> Tensor:
        return nn.Parameter(zeros(original), requires_grad=False)

    def buffer(original: Tensor) -> Tensor:
        return zeros(original) if original.is_meta else original.to("cpu")

    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
    whole = [dict(stack._modules) for stack in stacks]
    for stack in stacks:
        stack._modules = dict(list(stack._modules.items())[:kept])
    modules = list(model.modules())
    try:
        with (
            _as_written(modules),
            torch.device("cpu"),
            _exchanged([module._parameters for module in modules], parameter),
            _exchanged([module._buffers for module in modules], buffer),
            torch.no_grad(),
            _NoProducts(),
        ):
            yield
    finally:
        for stack, own in zip(stacks, whole, strict=True):
            stack._modules = own


class _NoProducts(TorchFunctionMode):
    """Let products of matrices be zeros, without computing them: their shapes are what counts."""

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
def _exchanged(namespaces: list[dict[str, Any]], exchange: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the context, hold other tensors under the same names."""
    own = [dict(namespace) for namespace in namespaces]
    try:
        for namespace in namespaces:
            namespace.update({name: exchange(value) for name, value in namespace.items() if value is not None})
        yield
    finally:
        for namespace, original in zip(namespaces, own, strict=True):
            namespace.clear()
            namespace.update(original)


@contextmanager
def _as_written(modules: list[Any]) -> Iterator[None]:
    """Run without what vLLM would compile, and take back what modules note in their attributes: tables, say."""
    with _exchanged([vars(module) for module in modules], lambda tensor: tensor):
        for module in modules:
            if getattr(module, "do_not_compile", None) is False:
                module.do_not_compile = True
        yield


@contextmanager
def _implementations(text_config: Any, attention: str, experts: str, calls: list[Call]) -> Iterator[None]:
    """Note what is passed to the attention interface, and run experts by an implementation that can."""
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


def _by_head(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function: the output [1, N, heads, size] of queries [1, heads, N, size], which notes its call."""
    mask = next((made_from for made, made_from in _masks.get() if made is attention_mask), None)
    layer = getattr(module, "layer_idx", None)
    _calls.get().append(
        Call(
            module=type(module).__name__,
            layer=layer if isinstance(layer, int) else None,
            query=query.shape[1] * query.shape[-1],
            key=key.shape[1] * key.shape[-1],
            head_size=query.shape[-1],
            masked=attention_mask is not None,
            mask=mask,
            arguments=kwargs,
        )
    )
    return query.new_zeros(1, query.shape[-2], query.shape[1], value.shape[-1]), None


def _flat(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The same with the output [N, heads * size], as vLLM's has it."""
    return _by_head(*args, **kwargs)[0][0].flatten(1), None


def _mask(*, q_length: int, kv_length: int, mask_function: Mask, **_: Any) -> Tensor:
    """A mask [1, 1, q, kv] without contents, by which `_by_head` knows what it was made from."""
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    _masks.get().append((mask, mask_function))
    return mask


ALL_ATTENTION_FUNCTIONS.register(_AS_VLLM, _flat)
for _implementation in (_BY_HEAD, _WITH_MASKS):
    ALL_ATTENTION_FUNCTIONS.register(_implementation, _by_head)
ALL_MASK_ATTENTION_FUNCTIONS.register(_WITH_MASKS, _mask)
