# SPDX-License-Identifier: Apache-2.0
"""All names of vLLM that differ between the supported versions. Each function looks for what this vLLM has.

Importing this package imports nothing of vLLM. Each function imports the modules that it needs.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_tf_sinks.compat import attention, engine, experts, heads, lora, weights

__all__ = ["attention", "engine", "experts", "heads", "lora", "weights"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")  # register() needs only one of them
