# SPDX-License-Identifier: Apache-2.0
"""What vLLM has between hidden states and logits."""

from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def runs_own_heads() -> str:
    """Says that this vLLM runs a model's own ForCausalLM, or "": no version to 0.33 knows of these classes there."""
    from vllm.model_executor.models.transformers import causal

    return "vLLM runs the model's own head" if hasattr(causal, "AutoModelForCausalLM") else ""


def is_causal(model: Any) -> bool:
    """Whether a Transformers-backend model is built for a ForCausalLM, whether or not it computes logits."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    return isinstance(model, CausalMixin)


def is_pooling(model: Any) -> bool:
    """Whether a causal model is run for pooling, and computes no logits."""
    return bool(model.model_config.runner_type == "pooling")


def computes_logits(model: Any) -> bool:
    """Whether a Transformers-backend model computes logits, on this pipeline rank."""
    return is_causal(model) and not is_pooling(model) and bool(model.pp_group.is_last_rank)


def is_draft(model: Any) -> bool:
    """Whether `model` is the draft of another, whose `lm_head` it is given (from vLLM 0.33)."""
    return any(cls.__name__ == "MTPMixin" for cls in type(model).__mro__)


def owner_of_logits(model: Any) -> str:
    """The module whose function is `compute_logits` of a model's class, or "" where it is vLLM's own."""
    function = type(model).compute_logits
    plain = type(function) is FunctionType  # a proxy answers for what it wraps
    module: str = function.__globals__["__name__"] if plain else type(function).__module__
    return "" if module.startswith("vllm.") else module


def projects_without_gather() -> bool:
    """Whether the logits processor can leave each rank its shard of the logits (from vLLM 0.29)."""
    import inspect

    from vllm.model_executor.models.transformers.causal import LogitsProcessor

    return "skip_gather" in inspect.signature(LogitsProcessor.forward).parameters


def make_lm_head(model: Any, name: str, vocabulary: int, size: int, dtype: "torch.dtype", prefix: str = "") -> Any:
    """A projection [vocabulary, size] in `dtype`, sharded by vocabulary, on the model's device.

    It is quantised as the checkpoint's config says of the layer `name`.
    """
    import torch
    from vllm.model_executor.models.transformers.causal import ParallelLMHead  # another plugin's, where that put one
    from vllm.model_executor.models.utils import maybe_prefix

    with torch.device(model.device_config.device):  # loading is outside vLLM's own device context
        return ParallelLMHead(
            vocabulary,
            size,
            params_dtype=dtype,
            quant_config=model.quant_config,
            prefix=maybe_prefix(prefix, name),
        )


def missing_layer() -> Any:
    """What stands for a module that is on another pipeline rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return PPMissingLayer()


def shares_weight(layer: Any) -> bool:
    """Whether a projection can share a weight with the embeddings: a quantised layer does not hold it as it is.

    A quantisation method of another package may know how to tie its layers.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = layer.quant_method
    if isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return True
    return type(method).tie_weights is not QuantizeMethodBase.tie_weights
