# SPDX-License-Identifier: Apache-2.0
"""vLLM's version, platform, configuration and start."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BACKEND = "vllm.model_executor.models.transformers"
OLDEST = "0.27.1"
TESTED = (OLDEST, "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")


def version() -> str:
    """The version of vLLM in this process."""
    from vllm.version import __version__

    return str(__version__)


def is_of_backend(model: Any) -> bool:
    """Whether a model of vLLM is one of the Transformers backend."""
    from vllm.model_executor.models.transformers.base import Base

    return isinstance(model, Base)


def tested() -> str:
    """A reason if this package was tested on this version of vLLM, or ""."""
    return "this version of vLLM was tested" if is_tested() else ""


def too_old() -> str:
    """A reason if this vLLM is older than the package supports, or ""."""
    from packaging.version import InvalidVersion, Version  # slow to import, and not needed by register()

    try:
        is_older = Version(version()) < Version(OLDEST)
    except InvalidVersion:  # a build without a version: the checks of its names and signatures decide
        return ""
    return f"vLLM {version()} is older than {OLDEST}" if is_older else ""


def is_tested() -> bool:
    """Whether this package was tested on this release of vLLM, in any build (`0.32.0+cpu`)."""
    return version().partition("+")[0] in TESTED


def device() -> str:
    """The device of this vLLM, and its compute capability if it has one.

    Raises:
        RuntimeError: if this build of vLLM supports no device of this machine.
    """
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise RuntimeError("this build of vLLM supports no device of this machine")
    if current_platform.is_cpu():
        return "CPU"
    capability = current_platform.get_device_capability()
    suffix = f", compute capability {capability.as_version_str()}" if capability else ""
    return f"{current_platform.get_device_name()}{suffix}"


def routes_by_softmax_only() -> bool:
    """Whether this platform's experts support only a plain softmax for routing without groups, as on CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def declare_variable(name: str, value: Callable[[], str]) -> None:
    """Register an environment variable with vLLM.

    vLLM then does not warn about it, passes it to Ray workers, and includes `value()` in the key of its compile cache.
    """
    from vllm import envs

    envs.environment_variables[name] = value


def configuration(
    model: str, revision: str | None = None, trust_remote_code: bool = False, max_model_len: int | None = None
) -> Any:
    """The VllmConfig with which this vLLM would serve `model` by the Transformers backend, on one rank.

    Raises:
        ValueError: if vLLM refuses the model; pydantic's errors are a subclass.
    """
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model,
        revision=revision,
        code_revision=revision,
        trust_remote_code=trust_remote_code,
        max_model_len=max_model_len,
        model_impl="transformers",
        skip_tokenizer_init=True,
    )
    return arguments.create_engine_config()


@contextmanager
def built_on_meta(config: Any) -> Iterator[Any]:
    """Build the model of a VllmConfig on the meta device, without weights or memory.

    Raises:
        Exception: any with which vLLM, or a patch of it, refuses the model.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.device_config.device = torch.device("meta")
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
                built = initialize_model(vllm_config=config)
            yield built
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def use_config_of_transformers(model_config: Any) -> None:
    """Replace a config class of vLLM's by the one of Transformers, for a model type that Transformers has.

    vLLM up to 0.31 has a HyperCLOVAXConfig, for which `AutoModel` finds no class.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = model_config.hf_config
    name = CONFIG_MAPPING_NAMES.get(config.model_type)
    if name is None or not type(config).__module__.startswith("vllm."):
        return
    read = getattr(transformers, name).from_dict(_checkpoint_fields(model_config, getattr(transformers, name)))
    read._name_or_path = model_config.model
    overrides = model_config.hf_overrides
    if callable(overrides):
        read = overrides(read)
    elif overrides:
        read.update(overrides)
    model_config.hf_config, model_config.hf_text_config = read, read.get_text_config()


def _checkpoint_fields(model_config: Any, config_class: Any) -> dict[str, Any]:
    """The fields of a checkpoint's config, from its file; those of vLLM's config if there is no file."""
    from transformers import PretrainedConfig

    try:
        path = model_config.hf_config_path or model_config.model
        fields, _ = PretrainedConfig.get_config_dict(path, revision=model_config.revision)
    except OSError:
        fields = {
            field: value
            for field, value in model_config.hf_config.to_dict().items()
            if value is not None and not isinstance(getattr(config_class, field, None), property)
        }
    fields.pop("auto_map", None)
    return dict(fields)


def count_draft_layers(model_config: Any) -> None:
    """Replace None by 0 as a config's number of draft layers: vLLM up to 0.33 adds it to another number."""
    text_config = model_config.hf_text_config
    if getattr(text_config, "num_nextn_predict_layers", 0) is None:
        text_config.num_nextn_predict_layers = 0


def import_worker() -> None:
    """Import the worker of this platform. The import is slow, but computes with no tensors."""
    import importlib

    from vllm.platforms import current_platform

    importlib.import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")


def inspect_models_in_this_process() -> None:
    """Let vLLM's registry inspect model classes in this process: another process would take 10 s."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
