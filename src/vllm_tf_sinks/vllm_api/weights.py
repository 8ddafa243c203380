# SPDX-License-Identifier: Apache-2.0
"""How vLLM names and loads weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_kept_in_float32(model: Any, name: str) -> bool:
    """Whether Transformers keeps the parameter `name` of its `model` in float32 in a model of any dtype.

    vLLM's own rule (from 0.28) passes over parameters that have a weight loader.
    """
    fragments = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(fragment in name for fragment in fragments)


def load_weights_of_base(model: Any, weights: Any) -> set[str]:
    """Load `weights` as a model without `CausalMixin` would: that mistakes any `*lm_head.bias` for its own."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    loaded: set[str] = super(CausalMixin, model).load_weights(weights)
    return loaded


def load_lm_head(model: Any) -> None:
    """Let `model` load weights of its `lm_head`, which vLLM up to 0.28 skips in a tied model."""
    if "lm_head." in (skipped := getattr(model, "skip_prefixes", [])):
        skipped.remove("lm_head.")


def loader_is_ordinary(load_config: Any) -> bool:
    """Whether the loader of a load format loads a model as vLLM's base loader does, step by step."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    return type(get_model_loader(load_config)).load_model is BaseModelLoader.load_model


def record_for_reload(module: "torch.nn.Module") -> None:
    """Note what a module that was made after its model looks like before it is loaded: a reload starts from there."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(module)


def renaming_first(renaming: Any, mapper: Any) -> Any:
    """A WeightsMapper that renames by the `rename_source_key` of `renaming`, and then as `mapper` does."""
    return type(mapper)(orig_to_new_renaming=[renaming]) | mapper


def names_by_itself(model: Any, config: Any, names: list[str]) -> dict[str, str | None]:
    """What vLLM calls tensors of a checkpoint without us, by their names there; None is passed over.

    Args:
        model: the base model, as Transformers builds it from `config`.
    """
    from vllm.model_executor.models.transformers.base import Base

    class Unbuilt:
        """Has the methods of a model of the backend, and of its attributes what names depend on."""

        hf_to_vllm_mapper: Any = None
        quant_config = None

        def __init__(self) -> None:
            self.model, self.config = model, config

        def __getattr__(self, name: str) -> Any:
            return getattr(Base, name).__get__(self)

    unbuilt = Unbuilt()
    unbuilt._create_hf_to_vllm_mapper()
    mapper: Any = unbuilt.hf_to_vllm_mapper
    return {name: next(iter(mapper.apply_list([name])), None) for name in names}
