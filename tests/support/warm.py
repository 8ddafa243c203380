# SPDX-License-Identifier: Apache-2.0
"""What a fork server imports before its first fork: all that an engine imports while it serves a model.

vLLM and Transformers import much when it is first used. Forks that find it imported are 1 to 2 s faster.
"""

import contextlib
import importlib
import os
import pickle
import sys
import tempfile

from vllm_tf_sinks.parity import pytest_plugin

# Left to the jobs, which test what is patched and when
NOT_BEFORE_A_JOB = ("vllm.model_executor.models.transformers", "vllm_tf_sinks", "support", "transformers_modules")


def warm() -> None:
    """Prepare the fork server of one vLLM version."""
    pytest_plugin.warm()
    for name in _imported_by_a_run():
        if not name.startswith(NOT_BEFORE_A_JOB):
            with contextlib.suppress(Exception):  # a module that another one made under its own name
                importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles 1000 regular expressions, once a process


def _imported_by_a_run() -> list[str]:
    """The names of the modules that a process imports while it serves a model, in the order of their import."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        with os.fdopen(writer, "wb") as pipe:
            before = set(sys.modules)
            with contextlib.suppress(Exception):
                _serve()
            pipe.write(pickle.dumps([name for name in sys.modules if name not in before]))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        names = pickle.loads(pipe.read())
    os.wait()
    return names


def _serve() -> None:
    from support.checkpoints import build
    from support.jobs import served_rows

    with tempfile.TemporaryDirectory() as folder:
        served_rows(build("llama", folder))
