# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM that differs between the supported versions, probed, in one place.

Importing it imports nothing of vLLM; each function imports what it asks about.
"""

from vllm_tf_sinks.vllm_api import attention, engine, heads, lora, weights

__all__ = ["attention", "engine", "heads", "lora", "weights"]
