# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and models' own output heads for vLLM's Transformers modeling backend."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_tf_sinks.errors import PatchError
    from vllm_tf_sinks.hooks import hookimpl
    from vllm_tf_sinks.patches.patch import Row, State
    from vllm_tf_sinks.patches.patcher import revert, status
    from vllm_tf_sinks.plugin import register
    from vllm_tf_sinks.settings import Settings

__all__ = ["PatchError", "Row", "Settings", "State", "hookimpl", "register", "revert", "status"]

# Imported at first use: every process of vLLM imports this package, and most need only register()
_MODULES = {
    "hookimpl": "hooks",
    "revert": "patches.patcher",
    "status": "patches.patcher",
    "PatchError": "errors",
    "Row": "patches.patch",
    "State": "patches.patch",
    "register": "plugin",
    "Settings": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
