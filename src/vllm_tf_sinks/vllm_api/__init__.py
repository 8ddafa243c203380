# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that differs between the supported versions, probed, in one place.

Importing it imports nothing of vLLM; each function imports what it asks about.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_tf_sinks.vllm_api import attention, engine, heads, lora, weights

__all__ = ["attention", "engine", "heads", "lora", "weights"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")  # register() needs one of them only
