# SPDX-License-Identifier: Apache-2.0
"""The one function that vLLM calls, in each of its processes. Importing this imports the standard library only."""

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.broken_install import is_broken_install, missing_package, refuse_models
from vllm_tf_sinks.settings import VARIABLE, choose, read_settings


def register() -> None:
    """Arrange for vLLM's Transformers backend to be patched when it is first imported.

    Cheap and safe to call again: it imports neither torch nor model code of vLLM. The backend is
    patched at once where it has been imported already. Later calls follow `VLLM_TF_SINKS` as it is
    then, but never undo what was applied: that is `revert()`. Where a package that this one needs
    cannot be imported, native models are served, and models of the backend are refused.

    Raises:
        ValueError: if `VLLM_TF_SINKS` has a value that it does not take.
        PatchError: under `VLLM_TF_SINKS=strict`, if the backend is imported already and a patch
            does not fit it. Where it is imported later, that import raises.
    """
    settings = read_settings()
    vllm_api.engine.declare_variable(VARIABLE, lambda: settings.fingerprint)
    choose(settings)
    if not settings.groups:
        return
    try:
        from vllm_tf_sinks.patches import trigger
    except ImportError as error:
        refuse_models(missing_package(error))
    else:
        trigger.when_imported(vllm_api.engine.BACKEND, _apply)


def _apply() -> None:
    try:
        from vllm_tf_sinks.patches.apply import apply  # which most processes of a server never need

        apply()
    except ImportError as error:
        if not is_broken_install(error):
            raise
        refuse_models(missing_package(error))
