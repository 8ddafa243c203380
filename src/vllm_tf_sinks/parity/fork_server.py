# SPDX-License-Identifier: Apache-2.0
"""A fork server: a process that imports slow modules once, and forks for each job.

Each job has a process of its own, whose memory is freed at its end. An engine of vLLM starts in 3 s in a fork, and in
25 s in a new process.
"""

import contextlib
import gc
import importlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LOG_CHARACTERS = 8000  # the length of the end of a failed job's output in its error

PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from vllm_tf_sinks.parity.fork_server import run_jobs; run_jobs(*sys.argv[1:])"
)

_results: IO[bytes] | None = None  # in the fork server: the pipe to the caller


class JobError(AssertionError):
    """A job raised an exception. The message has its traceback and its output.

    Attributes:
        error: the exception in one line, without its traceback.
    """

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error or message


class ForkServer:
    """Runs functions, named `module:name`, in forks of one process.

    Arguments and return values are pickled. The modules that are imported before the forks may not compute with
    tensors: torch's threads do not survive a fork.
    """

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str] = (), prepare: str = "") -> None:
        """Start the process.

        Args:
            environment: all of the process's environment variables.
            imports: modules to import before the first fork.
            prepare: a function `module:name` to call before the first fork.
        """
        self.environment = dict(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, prepare, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._jobs, self._results = self._process.stdin, self._process.stdout

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        job: str,
        /,
        env: Mapping[str, str] | None = None,
        on_progress: Callable[[Any], None] | None = None,
        **arguments: Any,
    ) -> Any:
        """Call a function in a fork, and return its value.

        Args:
            job: the function, `module:name`.
            env: environment variables to set in the fork.
            on_progress: called with each value that the job passes to `report`.
            arguments: keyword arguments of the function.

        Raises:
            JobError: if the function raises, or its process dies.
        """
        pickle.dump((job, dict(env or {}), arguments), self._jobs)
        self._jobs.flush()
        while True:
            try:
                kind, value = pickle.load(self._results)
            except EOFError:
                raise JobError(f"{job}: the fork server died with the exit status {self._process.wait()}") from None
            if kind == "returned":
                return value
            if kind == "raised":
                raise JobError(*value)
            if on_progress:
                on_progress(value)

    def close(self) -> None:
        """End the fork server."""
        with contextlib.suppress(BrokenPipeError):
            self._jobs.close()
        self._process.wait()
        self._results.close()


def report(value: Any) -> None:
    """Send `value` to `on_progress` of the caller. For use in a job."""
    if _results:
        _send(_results, ("progress", value))


def function(path: str) -> Callable[..., Any]:
    """Import the function `module:name`."""
    module, _, name = path.partition(":")
    named: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return named


def _send(file: IO[bytes], message: tuple[str, Any]) -> None:
    pickle.dump(message, file)
    file.flush()


def _run(job: str, env: dict[str, str], arguments: dict[str, Any], result: Path) -> None:
    """Run a job in a fork, with its output captured, and write its outcome to the file `result`."""
    log = tempfile.TemporaryFile()  # noqa: SIM115  # stays open until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(env)
    gc.disable()
    outcome: tuple[str, Any]
    try:
        outcome = ("returned", function(job)(**arguments))
    except BaseException as error:
        sys.stdout.flush()
        log.seek(0)
        output = log.read().decode(errors="replace")[-LOG_CHARACTERS:]
        message = f"{traceback.format_exc()}\n--- log ---\n{output}"
        outcome = ("raised", (message, f"{type(error).__name__}: {error}"))
    result.write_bytes(pickle.dumps(outcome))
    os._exit(0)


def run_jobs(prepare: str, *imports: str) -> None:
    """Run jobs from standard input until it ends. This is the main function of the fork server."""
    global _results
    _results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.redirect_stderr(io.StringIO()):
        for name in imports:
            importlib.import_module(name)
        if prepare:
            function(prepare)()
    gc.freeze()
    while True:
        try:
            job, env, arguments = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            os._exit(0)  # without the exit handlers of libraries, which print
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            if (child := os.fork()) == 0:
                _run(job, env, arguments, result)
            _, status = os.waitpid(child, 0)
            died = ("raised", (f"{job} died with the wait status {status}",))
            outcome = pickle.loads(result.read_bytes()) if result.exists() else died
        _send(_results, outcome)
