# SPDX-License-Identifier: Apache-2.0
"""A process that has imported one version of vLLM and forks once a job.

A job runs in a fresh fork, so that each starts an engine in a clean process, in 3 s and not 25 s.
`Zygote` is the parent's handle; run as a script, this file is the process itself.
"""

import gc
import importlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from contextlib import redirect_stderr
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
CACHE = TESTS.parent / ".cache" / "tests"

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    "VLLM_NO_USAGE_STATS": "1",
}

PRELOAD = (
    "transformers",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.registry",
)


class JobError(AssertionError):
    """A job raised; the message has its traceback and the log of its process."""


class Zygote:
    """One vLLM version, ready to run functions of the tests in forks of one process."""

    def __init__(self, version: str, overlay: Path | None) -> None:
        self.version = version
        path = [str(overlay)] if overlay else []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **SETTINGS,
            "PYTHONPATH": os.pathsep.join([*path, str(TESTS)]),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment
        )

    def run(self, job: str, /, env: dict[str, str] | None = None, **kwargs):
        """What the function `job`, `module:name`, returns in a fork with `env` set.

        Raises:
            JobError: if it raises.
        """
        pickle.dump((job, env or {}, kwargs), self._process.stdin)
        self._process.stdin.flush()
        ok, value = pickle.load(self._process.stdout)
        if not ok:
            raise JobError(value)
        return value

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _run(job: str, env: dict[str, str], kwargs: dict, result: Path) -> None:
    """The child: run the job, its output captured, and leave what came of it in `result`."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  # stays open until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(env)
    gc.disable()
    try:
        module, _, name = job.partition(":")
        outcome = (True, getattr(importlib.import_module(module), name)(**kwargs))
    except BaseException:
        sys.stdout.flush()
        log.seek(0)
        outcome = (
            False,
            traceback.format_exc() + "\n--- log ---\n" + log.read().decode(errors="replace")[-8000:],
        )
    result.write_bytes(pickle.dumps(outcome))
    os._exit(0)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with redirect_stderr(io.StringIO()):
        for name in PRELOAD:
            importlib.import_module(name)
    gc.freeze()
    while True:
        try:
            job, env, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # skip what the libraries print at exit
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            if (child := os.fork()) == 0:
                _run(job, env, kwargs, result)
            _, exit_status = os.waitpid(child, 0)
            outcome = (
                pickle.loads(result.read_bytes())
                if result.exists()
                else (False, f"{job} died with the wait status {exit_status}")
            )
        pickle.dump(outcome, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
