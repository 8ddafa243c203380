# SPDX-License-Identifier: Apache-2.0
"""Refuse a model whose attention is not what vLLM's attention layers compute."""

from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from vllm_tf_sinks import hooks, vllm_api
from vllm_tf_sinks.guards.attention import BY_HEAD
from vllm_tf_sinks.guards.errors import GuardError
from vllm_tf_sinks.guards.rehearsal import GENUINE, Call, Mask, Rehearsal, rehearse
from vllm_tf_sinks.model_state import state_of
from vllm_tf_sinks.sinks.guards import leave_guard

# Tensors that modules pass to every attention function, and no softmax depends on
HARMLESS = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "s_aux",  # that is what the sinks' own checks are for
}


def name_missing_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Base._decorate_for_torch_compile`, which builds a model first, and fails for one with attention classes.

    Raises:
        GuardError: naming the model, if it looks up its attention classes by vLLM's name.
    """

    @wraps(original)
    def _decorate_for_torch_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except KeyError as error:
            if error.args != (self.text_config._attn_implementation,):
                raise
            name = ", ".join(self.config.architectures or [self.config.model_type])
            raise GuardError(f"{name} knows attention classes of its own only, and none of vLLM's.") from error

    return _decorate_for_torch_compile


def rehearse_before_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Base._create_hf_to_vllm_mapper`, the last step at which a model is whole, which also rehearses it.

    Raises:
        GuardError: naming the model, if it cannot be right on vLLM.
    """

    @wraps(original)
    def _create_hf_to_vllm_mapper(self: Any) -> None:
        original(self)
        if vllm_api.heads.is_causal(self) and not vllm_api.heads.is_draft(self):
            rehearsal = state_of(self).rehearsal = rehearse(self.model, self.text_config)
            check_rehearsal(self, rehearsal)

    return _create_hf_to_vllm_mapper


def check_attention_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Base.init_parameters`, the step after attention layers are made, which also checks these.

    Raises:
        GuardError: naming the layer, if one computes something else than its module asks for.
        SinkError: naming the module, if its sink does not reach its layer.
    """

    @wraps(original)
    def init_parameters(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        state = state_of(self)
        rehearsal, state.rehearsal = state.rehearsal, None  # vLLM calls this for drafts too
        if rehearsal is not None:
            state.layers_checked = True
            _check_layers(self, rehearsal)
            if rehearsal.by_head:
                self.text_config._attn_implementation = BY_HEAD
            elif rehearsal.error is None and rehearsal.layers == self.text_config.num_hidden_layers:
                with hooks.telling_refusal(self, "sinks"):
                    leave_guard(self, rehearsal.calls)
        original(self, module, *args, **kwargs)

    return init_parameters


def check_rehearsal(model: Any, rehearsal: Rehearsal) -> None:
    """Check what `model`, vLLM's around a Transformers model, did in its rehearsal.

    Raises:
        GuardError: naming the model, if it needs what vLLM drops.
    """
    name, text_config = type(model.model).__name__, model.text_config
    error, is_text = rehearsal.error, model.config is text_config
    if is_text and isinstance(error, GENUINE):
        raise GuardError(
            f"{name} does not run as vLLM calls it, without an attention mask and a cache: "
            f"{type(error).__name__}: {error}."
        ) from error
    if rehearsal.states:
        kept = " and ".join(sorted(rehearsal.states))
        raise GuardError(f"{name} keeps {kept} between tokens, which this backend loses.")
    for call in rehearsal.calls:
        if call.masked:
            raise GuardError(f"{call.module} of {name} passes an attention mask of its own, which vLLM drops.")
        tensors = [name for name, value in call.arguments.items() if isinstance(value, Tensor)]
        if dropped := set(tensors) - HARMLESS:
            names = ", ".join(sorted(dropped))
            raise GuardError(f"{call.module} of {name} passes {names} to its attention, which vLLM drops.")
        if missing := set(vllm_api.attention.handed_to_attention()) - call.arguments.keys():
            raise GuardError(
                f"{call.module} of {name} is not handed {', '.join(missing)}, in which this vLLM looks for its "
                "attention layer. vLLM 0.30 needs no such thing."
            )
    counts = Counter(call.layer for call in rehearsal.calls)
    if twice := sorted(layer for layer, count in counts.items() if count > 1 and layer is not None):
        raise GuardError(f"{name} computes attention more than once in layer {twice[0]}, which has one cache on vLLM.")
    caps = {call.arguments.get("softcap") for call in rehearsal.calls}
    if len(caps) == 1 and hasattr(text_config, "attn_logit_softcapping"):
        (text_config.attn_logit_softcapping,) = caps  # vLLM reads the config, Transformers what is passed


def _check_layers(model: Any, rehearsal: Rehearsal) -> None:
    layers = vllm_api.attention.attention_layers(model)
    name = type(model.model).__name__
    silent = sorted({index for index in layers if index < rehearsal.layers} - {call.layer for call in rehearsal.calls})
    if rehearsal.error is None and silent:
        raise GuardError(f"{name} computes no attention in layer {silent[0]}, but something of its own.")
    ranks = model.parallel_config.tensor_parallel_size
    if rehearsal.by_head and ranks > 1:
        raise GuardError(f"{name} counts its own heads, whichever are this rank's: set tensor_parallel_size to 1.")
    masks_as = cache(_masks_as)  # many layers share one mask
    for call in [*rehearsal.calls, *rehearsal.masked]:
        layer = layers.get(-1 if call.layer is None else call.layer)
        if layer is None or not vllm_api.attention.is_ordinary_attention(layer):
            continue
        what = _mismatch(call, layer, ranks)
        if not what and call.mask and not masks_as(call.mask, layer.sliding_window, model.model_config.max_model_len):
            window = f"a window of {layer.sliding_window} tokens" if layer.sliding_window else "no window"
            what = f"another mask than vLLM's, which is causal with {window}"
        if what:
            raise GuardError(f"{call.module} of {name} computes layer {call.layer} with {what}.")


def _mismatch(call: Call, layer: Any, ranks: int) -> str:
    """What of `call` the vLLM layer does otherwise, or ""."""
    if call.head_size != layer.head_size:
        return f"heads of size {call.head_size}, vLLM with {layer.head_size}"
    query, key = call.query // call.head_size, call.key // call.head_size
    if query not in (layer.num_heads, layer.num_heads * ranks):
        return f"{query} query heads, vLLM with {layer.num_heads * ranks}"
    if key not in (layer.num_kv_heads, layer.num_kv_heads * ranks) and key > ranks:
        return f"{key} key-value heads, vLLM with {layer.num_kv_heads * ranks}"
    scale = call.arguments.get("scaling")
    own = vllm_api.attention.fixed_scale(layer)
    if isinstance(scale, (int, float)) and own is not None and abs(scale - own) > 1e-6 * abs(own):
        return f"a scale of {scale:g}, vLLM with {own:g}"
    return ""


def _masks_as(mask: Mask, window: int | None, length: int) -> bool:
    """Whether `mask` is that of causal attention over the last `window` of `length` tokens."""
    _fill_closures(mask)
    with torch.device("cpu"):
        query = torch.tensor([0, length // 2, length - 1])[:, None]
        key = torch.arange(length)[None]
        zero = torch.zeros((), dtype=torch.long)
        expected = (key <= query) & (key > query - window) if window else key <= query
        try:
            allowed = mask(zero, zero, query, key)
        except Exception:  # it is made from what only a true batch has
            return True
        return bool((allowed == expected).all())


def _fill_closures(function: Any) -> None:
    """Give a mask the padding that it was made with, none, in place of tensors without contents."""
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, Tensor) and value.is_meta:
            cell.cell_contents = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if callable(inner):
                _fill_closures(inner)
