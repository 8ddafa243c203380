# SPDX-License-Identifier: Apache-2.0
"""vLLM's names of weights, and its loading of weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_kept_in_float32(model: Any, name: str) -> bool:
    """Whether Transformers keeps the parameter `name` of its `model` in float32 in a model of any dtype.

    vLLM (from 0.28) does so only for parameters without a weight loader.
    """
    fragments = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(fragment in name for fragment in fragments)


def load_weights_of_base(model: Any, weights: Any) -> set[str]:
    """Load `weights` without `CausalMixin.load_weights`, which loads every `*lm_head.bias` into the projection."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    loaded: set[str] = super(CausalMixin, model).load_weights(weights)
    return loaded


def shards_columns(module: "torch.nn.Module") -> bool:
    """Whether a projection in `module` is column-parallel: a rank computes a part of its output."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    return any(isinstance(m, ColumnParallelLinear) and not m.gather_output for m in module.modules())


def copies_key_value_heads(module: "torch.nn.Module") -> bool:
    """Whether a fused projection in `module` copies key-value heads if there are fewer heads than ranks."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return any(isinstance(m, QKVParallelLinear) and not m.gather_output for m in module.modules())


def load_lm_head(model: Any) -> None:
    """Let `model` load the weights of its `lm_head`, which vLLM up to 0.28 skips in a tied model."""
    if "lm_head." in (skipped := getattr(model, "skip_prefixes", [])):
        skipped.remove("lm_head.")


def loader_is_ordinary(load_config: Any) -> bool:
    """Whether the loader of a load format inherits `load_model` of vLLM's base loader."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    return type(get_model_loader(load_config)).load_model is BaseModelLoader.load_model


def record_for_reload(module: "torch.nn.Module") -> None:
    """Record the state of a module before loading, from which a reload starts, for one made after its model."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(module)


def renaming_first(renaming: Any, mapper: Any) -> Any:
    """A WeightsMapper that applies `renaming.rename_source_key` first, and then `mapper`."""
    return type(mapper)(orig_to_new_renaming=[renaming]) | mapper


def names_without_plugin(model: Any, config: Any, names: list[str]) -> dict[str, str | None]:
    """The names that upstream vLLM gives to tensors of a checkpoint, by their names there; None if it ignores one.

    Args:
        model: the base model, as Transformers builds it from `config`.
        config: the config of the checkpoint.
        names: names of tensors of the checkpoint.
    """
    from vllm.model_executor.models.transformers.base import Base

    class Unbuilt:
        """Has the methods of the backend's `Base`, and only the attributes on which names depend."""

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
