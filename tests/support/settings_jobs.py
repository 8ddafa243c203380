# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of the environment variable, once it has loaded its plugins."""

import logging

from support.jobs import served_rows

UNKNOWN = "Unknown vLLM environment variable"


def environment_warnings(checkpoint: str, **engine) -> list[str]:
    """vLLM's warnings of variables that it does not know, from a start of the engine."""
    found: list[str] = []

    def keep(record):
        if UNKNOWN in record.getMessage():
            found.append(record.getMessage())
        return True

    for name in ("vllm.envs", "vllm.platforms.interface"):
        logging.getLogger(name).addFilter(keep)
    served_rows(checkpoint, **engine)
    return found


def compile_key() -> tuple[object, str]:
    """The variable's factor in vLLM's compile cache key, None if it has none; and the hash of all factors."""
    from vllm import envs
    from vllm.config.utils import hash_factors
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    factors = envs.compile_factors()
    factors.pop("VLLM_PLUGINS", None)  # differs anyway where the plugin is left out by it
    return factors.get("VLLM_TF_SINKS"), hash_factors(factors)


def copied_to_ray_workers() -> set[str]:
    """The environment variables that vLLM copies from the driver to Ray workers."""
    from vllm.plugins import load_general_plugins
    from vllm.ray.ray_env import get_env_vars_to_copy

    load_general_plugins()
    return get_env_vars_to_copy()
