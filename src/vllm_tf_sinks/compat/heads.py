# SPDX-License-Identifier: Apache-2.0
"""vLLM's code between hidden states and logits."""

from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def runs_own_heads() -> str:
    """A reason if this vLLM runs the ForCausalLM class of a model, or "". No version up to 0.34 does."""
    from vllm.model_executor.models.transformers import causal

    return "vLLM runs the model's own head" if hasattr(causal, "AutoModelForCausalLM") else ""


def is_causal(model: Any) -> bool:
    """Whether a Transformers-backend model is a causal language model. A pooling model may be one too."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    return isinstance(model, CausalMixin)


def is_pooling(model: Any) -> bool:
    """Whether a causal model serves pooling requests, and so computes no logits."""
    return bool(model.model_config.runner_type == "pooling")


def computes_logits(model: Any) -> bool:
    """Whether a Transformers-backend model computes logits on this pipeline rank."""
    return is_causal(model) and not is_pooling(model) and bool(model.pp_group.is_last_rank)


def is_draft(model: Any) -> bool:
    """Whether `model` is a draft, which gets the `lm_head` of its target (from vLLM 0.33)."""
    return any(cls.__name__ == "MTPMixin" for cls in type(model).__mro__)


def owner_of_logits(model: Any) -> str:
    """The Python module that defines `compute_logits` of a model's class, or "" if vLLM does."""
    function = type(model).compute_logits
    plain = type(function) is FunctionType  # a proxy has the attributes of the function that it wraps
    module: str = function.__globals__["__name__"] if plain else type(function).__module__
    return "" if module.startswith("vllm.") else module


def projects_without_gather() -> bool:
    """Whether the logits processor can return each rank's shard of the logits (from vLLM 0.29)."""
    import inspect

    from vllm.model_executor.models.transformers.causal import LogitsProcessor

    return "skip_gather" in inspect.signature(LogitsProcessor.forward).parameters


def make_lm_head(model: Any, name: str, vocabulary: int, size: int, dtype: "torch.dtype", prefix: str = "") -> Any:
    """Make a projection [vocabulary, size] in `dtype`, sharded by vocabulary, on the model's device.

    Its quantization is that of the layer `name` in the checkpoint's config.
    """
    import torch
    from vllm.model_executor.models.transformers.causal import ParallelLMHead  # another plugin may have replaced it
    from vllm.model_executor.models.utils import maybe_prefix

    with torch.device(model.device_config.device):  # vLLM's device context ends before loading
        return ParallelLMHead(
            vocabulary,
            size,
            params_dtype=dtype,
            quant_config=model.quant_config,
            prefix=maybe_prefix(prefix, name),
        )


def ties_embeddings(model: Any) -> bool:
    """Whether a Transformers-backend model ties its projection to its input embeddings."""
    return bool(model._get_tie_word_embeddings())


def add_bias(lm_head: Any) -> None:
    """Give a projection a bias, sharded by vocabulary."""
    lm_head._register_bias()


def gather(logits_processor: Any, logits: "torch.Tensor") -> "torch.Tensor | None":
    """Gather the logits [N, V] from the shards of all ranks; None on a rank that does not get them."""
    gathered: torch.Tensor | None = logits_processor._gather_logits(logits)
    return gathered


def missing_layer() -> Any:
    """Make vLLM's placeholder for a module of another pipeline rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return PPMissingLayer()


def shares_weight(layer: Any) -> bool:
    """Whether a layer can share its weight between embeddings and projection; a quantised layer cannot.

    The quantization method of another package may implement `tie_weights` for its layers.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = layer.quant_method
    if isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return True
    return type(method).tie_weights is not QuantizeMethodBase.tie_weights
