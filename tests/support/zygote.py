# SPDX-License-Identifier: Apache-2.0
"""A process that has imported one version of vLLM and forks once a job: 3 s an engine, and not 25 s."""

import os
from pathlib import Path

from vllm_tf_sinks import testing, zygote
from vllm_tf_sinks.zygote import JobError

__all__ = ["JobError", "Zygote"]

TESTS = Path(__file__).resolve().parent.parent
CACHE = TESTS.parent / ".cache" / "tests"

SETTINGS = {
    **testing.SETTINGS,
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
}


class Zygote(zygote.Zygote):
    """One vLLM version, ready to run functions of the tests."""

    def __init__(self, version: str, overlay: Path | None) -> None:
        self.version = version
        path = [str(overlay)] if overlay else []
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **SETTINGS,
            "PYTHONPATH": os.pathsep.join([*path, str(TESTS)]),
        }
        super().__init__(environment, testing.IMPORTS, "vllm_tf_sinks.testing:warm")
