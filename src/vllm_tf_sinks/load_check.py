# SPDX-License-Identifier: Apache-2.0
"""Check a loaded model against its checkpoint, on a version of vLLM on which this package was not tested.

A patch fits if the name and signature of its target are right, but vLLM may use the target in another way. So each
model is checked after its weights are loaded: its logits are compared with those of its ForCausalLM class, and
the sinks that its kernels read with those of the checkpoint.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.attention.sink_finder import Sink
from vllm_tf_sinks.attention.sink_loader import heads_of_rank
from vllm_tf_sinks.errors import LoadError
from vllm_tf_sinks.lm_head.build import Head
from vllm_tf_sinks.model_state import CheckpointTensors, ModelState, state_of
from vllm_tf_sinks.settings import chosen

logger = logging.getLogger("vllm.tf_sinks")

ROWS = 5  # of random hidden states
VOCABULARY_PART = 8192  # rows of the projection that are converted to float32 at a time


def refuse_unchecked(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Base.__init__`, to refuse a model whose loader does not call `process_weights_after_loading`.

    Raises:
        LoadError: naming the load format.
    """

    @wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        if not compat.weights.loader_is_ordinary(vllm_config.load_config):
            load_format = vllm_config.load_config.load_format
            raise LoadError(
                f"A model that is loaded with load_format={load_format} cannot be checked after loading. Use "
                "load_format=auto."
            )
        original(self, vllm_config=vllm_config, prefix=prefix)

    return __init__


