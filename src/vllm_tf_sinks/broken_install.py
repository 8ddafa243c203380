# SPDX-License-Identifier: Apache-2.0
"""Refuse every model of vLLM's Transformers backend if this package cannot work.

If importing a plugin raises, vLLM logs the error and continues without the plugin. So this module, and those that
import it, import only the standard library.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm_tf_sinks.errors import BrokenInstallError

BASE = "vllm.model_executor.models.transformers.base"  # the module of `Base`, the base class of the backend's models


def is_broken_install(error: BaseException) -> bool:
    """Whether `error` is due to a missing or broken package other than vLLM, Transformers and torch."""
    if not isinstance(error, ImportError):
        return False
    return (error.name or "").partition(".")[0] not in ("vllm", "transformers", "torch")


def missing_package(error: ImportError) -> str:
    """The message for an installation in which `error` was raised."""
    return (
        f"The installation of vllm-tf-sinks is incomplete: {error}. Install it with its dependencies: "
        "pip install --force-reinstall vllm-tf-sinks"
    )


def refuse_models(what: str) -> None:
    """Let vLLM's Transformers backend refuse every model, now or after it is imported. Native models are not affected.

    Args:
        what: what is wrong, with which each BrokenInstallError begins.
    """
    allow_models()  # otherwise the second refusal would wrap the first
    message = f"{what}. VLLM_TF_SINKS=0 serves these models as upstream vLLM does: check their logprobs."
    if base := sys.modules.get(BASE):
        _refuse(base, message)
    else:
        sys.meta_path.insert(0, _Finder(message))


class _Finder:
    """Finds the module `BASE` by the other finders, and patches it after its execution."""

    def __init__(self, message: str) -> None:
        self.message = message

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module `BASE`, with a loader that also patches it."""
        if name != BASE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _refuse(module, self.message)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def allow_models() -> None:
    """Undo `refuse_models`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    while _refusals:
        base, refusal = _refusals.popitem()
        if base.__init__ is refusal:
            base.__init__ = refusal.__wrapped__


_refusals: dict[Any, Any] = {}  # `Base` -> the function that replaces its constructor


def _refuse(module: Any, message: str) -> None:
    @wraps(module.Base.__init__)  # vLLM reads the signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise BrokenInstallError(message)

    module.Base.__init__ = _refusals[module.Base] = __init__
