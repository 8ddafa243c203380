# SPDX-License-Identifier: Apache-2.0
"""The one function that vLLM calls, in each of its processes."""

from vllm_tf_sinks import vllm_api
from vllm_tf_sinks.patches import trigger
from vllm_tf_sinks.settings import VARIABLE, choose, read_settings


def register() -> None:
    """Arrange for vLLM's Transformers backend to be patched when it is first imported.

    Cheap and safe to call again: it imports neither torch nor model code of vLLM. The backend is
    patched at once where it has been imported already. Later calls follow `VLLM_TF_SINKS` as it is
    then, but never undo what was applied: that is `revert()`.

    Raises:
        ValueError: if `VLLM_TF_SINKS` has a value that it does not take.
        PatchError: under `VLLM_TF_SINKS=strict`, if the backend is imported already and a patch
            does not fit it. Where it is imported later, that import raises.
    """
    settings = read_settings()
    vllm_api.engine.declare_variable(VARIABLE, lambda: settings.fingerprint)
    choose(settings)
    if settings.groups:
        trigger.when_imported(vllm_api.engine.BACKEND, _apply)


def _apply() -> None:
    from vllm_tf_sinks.patches.apply import apply  # which most processes of a server never need

    apply()
