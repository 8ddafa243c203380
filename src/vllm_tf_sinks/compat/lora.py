# SPDX-License-Identifier: Apache-2.0
"""vLLM's LoRA on the projection to the vocabulary."""

from typing import Any

from vllm_tf_sinks.compat import heads

LARGEST_VOCABULARY = 258_048  # vLLM refuses LoRA on a larger projection


def has_adapters(model: Any) -> bool:
    """Whether a model is served with LoRA adapters, and not for pooling."""
    return model.vllm_config.lora_config is not None and not heads.is_pooling(model)


def refusal_of_output_adapters(model: Any, vocabulary: int) -> str:
    """A reason if vLLM's LoRA cannot adapt the projection of a model to its vocabulary, or ""."""
    if hasattr(model, "get_mm_mapping"):
        return "vLLM's LoRA adapts only the language model of a multimodal model, and lm_head is outside it"
    if vocabulary > LARGEST_VOCABULARY:
        return f"vLLM's LoRA adapts no projection to more than {LARGEST_VOCABULARY} tokens"
    if model.vllm_config.speculative_config is not None and _expects_one_row(model.vllm_config):
        return "LoRA in vLLM's model runner v2 expects one row of logits per request, but speculative decoding has more"
    targets = model.vllm_config.lora_config.target_modules
    if targets is not None and "lm_head" not in targets:
        return f"this engine was started for adapters of {', '.join(targets)} only, without lm_head"
    return ""


def current_mapping(manager: Any) -> Any:
    """The mapping of the current batch's rows to adapters in a LoRA manager; None before the first batch."""
    return manager._last_mapping


def _expects_one_row(vllm_config: Any) -> bool:
    """Whether LoRA expects one row of logits per request, as in model runner v2 up to vLLM 0.33."""
    import inspect

    if not getattr(vllm_config, "use_v2_model_runner", True):  # vLLM 0.34 has no other runner
        return False
    from vllm.v1.worker.gpu.lora_utils import LoraState

    return "num_logits" not in inspect.signature(LoraState.make_lora_inputs).parameters


def with_output_embeddings(embedding_modules: Any, name: str) -> Any:
    """A model's `embedding_modules` with the module `name` added: a list up to vLLM 0.30, a dict since then."""
    if isinstance(embedding_modules, dict):
        return {**embedding_modules, name: "output_embeddings"}
    return [*embedding_modules, name]


def adapts_by_name_alone() -> bool:
    """Whether LoRA selects modules by their names alone, for all classes of modules (up to vLLM 0.28)."""
    import inspect

    from vllm.lora.utils import is_supported_lora_module

    return "module" not in inspect.signature(is_supported_lora_module).parameters


def leaves_unadapted_rows() -> str:
    """A reason if LoRA's kernels do not change rows without an adapter, or "".

    Those of GPUs do not, nor do those of CPUs from vLLM 0.33.
    """
    from vllm.lora.ops.torch_ops import bgmv_expand
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "this platform is not a CPU"
    return "vLLM masks these rows" if "no_lora_mask" in bgmv_expand.__code__.co_varnames else ""
