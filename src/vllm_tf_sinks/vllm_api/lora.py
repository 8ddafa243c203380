# SPDX-License-Identifier: Apache-2.0
"""vLLM's LoRA on the projection to the vocabulary."""

from typing import Any

from vllm_tf_sinks.vllm_api import heads

LARGEST_VOCABULARY = 258_048  # LoRA starts with no larger projection


def has_adapters(model: Any) -> bool:
    """Whether a model computes logits and is served with LoRA adapters."""
    return model.vllm_config.lora_config is not None and not heads.is_pooling(model)


def refusal_of_output_adapters(model: Any, vocabulary: int) -> str:
    """Why LoRA cannot adapt the projection of a model to its vocabulary, or ""."""
    if hasattr(model, "get_mm_mapping"):
        return "LoRA adapts a multimodal model's language model only, and vLLM's lm_head is outside it"
    if vocabulary > LARGEST_VOCABULARY:
        return f"LoRA adapts no projection to more than {LARGEST_VOCABULARY} tokens"
    if model.vllm_config.speculative_config is not None and _counts_on_one_row(model.vllm_config):
        return "LoRA in vLLM's model runner v2 counts on one row a request, and speculative decoding has more"
    targets = model.vllm_config.lora_config.target_modules
    if targets is not None and "lm_head" not in targets:
        return f"this engine was started for adapters of {', '.join(targets)} only, lm_head not among them"
    return ""


def _counts_on_one_row(vllm_config: Any) -> bool:
    """Whether LoRA takes each request to have one row of logits, as in model runner v2 up to vLLM 0.33."""
    import inspect

    if not getattr(vllm_config, "use_v2_model_runner", True):  # vLLM 0.34 has no other
        return False
    from vllm.v1.worker.gpu.lora_utils import LoraState

    return "num_logits" not in inspect.signature(LoraState.make_lora_inputs).parameters


def with_output_embeddings(embedding_modules: Any, name: str) -> Any:
    """A model's `embedding_modules` with those of the output: a list up to vLLM 0.30, a mapping since."""
    if isinstance(embedding_modules, dict):
        return {**embedding_modules, name: "output_embeddings"}
    return [*embedding_modules, name]


def adapts_by_name_alone() -> bool:
    """Whether LoRA goes by the names of modules alone, whatever they are (up to vLLM 0.28)."""
    import inspect

    from vllm.lora.utils import is_supported_lora_module

    return "module" not in inspect.signature(is_supported_lora_module).parameters


def leaves_unadapted_rows() -> str:
    """Says that LoRA leaves rows without an adapter alone, as GPU kernels do, and the CPU's from vLLM 0.33, or ""."""
    from vllm.lora.ops.torch_ops import bgmv_expand
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "these are kernels of the CPU"
    return "vLLM masks these rows" if "no_lora_mask" in bgmv_expand.__code__.co_varnames else ""
