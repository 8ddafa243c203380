# SPDX-License-Identifier: Apache-2.0
"""A model served by several workers, each a process of its own."""

import multiprocessing
import os
from contextlib import contextmanager

from support.jobs import served_rows

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the workers
}


@contextmanager
def two_workers(start: str = "fork"):
    """Within the context an engine with a tensor-parallel size of 2 can be started.

    Args:
        start: how processes are started. vLLM's CPU platform wants `spawn`, which imports vLLM anew in
            each; what this process has imported can be forked as well.
    """
    from vllm.platforms.cpu import CpuPlatform

    check_and_update_config = CpuPlatform.check_and_update_config

    def with_start(vllm_config):
        check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start

    CpuPlatform.check_and_update_config = staticmethod(with_start)
    try:
        yield
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
            process.join(10)


def served_by_two(checkpoint: str, start: str = "fork", **engine) -> list:
    """What `served_rows` gives with a tensor-parallel size of 2.

    Args:
        checkpoint: folder of the model.
        start: how processes are started.
        engine: arguments of `LLM`.
    """
    with two_workers(start):
        return served_rows(checkpoint, tensor_parallel_size=2, **engine)
