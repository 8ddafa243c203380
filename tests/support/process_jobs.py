# SPDX-License-Identifier: Apache-2.0
"""Several engines in one process, one after the other."""

import weakref

from support.jobs import ENGINE, call, rows_of


def served_in_turn(checkpoints: list[str], before: list[str] | None = None) -> list[tuple[list, bool]]:
    """For each checkpoint what `served_rows` gives, and whether its model is gone once its engine is shut down.

    Args:
        checkpoints: folders of the models.
        before: for each a `module:function` that is called before its engine starts, or "".
    """
    turns = zip(checkpoints, before or [""] * len(checkpoints), strict=True)
    return [_served(checkpoint, function) for checkpoint, function in turns]


def _served(checkpoint: str, before: str) -> tuple[list, bool]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if before:
        call(before)
    llm = LLM(checkpoint, **ENGINE)
    rows = rows_of(llm)
    (model,) = llm.apply_model(weakref.ref)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return rows, model() is None
