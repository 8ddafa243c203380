# SPDX-License-Identifier: Apache-2.0
"""What becomes of the check of a loaded model, and of what it keeps, once it was made."""

import logging

from support.jobs import ENGINE, rows_of
from support.meanings import renumber
from support.patching import logged, messages


def reloaded(checkpoint: str) -> dict:
    """An engine that reloads its own checkpoint: what is kept for the check, how often it was made, and the rows."""
    from vllm import LLM

    from vllm_tf_sinks.model_state import state_of

    renumber()
    with logged() as records:
        llm = LLM(checkpoint, **ENGINE)
        before = rows_of(llm)
        llm.collective_rpc("reload_weights")
        after = rows_of(llm)
    checks = [line for line in messages(records, logging.INFO) if "checked after loading" in line]
    same = all((b[1] == a[1]).all() and (b[2] == a[2]).all() for b, a in zip(before, after, strict=True))
    return {"kept": llm.apply_model(lambda model: state_of(model).checkpoint), "log": len(checks), "same": same}
