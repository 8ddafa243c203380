# SPDX-License-Identifier: Apache-2.0
"""Install the output head of a model's ForCausalLM class in vLLM's model of the Transformers backend."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head import lora
from vllm_tf_sinks.lm_head import weights as head_weights
from vllm_tf_sinks.lm_head.build import Head, build_head, causal_lm_class, tied_to
from vllm_tf_sinks.lm_head.classify import Kind, classify, eager_spec
from vllm_tf_sinks.lm_head.run import connect, keeps_shards, local_logits_function, logits_function
from vllm_tf_sinks.model_state import BuildStep, state_of
from vllm_tf_sinks.repairs.positions import shift_positions

logger = logging.getLogger("vllm.tf_sinks")


def init_with_head(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `CausalMixin.__init__`, to build, classify and connect the output head of the model after it.

    Raises:
        HeadError: naming the ForCausalLM class, if vLLM cannot run its head.
        ValueError: naming the model, if it is a draft whose attention layers have the names of its target's.
    """

    @wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        compat.attention.check_layer_names(vllm_config)
        compat.engine.use_config_of_transformers(vllm_config.model_config)
        compat.engine.count_draft_layers(vllm_config.model_config)
        original(self, vllm_config=vllm_config, prefix=prefix)
        state_of(self).enter(BuildStep.HEAD)
        self.requires_grad_(False)  # otherwise vLLM's in-place reload raises
        if _has_own_head(self):
            _install(self, prefix)

    return __init__


