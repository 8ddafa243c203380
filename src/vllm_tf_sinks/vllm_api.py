# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that differs between the supported versions, probed, in one place.

Importing this module imports nothing of vLLM; each function imports what it asks about.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_tf_sinks.swap import swapped

if TYPE_CHECKING:
    import torch

BACKEND = "vllm.model_executor.models.transformers"
LARGEST_VOCABULARY_OF_ADAPTERS = 258_048  # LoRA starts with no larger projection
SUPPORTED = ">=0.27.1,<0.34"


def version() -> str:
    """The version of the vLLM that this process runs."""
    from vllm.version import __version__

    return str(__version__)


def unsupported_version() -> str:
    """Why this vLLM is outside the supported range, or ""."""
    from packaging.specifiers import SpecifierSet  # slow to import, and not needed by register()
    from packaging.version import Version

    if version() == "dev" or Version(version()).base_version in SpecifierSet(SUPPORTED, prereleases=True):
        return ""
    return f"vLLM {version()} is outside the supported range {SUPPORTED}"


def device() -> str:
    """What this vLLM runs on.

    Raises:
        RuntimeError: if it finds nothing that it runs on.
    """
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise RuntimeError("this build of vLLM supports none of this machine's")
    if current_platform.is_cpu():
        return "CPU"
    capability = current_platform.get_device_capability()
    suffix = f", compute capability {capability.as_version_str()}" if capability else ""
    return f"{current_platform.get_device_name()}{suffix}"


def declare_variable(name: str, value: Callable[[], str]) -> None:
    """Make an environment variable known to vLLM.

    vLLM then does not warn about it, hands it to Ray workers, and makes `value()` part of the key
    of its compile cache.
    """
    from vllm import envs

    envs.environment_variables[name] = value


def layers_take_sinks() -> str:
    """Says that this vLLM finds plain sinks itself and raises where one did not reach its layer, or ""."""
    import vllm.model_executor.models.transformers as backend

    return "vLLM checks sinks itself" if hasattr(backend, "check_sinks") else ""


def no_mla_function() -> str:
    """Says that there is no MLA attention function to guard, or ""."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "vllm_mla" not in ALL_ATTENTION_FUNCTIONS:
        return "this vLLM has no MLA in the Transformers backend"
    return layers_take_sinks()


@contextmanager
def attention_layers_built_by(build: Callable[..., Any]) -> Iterator[None]:
    """Within the context the Transformers backend builds `Attention(**kw)` as `build(Attention, **kw)`."""
    from vllm.model_executor.models.transformers import base

    def builder(layer_class: type) -> Callable[..., Any]:
        return lambda **kwargs: build(layer_class, **kwargs)

    names = ("Attention", "EncoderOnlyAttention")
    with swapped(vars(base), {name: builder(getattr(base, name)) for name in names}):
        yield


def attention_attribute() -> str:
    """The attribute of a Transformers attention module that holds its vLLM attention layer."""
    return "attn"


def sink_dtype(backend_name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype in which an attention backend reads sinks of a model that has them in `dtype`.

    FlashInfer reads float32, and copies what is not. The CPU kernel reads bfloat16 only up to vLLM
    0.30, and bfloat16 or float32 since. Other backends read the parameter as it is.
    """
    import torch

    if backend_name == "FLASHINFER":
        return torch.float32
    if backend_name != "CPU_ATTN" or dtype == torch.bfloat16:
        return dtype
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    takes_float32 = "float32" in CPUAttentionBackendImpl.forward.__code__.co_names
    return torch.float32 if takes_float32 else torch.bfloat16


def misread_cache(model: Any) -> str:
    """The dtype of a KV cache that ordinary attention on the CPU would misread, or "".

    Its kernels take the dtypes that the backend names. Anything else they read as if it were the model's
    dtype, which is right only where that has the same size. Other platforms choose a backend by it, and
    vLLM 0.33 refuses it.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or model.model_config.use_mla:
        return ""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    name: str = model.cache_config.cache_dtype
    dtype = getattr(torch, name, None)
    fits = isinstance(dtype, torch.dtype) and dtype.itemsize == model.model_config.dtype.itemsize
    return "" if fits or name in CPUAttentionBackend.supported_kv_cache_dtypes else name


def forget_mla_block_size(cache_config: Any) -> None:
    """Undo the block size that the CPU platform sets for MLA, which its ordinary attention does not take.

    Other platforms choose the block size after the model is built.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and cache_config.block_size % 32:
        cache_config.block_size = 128


