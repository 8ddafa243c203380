# SPDX-License-Identifier: Apache-2.0
"""A process that has imported one version of vLLM and forks once a job: 3 s an engine, and not 25 s."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tf_sinks.parity import fork_server, pytest_plugin
from vllm_tf_sinks.parity.fork_server import JobError

__all__ = ["ForkServer", "JobError"]

TESTS = Path(__file__).resolve().parent.parent
REFERENCE = "support.jobs:reference_rows"
CACHE = TESTS.parent / ".cache" / "tests"

SETTINGS = {
    **pytest_plugin.SETTINGS,
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
}


class ForkServer(fork_server.ForkServer):
    """One vLLM version, ready to run functions of the tests."""

    def __init__(self, version: str, overlay: Path | None) -> None:
        self.version = version
        path = [str(overlay)] if overlay else []
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **SETTINGS,
            "PYTHONPATH": os.pathsep.join([*path, str(TESTS)]),
        }
        super().__init__(environment, pytest_plugin.IMPORTS, "support.warm:warm")
        self._references: dict[bytes, Any] = {}

    def run(self, job: str, /, env: Mapping[str, str] | None = None, on_progress: Any = None, **arguments: Any) -> Any:
        """As every fork server, but Hugging Face's rows of one checkpoint are computed once."""
        if job != REFERENCE:
            return super().run(job, env, on_progress, **arguments)
        saved = [path.stat().st_mtime_ns for path in sorted(Path(arguments["checkpoint"]).iterdir())]
        key = pickle.dumps((saved, env, arguments))
        if key not in self._references:
            self._references[key] = super().run(job, env, on_progress, **arguments)
        return self._references[key]
