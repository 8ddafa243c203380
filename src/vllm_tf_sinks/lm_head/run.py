# SPDX-License-Identifier: Apache-2.0
"""Run a head: the functions that replace `compute_logits` and `compute_logits_local` of a model."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vllm_tf_sinks import compat
from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head.build import Head
from vllm_tf_sinks.lm_head.classify import HeadSpec, Kind


def connect(head: Head, model: Any) -> None:
    """Connect the head's projection to vLLM's `lm_head`, which is read at each call: LoRA and drafts replace it."""

    def project(x: Tensor) -> Tensor:
        return _logits(model.logits_processor(model.lm_head, x[0], model.lm_head.bias))[None]

    head.projection.project = project
    head.projection.dtype = head.projection_dtype(model.model_config.dtype)
    head.projection.device = model.device_config.device


def logits_function(model: Any, head: Head, spec: HeadSpec) -> Callable[..., Tensor | None]:
    """Make `compute_logits` for a head that is more than a projection.

    Returns:
        A function of hidden states [N, H] on this rank to logits [N, V], which are writable and the same on all ranks.

    Raises:
        HeadError: naming the class, if it needs all logits of a row, but this platform gathers them on one rank only;
            or if another plugin has replaced `compute_logits`.
    """
    if module := compat.heads.owner_of_logits(model):
        raise HeadError(
            f"{head.name} needs a compute_logits of its own, but {module} has already replaced the one of "
            f"{type(model).__name__}. Turn off that plugin, or the heads of this one: VLLM_TF_SINKS=sinks."
        )
    if spec.kind is Kind.ELEMENTWISE:
        return _elementwise(model, spec)
    if model.tp_group.world_size > 1 and not model.logits_processor.use_all_gather:
        raise HeadError(
            f"{head.name} needs all logits of a row, but this platform gathers them on the first rank only. Set "
            "tensor_parallel_size to 1."
        )
    return _full(model, head, spec)


def keeps_shards(model: Any) -> bool:
    """Whether each rank can keep its shard of the logits; LoRA's logits processor always gathers them."""
    return compat.heads.projects_without_gather() and not compat.lora.has_adapters(model)


def local_logits_function(model: Any, spec: HeadSpec) -> Callable[..., Tensor]:
    """Make `compute_logits_local`, by which vLLM samples each rank's share of a batch, for a head that is not full.

    Returns:
        A function of hidden states [N, H] to this rank's shard of the head's logits.
    """
    before, after = spec.before or _identity, spec.after or _identity

    def compute_logits_local(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        processor, lm_head = model.logits_processor, model.lm_head
        return after(_logits(processor(lm_head, before(hidden_states), lm_head.bias, skip_gather=True)))

    return compute_logits_local


def _elementwise(model: Any, spec: HeadSpec) -> Callable[..., Tensor | None]:
    before, after = spec.before or _identity, spec.after or _identity
    compute_logits_local = local_logits_function(model, spec)

    def compute_logits(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | None:
        processor, lm_head = model.logits_processor, model.lm_head
        logits = processor(lm_head, before(hidden_states), lm_head.bias)
        return logits if logits is None else after(_logits(logits))

    def compute_sharded_logits(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | None:
        processor = model.logits_processor
        logits = compat.heads.gather(processor, compute_logits_local(hidden_states))
        return logits if logits is None else logits[..., : processor.org_vocab_size]

    sharded = model.tp_group.world_size > 1 and keeps_shards(model)
    return compute_sharded_logits if sharded else compute_logits


def _full(model: Any, head: Head, spec: HeadSpec) -> Callable[..., Tensor]:
    before, after, project = spec.before or _identity, spec.after or _identity, head.projection.project
    vocabulary = model.text_config.vocab_size

    def compute_traced(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return _padded(after(project(before(hidden_states[None])))[0], vocabulary)

    def compute_eagerly(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return _padded(head.run_eagerly(hidden_states[None])[0], vocabulary)

    return compute_traced if spec.is_traced else compute_eagerly


def _logits(projected: Tensor) -> Tensor:
    """Return the output of vLLM's logits processor, after a check that it is logits.

    Raises:
        HeadError: if it is token ids, which the plugin FlashHead returns for single rows.
    """
    if projected.is_floating_point():
        return projected
    raise HeadError(
        "An output head that is more than a projection needs logits, but another plugin lets LogitsProcessor return "
        f"{projected.dtype} values. Turn off that plugin, or the heads of this one: VLLM_TF_SINKS=sinks."
    )


def _padded(logits: Tensor, vocabulary: int) -> Tensor:
    """Pad logits with -inf to the vocabulary that vLLM expects: a head may omit tokens that it never predicts."""
    missing = vocabulary - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits


def _identity(x: Tensor) -> Tensor:
    return x
