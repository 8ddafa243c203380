# SPDX-License-Identifier: Apache-2.0
"""The function `register`, which vLLM calls in each process. This module imports only the standard library."""

from vllm_tf_sinks import compat
from vllm_tf_sinks.broken_install import is_broken_install, missing_package, refuse_models
from vllm_tf_sinks.settings import VARIABLE, choose, read_settings


def register() -> None:
    """Patch vLLM's Transformers backend when it is first imported, or now if it is imported already.

    The function imports neither torch nor model code of vLLM. It can be called again: it then reads
    `VLLM_TF_SINKS` anew, and applies further patches, but `revert()` alone undoes patches. If a package
    that this one needs cannot be imported, vLLM serves native models, but refuses models of the backend.

    Raises:
        ValueError: if the value of `VLLM_TF_SINKS` is not valid.
        PatchError: under `VLLM_TF_SINKS=strict`, if a patch does not fit the backend, or this vLLM was not
            tested. If the backend is imported later, the import raises it.
    """
    settings = read_settings()
    compat.engine.declare_variable(VARIABLE, lambda: settings.fingerprint)
    choose(settings)
    if not settings.groups:
        return
    try:
        from vllm_tf_sinks.patches import import_hook
    except ImportError as error:
        refuse_models(missing_package(error))
    else:
        import_hook.when_imported(compat.engine.BACKEND, _apply)


def _apply() -> None:
    try:
        from vllm_tf_sinks.patches.patcher import apply  # only processes that import the backend need it

        apply()
    except ImportError as error:
        if not is_broken_install(error):
            raise
        refuse_models(missing_package(error))
