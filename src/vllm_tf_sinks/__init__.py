# SPDX-License-Identifier: Apache-2.0
"""Attention sinks and true output heads for vLLM's Transformers modeling backend."""

from vllm_tf_sinks.hooks import hookimpl
from vllm_tf_sinks.patches.apply import revert, status
from vllm_tf_sinks.patches.patch import PatchError, Row, State
from vllm_tf_sinks.plugin import register
from vllm_tf_sinks.settings import Settings

__all__ = ["PatchError", "Row", "Settings", "State", "hookimpl", "register", "revert", "status"]
