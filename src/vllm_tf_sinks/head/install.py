# SPDX-License-Identifier: Apache-2.0
"""Give a model of vLLM's Transformers backend its own output head."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from vllm_tf_sinks import hooks, vllm_api
from vllm_tf_sinks.head import lora
from vllm_tf_sinks.head import weights as head_weights
from vllm_tf_sinks.head.build import Head, build_head, causal_lm_class, tied_to
from vllm_tf_sinks.head.classify import Kind, as_written, classify
from vllm_tf_sinks.head.positions import shift_positions
from vllm_tf_sinks.head.run import connect, keeps_shards, local_logits_function, logits_function
from vllm_tf_sinks.head.standin import HeadError
from vllm_tf_sinks.model_state import state_of

logger = logging.getLogger("vllm.tf_sinks")


def init_with_head(original: Callable[..., None]) -> Callable[..., None]:
    """`CausalMixin.__init__`, which also builds, classifies and connects the model's own head."""

    @wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        vllm_api.attention.check_layer_names(vllm_config)
        vllm_api.engine.use_config_of_transformers(vllm_config.model_config)
        vllm_api.engine.count_draft_layers(vllm_config.model_config)
        original(self, vllm_config=vllm_config, prefix=prefix)
        self.requires_grad_(False)  # or vLLM's in-place reload raises
        if _has_own_head(self):
            _install(self, prefix)

    return __init__


def ties_as_transformers(original: Callable[..., bool]) -> Callable[..., bool]:
    """`Base._get_tie_word_embeddings`, which also asks whether the ForCausalLM class ties its projection.

    Two classes of Transformers declare `tie_word_embeddings` without effect.
    """

    @wraps(original)
    def _get_tie_word_embeddings(self: Any) -> bool:
        tie = original(self)
        if tie and _has_own_head(self):
            head = _head_of(self)
            tie = tied_to(head.model, f"{head.projection.name}.weight") is not None
            if tie:
                _refuse_quantised_tie(head, self.model.get_input_embeddings(), "the embeddings")
        return tie

    return _get_tie_word_embeddings


def load_with_head(original: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """`CausalMixin.load_weights`, which also loads what belongs to the head."""

    @wraps(original)
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if (names := state_of(self).names) is None:
            return original(self, weights)
        renamed = head_weights.renamed(weights, names)
        if vllm_api.heads.is_pooling(self) or not self.pp_group.is_last_rank:
            return original(self, renamed)
        return head_weights.load(self, renamed, original)

    return load_weights


def _has_own_head(model: Any) -> bool:
    """Whether a model is built for a ForCausalLM of its own: a draft is given the head of another."""
    if not vllm_api.heads.is_causal(model) or vllm_api.heads.is_draft(model):
        return False
    try:
        _head_of(model)
    except HeadError:
        if vllm_api.heads.is_pooling(model):  # it does without
            return False
        with hooks.telling_refusal(model, "head"):
            raise
    return True


def _head_of(model: Any) -> Head:
    """The head of `model`, built when first asked for: tying is asked for before the model is complete."""
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
    """Say in a HeadError how to go on without the plugin's head."""
    try:
        yield
    except HeadError as error:
        raise HeadError(
            f"{error}. VLLM_TF_SINKS=sinks leaves the output head to vLLM, which takes it for a plain lm_head: "
            "check its logprobs."
        ) from error


def _install(model: Any, prefix: str) -> None:
    head, state = _head_of(model), state_of(model)
    state.is_tied = model._get_tie_word_embeddings()
    if state.is_tied:  # the projection is then as wide as the embeddings, whatever the class built
        head.projection.out_features = max(head.projection.out_features, model.text_config.vocab_size)
    if head.base_built_with.get("add_pooling_layer") is False and hasattr(model.model, "pooler"):
        model.model.pooler = None  # the ForCausalLM has none, and so no weights for it
    is_adapted = vllm_api.lora.has_adapters(model) and lora.take_adapters(model, head)
    shift_positions(model)
    head_weights.keep_own_weights(model)
    embedding = _name_of_embeddings(model.model)
    if vllm_api.heads.is_pooling(model) or not model.pp_group.is_last_rank:
        state.names = head_weights.Names(head, as_written(head), state.is_tied, embedding)
        setattr(model, head_weights.MODULE, vllm_api.heads.missing_layer())
        return
    with hooks.telling_refusal(model, "head"), _with_advice():
        plan = classify(head, model.text_config.hidden_size)
    if head.projection.out_features < model.text_config.vocab_size:
        plan = replace(plan, kind=Kind.WHOLE)  # which pads logits to the vocabulary that the sampler counts on
    state.names = head_weights.Names(head, plan, state.is_tied, embedding)
    _fit_projection(model, head, prefix)
    if head_weights.materialise(head, plan, model.model_config.dtype, model.device_config.device):
        setattr(model, head_weights.MODULE, head.model)
    if plan.kind is not Kind.PROJECTION:
        connect(head, model)
        model.compute_logits = logits_function(model, head, plan)
    if plan.kind is not Kind.WHOLE and keeps_shards(model):
        model.compute_logits_local = local_logits_function(model, plan)
    if is_adapted:
        model.compute_logits = lora.with_prompt_rows(model, model.compute_logits)
    logger.info("%s: output head: %s", head.name, plan.describe())
    hooks.plugins().tell(hooks.Decision(type(model.model).__name__, "head", plan.describe()))


def _name_of_embeddings(base: Any) -> str:
    """The name of the input embeddings' weight in the base model, or ""."""
    embeddings = base.get_input_embeddings()
    return next((f"{name}.weight" for name, module in base.named_modules() if module is embeddings), "")


def _refuse_quantised_tie(head: Head, layer: Any, name: str) -> None:
    """Check that `layer`, one end of the tie between embeddings and projection, has a weight to share.

    Raises:
        HeadError: if it is quantised.
    """
    for module in layer.modules():
        if hasattr(module, "quant_method") and not vllm_api.heads.shares_weight(module):
            raise HeadError(
                f"{head.name} ties its projection {head.projection.name} to its input embeddings, but the quantization "
                f"config of the checkpoint quantises {name} ({type(module.quant_method).__name__}). Exclude "
                "that layer in the config, or set tie_word_embeddings=false for a checkpoint that has both weights."
            )


def _fit_projection(model: Any, head: Head, prefix: str) -> None:
    """Make vLLM's `lm_head` what the head's projection is: its name in a quantization config, sizes, dtype, bias."""
    projection, config = head.projection, model.text_config
    float32 = head.keeps_in_float32(f"{projection.name}.weight") and model.model_config.dtype != torch.float32
    sizes = (projection.out_features, projection.in_features)
    renamed = model.quant_config is not None and projection.name != head_weights.PROJECTION
    if state_of(model).is_tied:
        _refuse_quantised_tie(head, model.lm_head, projection.name)
    elif float32 or renamed or sizes != (config.vocab_size, config.hidden_size):
        dtype = torch.float32 if float32 else model.model_config.dtype
        model.lm_head = vllm_api.heads.make_lm_head(model, projection.name, *sizes, dtype, prefix)
        if float32:
            model.logits_processor.head_dtype = torch.float32
    model.logits_processor.org_vocab_size = model.logits_processor.vocab_size = projection.out_features
    # Fields of the config that the head's own code honours, or Transformers ignores
    model.logits_processor.scale, model.logits_processor.soft_cap = 1.0, None
    if projection.has_bias and model.lm_head.bias is None:
        model.lm_head._register_bias()
