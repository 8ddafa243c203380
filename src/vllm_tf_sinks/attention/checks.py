# SPDX-License-Identifier: Apache-2.0
"""Refuse a model whose attention vLLM's attention layers do not compute."""

from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.attention import routers
from vllm_tf_sinks.attention.by_head import BY_HEAD
from vllm_tf_sinks.attention.dry_run import MODEL_ERRORS, Call, DryRun, Mask, perform_dry_run
from vllm_tf_sinks.attention.sink_checks import remove_guard
from vllm_tf_sinks.errors import UnsupportedModelError
from vllm_tf_sinks.model_state import BuildStep, state_of

# Tensors that modules pass to every attention function, but no softmax depends on
NOT_IN_SOFTMAX = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "s_aux",  # sink_checks handles it
}


def check_before_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base._decorate_for_torch_compile`, the step before vLLM builds a model, to check the config.

    The step builds a model on the meta device. A class that looks up its attention class by the name of the
    attention implementation raises a KeyError there.

    Raises:
        UnsupportedModelError: naming the model, if it has no attention class for vLLM's implementation.
        ValueError: naming the model, if attention on the CPU would misread its KV cache.
    """

    @wraps(original)
    def _decorate_for_torch_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        state_of(self).enter(BuildStep.BEFORE_MODEL)
        if cache := compat.attention.misread_cache(self):
            raise ValueError(
                f"{', '.join(self.config.architectures or [self.config.model_type])} would get wrong logprobs with "
                f"kv_cache_dtype={cache}: attention on the CPU reads the cache as {self.model_config.dtype}. "
                "Use kv_cache_dtype=auto."
            )
        try:
            original(self, *args, **kwargs)
        except KeyError as error:
            if error.args != (self.text_config._attn_implementation,):
                raise
            name = ", ".join(self.config.architectures or [self.config.model_type])
            raise UnsupportedModelError(
                f"{name} looks up its attention class by name, and has none for vLLM's attention."
            ) from error

    return _decorate_for_torch_compile


def dry_run_before_split(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base._create_hf_to_vllm_mapper`, to do the dry run of a model after it.

    It is the last step before vLLM splits the model over the pipeline ranks and replaces its layers.

    Raises:
        UnsupportedModelError: naming the model, if vLLM would compute something else.
    """

    @wraps(original)
    def _create_hf_to_vllm_mapper(self: Any) -> None:
        state_of(self).enter(BuildStep.DRY_RUN)
        original(self)
        if compat.heads.is_causal(self) and not compat.heads.is_draft(self):
            dry_run = state_of(self).dry_run = perform_dry_run(self.model, self.text_config)
            routers.keep(dry_run.read_directly)
            check_dry_run(self, dry_run)

    return _create_hf_to_vllm_mapper


def check_attention_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Base.init_parameters`, to check the attention layers that vLLM built in the step before it.

    Raises:
        UnsupportedModelError: naming the layer, if its heads, scale or mask differ from its module's.
        SinkError: naming the module, if its sink does not reach its layer.
    """

    @wraps(original)
    def init_parameters(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        state = state_of(self)
        state.enter(BuildStep.PARAMETERS)
        dry_run, state.dry_run = state.dry_run, None  # vLLM also calls this for a draft, which has no dry run
        if dry_run is not None:
            state.layers_checked = True
            _check_layers(self, dry_run)
            if dry_run.by_head:
                self.text_config._attn_implementation = BY_HEAD
            elif dry_run.error is None and dry_run.layers == self.text_config.num_hidden_layers:
                with hooks.notifying_refusal(self, "sinks"):
                    remove_guard(self, dry_run.calls)
        original(self, module, *args, **kwargs)

    return init_parameters


def check_dry_run(model: Any, dry_run: DryRun) -> None:
    """Check the dry run of `model`, and give `text_config` the soft cap that the modules pass.

    Args:
        model: vLLM's model, whose `model` is the Transformers model.
        dry_run: its dry run.

    Raises:
        UnsupportedModelError: naming the model, if it needs a state, a mask or an argument that vLLM drops.
    """
    name, text_config = type(model.model).__name__, model.text_config
    error, is_text = dry_run.error, model.config is text_config
    if is_text and isinstance(error, MODEL_ERRORS):
        raise UnsupportedModelError(
            f"{name} does not run as vLLM calls it, without an attention mask and a cache: "
            f"{type(error).__name__}: {error}."
        ) from error
    if dry_run.states:
        kept = " and ".join(sorted(dry_run.states))
        raise UnsupportedModelError(f"{name} keeps {kept} between tokens, which this backend loses.")
    for call in dry_run.calls:
        if call.has_mask:
            raise UnsupportedModelError(
                f"{call.module} of {name} passes an attention mask of its own, which vLLM drops."
            )
        tensors = [name for name, value in call.arguments.items() if isinstance(value, Tensor)]
        if dropped := set(tensors) - NOT_IN_SOFTMAX:
            names = ", ".join(sorted(dropped))
            raise UnsupportedModelError(f"{call.module} of {name} passes {names} to its attention, which vLLM drops.")
        if missing := set(compat.attention.arguments_of_attention()) - call.arguments.keys():
            raise UnsupportedModelError(
                f"{call.module} of {name} does not get {', '.join(missing)}, in which this vLLM finds its attention "
                "layer. Use vLLM 0.30 or later, which does not need it."
            )
    counts = Counter(call.layer for call in dry_run.calls)
    if twice := sorted(layer for layer, count in counts.items() if count > 1 and layer is not None):
        raise UnsupportedModelError(
            f"{name} computes attention more than once in layer {twice[0]}, which has one cache on vLLM."
        )
    caps = {call.arguments.get("softcap") for call in dry_run.calls}
    if len(caps) == 1 and hasattr(text_config, "attn_logit_softcapping"):
        (text_config.attn_logit_softcapping,) = caps  # vLLM reads the config, Transformers reads the argument


def _check_layers(model: Any, dry_run: DryRun) -> None:
    layers = compat.attention.attention_layers(model)
    name = type(model.model).__name__
    silent = sorted({index for index in layers if index < dry_run.layers} - {call.layer for call in dry_run.calls})
    if dry_run.error is None and silent:
        raise UnsupportedModelError(f"{name} does not call the attention interface in layer {silent[0]}.")
    ranks = model.parallel_config.tensor_parallel_size
    if dry_run.by_head and ranks > 1:
        raise UnsupportedModelError(
            f"{name} reshapes attention's output by the number of all heads, but a rank has only a part of them. "
            "Set tensor_parallel_size to 1."
        )
    is_causal_mask = cache(_is_causal_mask)  # many layers share one mask
    for call in [*dry_run.calls, *dry_run.masked_calls]:
        layer = layers.get(-1 if call.layer is None else call.layer)
        if layer is None or not compat.attention.is_ordinary_attention(layer):
            continue
        mismatch = _mismatch(call, layer, ranks)
        length = model.model_config.max_model_len
        if not mismatch and call.mask and not is_causal_mask(call.mask, layer.sliding_window, length):
            window = f"a window of {layer.sliding_window} tokens" if layer.sliding_window else "no window"
            mismatch = f"another mask than vLLM's, which is causal with {window}"
        if mismatch:
            raise UnsupportedModelError(f"{call.module} of {name} computes layer {call.layer} with {mismatch}.")


def _mismatch(call: Call, layer: Any, ranks: int) -> str:
    """Describe the first difference between the heads or scale of `call` and of the vLLM layer; "" if none."""
    if call.head_size != layer.head_size:
        return f"heads of size {call.head_size}, vLLM with {layer.head_size}"
    query, key = call.query // call.head_size, call.key // call.head_size
    if query not in (layer.num_heads, layer.num_heads * ranks):
        return f"{query} query heads, vLLM with {layer.num_heads * ranks}"
    if key not in (layer.num_kv_heads, layer.num_kv_heads * ranks) and key > ranks:
        return f"{key} key-value heads, vLLM with {layer.num_kv_heads * ranks}"
    scale = call.arguments.get("scaling")
    own = compat.attention.fixed_scale(layer)
    if isinstance(scale, (int, float)) and own is not None and abs(scale - own) > 1e-6 * abs(own):
        return f"a scale of {scale:g}, vLLM with {own:g}"
    return ""


def _is_causal_mask(mask: Mask, window: int | None, length: int) -> bool:
    """Whether `mask` is the mask of causal attention over the last `window` of `length` tokens."""
    _fill_closures(mask)
    with torch.device("cpu"):
        query = torch.tensor([0, length // 2, length - 1])[:, None]
        key = torch.arange(length)[None]
        zero = torch.zeros((), dtype=torch.long)
        expected = (key <= query) & (key > query - window) if window else key <= query
        try:
            allowed = mask(zero, zero, query, key)
        except Exception:  # the mask needs a real batch
            return True
        return bool((allowed == expected).all())


def _fill_closures(function: Any) -> None:
    """Replace the meta tensors in a mask function's closures by zeros, which stand for a batch without padding."""
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, Tensor) and value.is_meta:
            cell.cell_contents = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if callable(inner):
                _fill_closures(inner)