def ties_as_transformers(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `Base._get_tie_word_embeddings`, to return True only if the ForCausalLM class ties its projection.

    The config of two classes of Transformers sets `tie_word_embeddings`, but they do not tie.

    Raises:
        HeadError: naming the class, if it ties its projection to quantised embeddings.
    """

    @wraps(original)
    def _get_tie_word_embeddings(self: Any) -> bool:
        tie = original(self)
        if tie and _has_own_head(self):
            head = _get_head(self)
            tie = tied_to(head.model, f"{head.projection.name}.weight") is not None
            if tie:
                _check_tie_unquantised(head, self.model.get_input_embeddings(), "the embeddings")
        return tie

    return _get_tie_word_embeddings


def load_with_head(original: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Wrap `CausalMixin.load_weights`, to load the head's tensors too. See `weights.load` for its errors."""

    @wraps(original)
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if (names := state_of(self).names) is None:
            return original(self, weights)
        renamed = head_weights.renamed(weights, names)
        if compat.heads.is_pooling(self) or not self.pp_group.is_last_rank:
            return original(self, renamed)
        return head_weights.load(self, renamed, original)

    return load_weights


def _has_own_head(model: Any) -> bool:
    """Whether a model has the head of a ForCausalLM class; a draft gets the head of its target."""
    if not compat.heads.is_causal(model) or compat.heads.is_draft(model):
        return False
    try:
        _get_head(model)
    except HeadError:
        if compat.heads.is_pooling(model):  # which needs no head
            return False
        with hooks.notifying_refusal(model, "head"):
            raise
    return True


def _get_head(model: Any) -> Head:
    """The head of `model`, built by the first call: vLLM asks about tying before the model is complete."""
    state = state_of(model)
    if state.head is None:
        config, options = model.config, model.model_config
        with _with_advice():
            cls = causal_lm_class(
                config,
                options.trust_remote_code,
                revision=options.revision,
                code_revision=options.code_revision,
            )
            state.head = build_head(cls, config, model.model)
    return state.head


@contextmanager
def _with_advice() -> Iterator[None]:
    """Append to a HeadError how to serve the model without its head."""
    try:
        yield
    except HeadError as error:
        raise HeadError(
            f"{error}. VLLM_TF_SINKS=sinks leaves the output head to vLLM, which runs it as a plain lm_head: "
            "check its logprobs."
        ) from error


def _install(model: Any, prefix: str) -> None:
    head, state = _get_head(model), state_of(model)
    state.is_tied = compat.heads.ties_embeddings(model)
    if state.is_tied:  # then the projection has the size of the embeddings, even if the class built a smaller one
        head.projection.out_features = max(head.projection.out_features, model.text_config.vocab_size)
    if head.base_built_with.get("add_pooling_layer") is False and hasattr(model.model, "pooler"):
        model.model.pooler = None  # the ForCausalLM has no pooler, nor has its checkpoint
    is_adapted = compat.lora.has_adapters(model) and lora.map_adapters(model, head)
    shift_positions(model)
    head_weights.narrow_ignored_weights(model)
    embedding = _name_of_embeddings(model.model)
    if compat.heads.is_pooling(model) or not model.pp_group.is_last_rank:
        state.names = head_weights.Names(head, eager_spec(head), state.is_tied, embedding)
        setattr(model, head_weights.MODULE, compat.heads.missing_layer())
        return
    with hooks.notifying_refusal(model, "head"), _with_advice():
        spec = classify(head, model.text_config.hidden_size)
    if head.projection.out_features < model.text_config.vocab_size:
        spec = replace(spec, kind=Kind.FULL)  # a full head pads its logits to the sampler's vocabulary
    state.names = head_weights.Names(head, spec, state.is_tied, embedding)
    _fit_projection(model, head, prefix)
    if head_weights.materialise(head, spec, model.model_config.dtype, model.device_config.device):
        setattr(model, head_weights.MODULE, head.model)
    if spec.kind is not Kind.PROJECTION:
        connect(head, model)
        model.compute_logits = logits_function(model, head, spec)
    if spec.kind is not Kind.FULL and keeps_shards(model):
        model.compute_logits_local = local_logits_function(model, spec)
    if is_adapted:
        model.compute_logits = lora.with_prompt_rows(model, model.compute_logits)
    logger.info("%s: output head: %s", head.name, spec.describe())
    hooks.plugins().notify(hooks.Decision(type(model.model).__name__, "head", spec.describe()))


def _name_of_embeddings(base: Any) -> str:
    """The name of the input embeddings' weight in the base model, or ""."""
    embeddings = base.get_input_embeddings()
    return next((f"{name}.weight" for name, module in base.named_modules() if module is embeddings), "")


def _check_tie_unquantised(head: Head, layer: Any, name: str) -> None:
    """Check that `layer`, the embeddings or the projection that is tied to them, is not quantised.

    Raises:
        HeadError: if it is, since a quantised layer has no weight to share.
    """
    for module in layer.modules():
        if hasattr(module, "quant_method") and not compat.heads.shares_weight(module):
            raise HeadError(
                f"{head.name} ties its projection {head.projection.name} to its input embeddings, but the quantization "
                f"config of the checkpoint quantises {name} ({type(module.quant_method).__name__}). Exclude "
                "that layer in the config, or set tie_word_embeddings=false for a checkpoint that has both weights."
            )


def _fit_projection(model: Any, head: Head, prefix: str) -> None:
    """Give vLLM's `lm_head` the sizes, the dtype and the bias of the head's projection, and its quantization."""
    projection, config = head.projection, model.text_config
    float32 = head.keeps_in_float32(f"{projection.name}.weight") and model.model_config.dtype != torch.float32
    sizes = (projection.out_features, projection.in_features)
    has_other_name = model.quant_config is not None and projection.name != head_weights.PROJECTION
    if state_of(model).is_tied:
        _check_tie_unquantised(head, model.lm_head, projection.name)
    elif float32 or has_other_name or sizes != (config.vocab_size, config.hidden_size):
        dtype = torch.float32 if float32 else model.model_config.dtype
        model.lm_head = compat.heads.make_lm_head(model, projection.name, *sizes, dtype, prefix)
        if float32:
            model.logits_processor.head_dtype = torch.float32
    model.logits_processor.org_vocab_size = model.logits_processor.vocab_size = projection.out_features
    # The head's own code applies these fields of the config, or Transformers ignores them
    model.logits_processor.scale, model.logits_processor.soft_cap = 1.0, None
    if projection.has_bias and model.lm_head.bias is None:
        compat.heads.add_bias(model.lm_head)