def backends_with_sinks() -> list[str]:
    """Names of the attention backends of this vLLM that take sinks and can be imported on this platform."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():  # has one, which takes sinks but does not announce them
        return ["CPU_ATTN"]
    names = []
    for backend in AttentionBackendEnum:
        try:
            supported = backend.get_class().supports_sink()
        except Exception:  # a backend of other hardware may fail to import in any way
            continue
        if supported:
            names.append(backend.name)
    return names


def is_kept_in_float32(model: Any, name: str) -> bool:
    """Whether Transformers keeps the parameter `name` of its `model` in float32 in a model of any dtype.

    vLLM's own rule (from 0.28) passes over parameters that have a weight loader.
    """
    fragments = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(fragment in name for fragment in fragments)


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


def has_adapters(model: Any) -> bool:
    """Whether a model computes logits and is served with LoRA adapters."""
    return model.vllm_config.lora_config is not None and not is_pooling(model)


def check_layer_names(vllm_config: Any) -> None:
    """Check that a model is not the draft of another of this backend, whose layers have the same names (up to 0.31).

    Raises:
        ValueError: if it is.
    """
    taken = vllm_config.compilation_config.static_forward_context
    if any(re.fullmatch(r"\d+\.attn", name) for name in taken):
        name = ", ".join(vllm_config.model_config.architectures)
        raise ValueError(
            f"{name} cannot be the draft of another model of the Transformers backend: vLLM {version()} names the "
            "attention layers of target and draft alike. Use a draft that vLLM has a class for, or vLLM 0.32."
        )


def is_draft(model: Any) -> bool:
    """Whether `model` is the draft of another, whose `lm_head` it is given (from vLLM 0.33)."""
    return any(cls.__name__ == "MTPMixin" for cls in type(model).__mro__)


def missing_layer() -> Any:
    """What stands for a module that is on another pipeline rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return PPMissingLayer()


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


def leaves_unadapted_rows() -> str:
    """Says that LoRA leaves rows without an adapter alone, as GPU kernels do, and the CPU's from vLLM 0.33, or ""."""
    from vllm.lora.ops.torch_ops import bgmv_expand
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "these are kernels of the CPU"
    return "vLLM masks these rows" if "no_lora_mask" in bgmv_expand.__code__.co_varnames else ""


def adapts_by_name_alone() -> bool:
    """Whether LoRA goes by the names of modules alone, whatever they are (up to vLLM 0.28)."""
    import inspect

    from vllm.lora.utils import is_supported_lora_module

    return "module" not in inspect.signature(is_supported_lora_module).parameters


def refusal_of_output_adapters(model: Any, vocabulary: int) -> str:
    """Why LoRA cannot adapt the projection of a model to its vocabulary, or ""."""
    if hasattr(model, "get_mm_mapping"):
        return "LoRA adapts a multimodal model's language model only, and vLLM's lm_head is outside it"
    if vocabulary > LARGEST_VOCABULARY_OF_ADAPTERS:
        return f"LoRA adapts no projection to more than {LARGEST_VOCABULARY_OF_ADAPTERS} tokens"
    if model.vllm_config.speculative_config is not None and model.vllm_config.use_v2_model_runner:
        return "LoRA in vLLM's model runner v2 counts on one row a request, and speculative decoding has more"
    targets = model.vllm_config.lora_config.target_modules
    if targets is not None and "lm_head" not in targets:
        return f"this engine was started for adapters of {', '.join(targets)} only, lm_head not among them"
    return ""


def with_output_embeddings(embedding_modules: Any, name: str) -> Any:
    """A model's `embedding_modules` with those of the output: a list up to vLLM 0.30, a mapping since."""
    if isinstance(embedding_modules, dict):
        return {**embedding_modules, name: "output_embeddings"}
    return [*embedding_modules, name]


