# SPDX-License-Identifier: Apache-2.0
"""vLLM as a whole: its version, platform, configuration and start."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BACKEND = "vllm.model_executor.models.transformers"
OLDEST = "0.27.1"
TESTED = (OLDEST, "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")


def version() -> str:
    """The version of the vLLM that this process runs."""
    from vllm.version import __version__

    return str(__version__)


def is_of_backend(model: Any) -> bool:
    """Whether a model of vLLM's is one of the Transformers backend."""
    from vllm.model_executor.models.transformers.base import Base

    return isinstance(model, Base)


def tested() -> str:
    """Says that this package was tested on this version of vLLM, or ""."""
    return "this version of vLLM was tested" if is_tested() else ""


def too_old() -> str:
    """Why this vLLM is older than the package supports, or ""."""
    from packaging.version import InvalidVersion, Version  # slow to import, and not needed by register()

    try:
        is_older = Version(version()) < Version(OLDEST)
    except InvalidVersion:  # a build without a version: its names and signatures decide
        return ""
    return f"vLLM {version()} is older than {OLDEST}" if is_older else ""


def is_tested() -> bool:
    """Whether this package was tested on this version of vLLM; each build of a release counts as that release."""
    return version().partition("+")[0] in TESTED


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


def routes_by_softmax_only() -> bool:
    """Whether this platform's experts route without groups by a plain softmax only, as the CPU's do."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def declare_variable(name: str, value: Callable[[], str]) -> None:
    """Make an environment variable known to vLLM.

    vLLM then does not warn about it, hands it to Ray workers, and makes `value()` part of the key
    of its compile cache.
    """
    from vllm import envs

    envs.environment_variables[name] = value


def configuration(
    model: str, revision: str | None = None, trust_remote_code: bool = False, max_model_len: int | None = None
) -> Any:
    """The VllmConfig with which this vLLM would serve `model` through the Transformers backend, on one rank.

    Raises:
        ValueError: if it would refuse to; pydantic's errors are among these.
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
    """The model as this vLLM builds it by its VllmConfig, but on the meta device: without weights or memory.

    Raises:
        Exception: whatever vLLM, or a patch of it, refuses the model with.
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
    """Give a model that Transformers has Transformers' own config, where vLLM read it with one of its own.

    vLLM up to 0.31 has a HyperCLOVAXConfig, for which `AutoModel` finds no class.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = model_config.hf_config
    name = CONFIG_MAPPING_NAMES.get(config.model_type)
    if name is None or not type(config).__module__.startswith("vllm."):
        return
    cls = getattr(transformers, name)
    fields = {
        field: value
        for field, value in config.to_dict().items()
        if value is not None and not isinstance(getattr(cls, field, None), property)  # what the class works out itself
    }
    fields.pop("auto_map", None)
    model_config.hf_config = cls.from_dict(fields)
    model_config.hf_text_config = model_config.hf_config.get_text_config()


def count_draft_layers(model_config: Any) -> None:
    """Let a config whose number of draft layers is None say 0: vLLM up to 0.33 adds the number to another."""
    text_config = model_config.hf_text_config
    if getattr(text_config, "num_nextn_predict_layers", 0) is None:
        text_config.num_nextn_predict_layers = 0


def import_worker() -> None:
    """Import what a worker of this platform needs: slow, and free of tensor work."""
    import importlib

    from vllm.platforms import current_platform

    importlib.import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")


def inspect_models_in_this_process() -> None:
    """Let the registry look at a model class here, and not in a process of its own, which takes 10 s."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