def check_after_loading(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `process_weights_after_loading`, the last step of loading, to check the model after it.

    Raises:
        LoadError: naming the model, if its logits or sinks are not those of its class and its checkpoint.
    """

    @wraps(original)
    def process_weights_after_loading(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if compat.engine.is_of_backend(model):
            _check(model)

    return process_weights_after_loading


def _check(model: Any) -> None:
    state, name = state_of(model), type(model.model).__name__
    if state.checkpoint is None or compat.heads.is_draft(model):
        return
    if model.vllm_config.load_config.load_format == "dummy":
        logger.info("%s has dummy weights, and is not checked", name)
        return
    try:
        # The head first: all ranks compute its logits together, and the others would wait for a rank that raised
        if "head" in chosen().groups and compat.heads.computes_logits(model):
            with hooks.notifying_refusal(model, "head"):
                _check_head(model, state, name)
        if "sinks" in chosen().groups:
            with hooks.notifying_refusal(model, "sinks"):
                _check_sinks(model, state, name)
    except LoadError:
        raise
    except Exception as error:  # an untested vLLM may raise anything
        raise LoadError(f"{name} cannot be checked after loading: {type(error).__name__}: {error}.") from error
    if not state.layers_checked and compat.heads.is_causal(model):
        raise LoadError(f"The attention layers of {name} were not compared with its dry run.")
    state.checkpoint = None
    logger.info("%s: checked after loading, since this version of vLLM was not tested", name)


def _check_head(model: Any, state: ModelState, name: str) -> None:
    if state.head is None or state.names is None or state.checkpoint is None:
        raise LoadError(f"vLLM built {name} without its output head.")
    size = model.text_config.hidden_size
    numbers = torch.randn(ROWS, size, generator=torch.Generator().manual_seed(0), device="cpu")
    hidden_states = numbers.to(model.device_config.device, model.model_config.dtype)
    with torch.no_grad():
        served = model.compute_logits(hidden_states.clone())
        if served is None:  # this platform gathers logits on the first rank only
            return
        with _projecting(model, state.head, state.checkpoint):
            expected = state.head.run_eagerly(hidden_states[None])[0]
    served, expected = served.float(), expected.float()
    vocabulary = expected.shape[-1]
    if served.shape[0] != ROWS or served.shape[-1] < vocabulary:
        raise LoadError(
            f"{name} gives logits of the shape {tuple(served.shape)}, but {state.head.name} of the shape "
            f"{tuple(expected.shape)}."
        )
    if not served[:, vocabulary:].isneginf().all():
        raise LoadError(f"{name} gives logits for tokens that {state.head.name} does not have.")
    served = served[:, :vocabulary]
    difference = float((served - expected).where(served != expected, 0).abs().nan_to_num(nan=torch.inf).max())
    # The rounding errors of two orders of summation, relative to the largest logit; a GPU may round float32 to TF32
    largest = float(expected.abs().where(expected.isfinite(), 0).max())
    allowed = max(1e-3, 8 * torch.finfo(hidden_states.dtype).eps) * largest
    if not difference <= allowed:
        raise LoadError(
            f"{name} gives other logits than {state.head.name} for the same hidden states: they differ by up to "
            f"{difference:.3g}, but only {allowed:.3g} is allowed."
        )


@contextmanager
def _projecting(model: Any, head: Head, checkpoint: CheckpointTensors) -> Iterator[None]:
    """Within the context, the head projects with the checkpoint's weight, or by vLLM's layer if that is quantised."""

    def project(x: Tensor) -> Tensor:
        rows = x.to("cpu", torch.float32)
        parts = torch.split(weight, VOCABULARY_PART)
        logits = torch.cat([F.linear(rows, part.float()) for part in parts], -1)
        if checkpoint.bias is not None:
            logits += checkpoint.bias.float()
        return logits.to(x.device, dtype)

    def project_quantised(x: Tensor) -> Tensor:
        logits: Tensor = model.logits_processor(model.lm_head, x[0], model.lm_head.bias)[None]
        return logits

    projection, dtype = head.projection, head.projection_dtype(model.model_config.dtype)
    is_quantised = not compat.heads.shares_weight(model.lm_head)
    if checkpoint.projection is None and not is_quantised:
        raise LoadError(f"The checkpoint gave no weight for the projection {projection.name} of {head.name}.")
    weight = torch.empty(0) if checkpoint.projection is None else checkpoint.projection
    original = projection.project, projection.dtype, projection.device
    projection.project = project_quantised if is_quantised else project
    projection.dtype, projection.device = dtype, model.device_config.device
    try:
        yield
    finally:
        projection.project, projection.dtype, projection.device = original


def _check_sinks(model: Any, state: ModelState, name: str) -> None:
    if state.sinks is None or state.checkpoint is None:
        raise LoadError(f"vLLM built {name} without looking for attention sinks.")
    layers = compat.attention.attention_layers(model)
    for sink in state.sinks:
        if (given := state.checkpoint.sinks.get(sink.parameter_name)) is None:
            raise LoadError(f"The checkpoint gave no values for {sink.parameter_name} of {name}.")
        kernel = getattr(layers[sink.layer_index].impl, "sinks", None)
        expected = _slice_of_rank(model, sink, given)
        if kernel is None:
            raise LoadError(f"The attention layer {sink.layer_index} of {name} has no sink, but the checkpoint has.")
        if kernel.shape != expected.shape:
            raise LoadError(
                f"The attention layer {sink.layer_index} of {name} has a sink of {kernel.numel()} elements, but "
                f"{expected.numel()} query heads on this rank."
            )
        difference = (kernel.float().cpu() - expected.to(kernel.dtype).float()).abs().max()
        if not difference == 0:
            raise LoadError(
                f"The sinks in the attention layer {sink.layer_index} of {name} differ from the checkpoint's "
                f"{sink.parameter_name} by up to {difference:.3g}."
            )


def _slice_of_rank(model: Any, sink: Sink, given: Tensor) -> Tensor:
    """The elements of a sink for this rank's query heads, [heads]."""
    module, group = model.get_submodule(sink.module_name), model.tp_group
    heads = heads_of_rank(sink.module_name, module, sink.num_heads, group.rank_in_group, group.world_size)
    return given.flatten().narrow(0, heads.first, heads.query)
