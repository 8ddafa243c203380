# SPDX-License-Identifier: Apache-2.0
"""Run a head: what `compute_logits` of a model becomes."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.head.build import Head
from vllm_tf_sinks.head.classify import Kind, Plan
from vllm_tf_sinks.head.standin import HeadError


def connect(head: Head, model: Any) -> None:
    """Let the head's projection be vLLM's, as the model holds it at each call: LoRA and drafts replace it."""

    def project(x: Tensor) -> Tensor:
        return _logits(model.logits_processor(model.lm_head, x[0], model.lm_head.bias))[None]

    head.projection.project = project
    head.projection.dtype = head.projection_dtype(model.model_config.dtype)
    head.projection.device = model.device_config.device


def logits_function(model: Any, head: Head, plan: Plan) -> Callable[..., Tensor | None]:
    """`compute_logits` for a head that is more than a projection.

    Returns:
        A function of hidden states [N, H] on this rank to logits [N, V], writable, the same on all ranks.

    Raises:
        HeadError: if the head needs all logits of a row, but this platform gathers them on one rank only; or if
            another plugin's `compute_logits` would be passed over.
    """
    if module := vllm_api.heads.owner_of_logits(model):
        raise HeadError(
            f"{head.name} computes its own logits, and would pass over the compute_logits that {module} has put into "
            f"{type(model).__name__}. Turn that off, or this plugin's heads: VLLM_TF_SINKS=sinks."
        )
    if plan.kind is Kind.ELEMENTWISE:
        return _elementwise(model, plan)
    if model.tp_group.world_size > 1 and not model.logits_processor.use_all_gather:
        raise HeadError(f"{head.name} needs all logits of a row, which this platform gathers on the first rank only.")
    return _whole(model, head, plan)


def keeps_shards(model: Any) -> bool:
    """Whether each rank can be left its shard of the logits: the logits processor that LoRA puts in gathers them."""
    return vllm_api.heads.projects_without_gather() and not vllm_api.lora.has_adapters(model)


def local_logits_function(model: Any, plan: Plan) -> Callable[..., Tensor]:
    """`compute_logits_local`, by which vLLM samples each rank's share of a batch: for any plan but the whole.

    Returns:
        A function of hidden states [N, H] to this rank's shard of the logits, all that the head does applied.
    """
    before, after = plan.before or _same, plan.after or _same

    def compute_logits_local(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        processor, lm_head = model.logits_processor, model.lm_head
        return after(_logits(processor(lm_head, before(hidden_states), lm_head.bias, skip_gather=True)))

    return compute_logits_local


def _elementwise(model: Any, plan: Plan) -> Callable[..., Tensor | None]:
    before, after = plan.before or _same, plan.after or _same
    compute_logits_local = local_logits_function(model, plan)

    def compute_logits(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | None:
        processor, lm_head = model.logits_processor, model.lm_head
        logits = processor(lm_head, before(hidden_states), lm_head.bias)
        return logits if logits is None else after(_logits(logits))

    def compute_sharded_logits(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | None:
        processor = model.logits_processor
        logits = processor._gather_logits(compute_logits_local(hidden_states))
        return logits if logits is None else logits[..., : processor.org_vocab_size]

    sharded = model.tp_group.world_size > 1 and keeps_shards(model)
    return compute_sharded_logits if sharded else compute_logits


def _whole(model: Any, head: Head, plan: Plan) -> Callable[..., Tensor]:
    before, after, project = plan.before or _same, plan.after or _same, head.projection.project
    vocabulary = model.text_config.vocab_size

    def compute_flat(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return _padded(after(project(before(hidden_states[None])))[0], vocabulary)

    def compute_as_written(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return _padded(head.as_written(hidden_states[None])[0], vocabulary)

    return compute_flat if plan.flat else compute_as_written


def _logits(projected: Tensor) -> Tensor:
    """What vLLM's logits processor gave, if it is logits: FlashHead lets it give tokens, for single rows.

    Raises:
        HeadError: if it is not.
    """
    if projected.is_floating_point():
        return projected
    raise HeadError(
        "An output head that is more than a projection needs logits, but another plugin lets LogitsProcessor give "
        f"{projected.dtype} numbers. Turn that plugin off, or this one's heads: VLLM_TF_SINKS=sinks."
    )


def _padded(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits over the vocabulary that vLLM expects: a head may cut off tokens that are never predicted."""
    missing = vocabulary - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits


def _same(x: Tensor) -> Tensor:
    return x
