# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and true output heads for vLLM's Transformers modeling backend."""

from typing import TYPE_CHECKING, Any

from vllm_tf_sinks.patches.apply import revert, status
from vllm_tf_sinks.patches.patch import PatchError, Row, State
from vllm_tf_sinks.plugin import register
from vllm_tf_sinks.settings import Settings

if TYPE_CHECKING:
    from vllm_tf_sinks.hooks import hookimpl

__all__ = ["PatchError", "Row", "Settings", "State", "hookimpl", "register", "revert", "status"]


def __getattr__(name: str) -> Any:
    if name != "hookimpl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_tf_sinks.hooks import hookimpl  # imports pluggy, which register() has no use for in most processes

    return hookimpl
