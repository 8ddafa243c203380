# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of the environment variable, once it has loaded its plugins."""

import builtins
import inspect
import logging
import os
import pickle

from support.jobs import served_rows
from support.patching import import_backend, states

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


def carried_by_ray(checkpoint: str) -> dict[str, object]:
    """What the driver of a cluster hands to other processes of `VLLM_*`, and the config that goes with it.

    Returns:
        `config`, pickled; the variables that go to `workers` (by the executor that replaced the first one, and is
        the only one from vLLM 0.33 on) and to `engines` of data parallelism; and the names that may go to those.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor.ray_env_utils import get_driver_env_vars
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    config = EngineArgs(checkpoint, model_impl="transformers", skip_tokenizer_init=True).create_engine_config()
    names = get_env_vars_to_copy(exclude_vars=WORKER_SPECIFIC_ENV_VARS)
    workers = get_driver_env_vars(worker_specific_vars=WORKER_SPECIFIC_ENV_VARS)
    return {
        "config": pickle.dumps(config),
        "workers": {name: value for name, value in workers.items() if name.startswith("VLLM_")},
        "engines": {name: os.environ[name] for name in names if name in os.environ},
        "names": names,
    }


def worker_of_ray(config: bytes, variables: dict[str, str]) -> dict[str, str]:
    """The states of the patches in a worker of another node, which gets `config` and `variables` from the driver.

    Ray takes no CPU, so this is what its actor runs, up to the worker that it makes.
    """
    builtins.ObjectRef = object  # all that this module of vLLM misses without Ray
    from vllm.v1.executor.ray_executor_v2 import RayWorkerProc, WorkerProc

    WorkerProc.__init__ = _init_worker
    actor = object.__new__(RayWorkerProc)
    vllm_config = pickle.loads(config)
    vllm_config.parallel_config.worker_cls = f"{__name__}.Worker"
    actor._init_kwargs = {"vllm_config": vllm_config}
    arguments = {"local_rank": 0, "env_vars": {}, "distributed_init_method": "", "driver_env_vars": variables}
    known = inspect.signature(actor.initialize_worker).parameters
    actor.initialize_worker(**{name: value for name, value in arguments.items() if name in known})
    import_backend()
    return states()


def _init_worker(self, local_rank, vllm_config, **_) -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    WorkerWrapperBase(rpc_rank=0).init_worker([{"vllm_config": vllm_config}])


class Worker:
    """In the place of a GPU's."""

    def __init__(self, **_):
        pass
