# SPDX-License-Identifier: Apache-2.0
"""Jobs that register in one process after another."""

import multiprocessing
import sys

from support.jobs import served_rows
from support.patching import BACKEND, current, depth, import_backend, states


def registered() -> dict:
    """The states, and how many wrappers are around each target, after vLLM has loaded its plugins twice."""
    import vllm.plugins

    from vllm_tf_sinks import register

    vllm.plugins.load_general_plugins()
    import_backend()
    register()
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    return {"states": states(), "depths": {path: depth(function) for path, function in current().items()}}


def untouched_depths() -> dict[str, int]:
    """How many wrappers are around each target in upstream vLLM."""
    import_backend()
    return {path: depth(function) for path, function in current().items()}


def in_a_child(start: str, when: str = "before") -> dict:
    """What `registered` says in a child that is started `before` this process registers, or `after` that, or
    after the backend was `imported`.
    """
    from vllm_tf_sinks import register

    if when != "before":
        register()
    if when == "imported":
        import_backend()
    context = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender,))
    process.start()
    answer = receiver.recv()
    process.join()
    return answer


def _send(sender) -> None:
    sender.send(registered())


def native(checkpoint: str, **engine) -> tuple[list, dict[str, str], bool]:
    """The rows that a native model is served with, the states after, and whether the backend was imported."""
    rows = served_rows(checkpoint, **engine)
    return rows, states(), BACKEND in sys.modules