def renaming_first(renaming: Any, mapper: Any) -> Any:
    """A WeightsMapper that renames by the `rename_source_key` of `renaming`, and then as `mapper` does."""
    return type(mapper)(orig_to_new_renaming=[renaming]) | mapper


def load_weights_of_base(model: Any, weights: Any) -> set[str]:
    """Load `weights` as a model without `CausalMixin` would: that mistakes any `*lm_head.bias` for its own."""
    from vllm.model_executor.models.transformers.causal import CausalMixin

    loaded: set[str] = super(CausalMixin, model).load_weights(weights)
    return loaded


def record_for_reload(module: "torch.nn.Module") -> None:
    """Note what a module that was made after its model looks like before it is loaded: a reload starts from there."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(module)


def load_lm_head(model: Any) -> None:
    """Let `model` load weights of its `lm_head`, which vLLM up to 0.28 skips in a tied model."""
    if "lm_head." in (skipped := getattr(model, "skip_prefixes", [])):
        skipped.remove("lm_head.")


def use_config_of_transformers(model_config: Any) -> None:
    """Give a model that Transformers has Transformers' own config, where vLLM read it with one of its own.

    vLLM up to 0.31 has a HyperCLOVAXConfig, for which `AutoModel` finds no class.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = model_config.hf_config
    name = CONFIG_MAPPING_NAMES.get(config.model_type)
    if name is None or not type(config).__module__.startswith("vllm."):
        return
    fields = {field: value for field, value in config.to_dict().items() if value is not None}
    fields.pop("auto_map", None)
    model_config.hf_config = getattr(transformers, name).from_dict(fields)
    model_config.hf_text_config = model_config.hf_config.get_text_config()


def configuration(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The ModelConfig with which this vLLM would serve `model` through the Transformers backend.

    Raises:
        ValueError: if it would refuse to; pydantic's errors are among these.
    """
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model,
        revision=revision,
        code_revision=revision,
        trust_remote_code=trust_remote_code,
        model_impl="transformers",
        skip_tokenizer_init=True,
    )
    return arguments.create_model_config()


def sink_by_itself(module: Any) -> Any:
    """The sink that vLLM finds in an attention module without us: a parameter, or None.

    Raises:
        ValueError: where it finds that the module passes one, and not which.
    """
    if not layers_take_sinks():
        return None
    from vllm.model_executor.models.transformers.fusers import AttentionFuser

    fuser = AttentionFuser.match(None, module)
    return fuser.sinks(module) if fuser else None


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


def import_worker() -> None:
    """Import what a worker of this platform needs: slow, and free of tensor work."""
    import importlib

    from vllm.platforms import current_platform

    importlib.import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")


def inspect_models_in_this_process() -> None:
    """Let the registry look at a model class here, and not in a process of its own, which takes 10 s."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def attention_layers(model: Any) -> dict[int, Any]:
    """Layer index -> the attention layer of vLLM that serves it, on this rank."""
    instances: dict[int, Any] | None = getattr(model, "attention_instances", None)  # up to vLLM 0.29
    if instances is not None:
        return instances
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    held = [(module, getattr(module, attention_attribute(), None)) for module in model.model.modules()]
    return {module.layer_idx: layer for module, layer in held if isinstance(layer, AttentionLayerBase)}


def handed_to_attention() -> tuple[str, ...]:
    """What this vLLM hands a model for its attention function to find layers in: up to 0.29 a table of them."""
    from vllm.model_executor.models.transformers.base import Base

    return ("attention_instances",) if hasattr(Base, "create_attention_instances") else ()


def is_ordinary_attention(layer: Any) -> bool:
    """Whether an attention layer is a decoder's, over keys and values as they are."""
    from vllm.model_executor.layers.attention import Attention

    return type(layer) is Attention


def fixed_scale(layer: Any) -> float | None:
    """The scale by which an attention layer multiplies logits; None where each call says (up to vLLM 0.29)."""
    return getattr(layer.impl, "scale", None) if layers_take_sinks() else None


def routes_by_softmax_only() -> bool:
    """Whether this platform's experts route without groups by a plain softmax only, as the CPU's do."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
