# SPDX-License-Identifier: Apache-2.0
"""Refuse every model of vLLM's Transformers backend where this package cannot do its work.

vLLM logs what a plugin raises while it is imported, and goes on without the plugin. So this module and all
that leads to it import the standard library only.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

BASE = "vllm.model_executor.models.transformers.base"  # the module of the class that all models of the backend have


class BrokenInstallError(RuntimeError):
    """The package is installed in part, or cannot check what it serves."""


def is_broken_install(error: BaseException) -> bool:
    """Whether `error` says that a package is missing or broken, and not that vLLM or Transformers is another one."""
    if not isinstance(error, ImportError):
        return False
    return (error.name or "").partition(".")[0] not in ("vllm", "transformers", "torch")


def missing_package(error: ImportError) -> str:
    """What is wrong with an installation in which `error` was raised, and what to do."""
    return (
        f"vllm-tf-sinks is not installed in full: {error}. Install it with all that it needs: "
        "pip install --force-reinstall vllm-tf-sinks"
    )


def refuse_models(what: str) -> None:
    """Let vLLM's Transformers backend refuse each model that it is to build, now or once it is imported.

    Native models are served all the same. Each refusal is a BrokenInstallError that begins with `what`.
    """
    allow_models()  # or a second refusal would hide the first
    message = f"{what}. VLLM_TF_SINKS=0 serves models of the Transformers backend as vLLM does: check their logprobs."
    if base := sys.modules.get(BASE):
        _refuse(base, message)
    else:
        sys.meta_path.insert(0, _Finder(message))


class _Finder:
    """Finds the module `BASE` as the other finders do, and changes it once it was executed."""

    def __init__(self, message: str) -> None:
        self.message = message

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that also changes it."""
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
    """Take back `refuse_models`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    while _refusals:
        base, refusal = _refusals.popitem()
        if base.__init__ is refusal:
            base.__init__ = refusal.__wrapped__


_refusals: dict[Any, Any] = {}  # the class of all models of the backend -> what its constructor was replaced by


def _refuse(module: Any, message: str) -> None:
    @wraps(module.Base.__init__)  # vLLM looks at the signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise BrokenInstallError(message)

    module.Base.__init__ = _refusals[module.Base] = __init__
