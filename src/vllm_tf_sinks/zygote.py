# SPDX-License-Identifier: Apache-2.0
"""A process that imports what is slow to import, once, and forks for each job.

Every job has a clean process of its own, with memory that goes when the job is done, at the price of a fork:
starting an engine of vLLM in one takes 3 s, and 25 s in a fresh process.
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

LOG_CHARACTERS = 8000  # of a failed job's output, in its error

PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); from vllm_tf_sinks.zygote import serve; serve(*sys.argv[1:])"
)

_answers: IO[bytes] | None = None  # in the process itself: what goes to the caller


class JobError(AssertionError):
    """A job raised.

    Attributes:
        error: the exception in one line, without its traceback.
    """

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error or message


class Zygote:
    """Runs functions in forks of one process.

    A function is named `module:name`; its arguments and what it returns are pickled. No tensor work may be
    done in what is imported beforehand.
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
        self._jobs, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> "Zygote":
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
        """What the function `job`, `module:name`, returns in a fork.

        Args:
            env: environment variables to set there.
            on_progress: called with what the job reports by `report`.

        Raises:
            JobError: if it raises; the message has its traceback and its output.
        """
        pickle.dump((job, dict(env or {}), arguments), self._jobs)
        self._jobs.flush()
        while True:
            try:
                kind, value = pickle.load(self._answers)
            except EOFError:
                raise JobError(f"{job}: the process that runs jobs died ({self._process.wait()})") from None
            if kind == "returned":
                return value
            if kind == "raised":
                raise JobError(*value)
            if on_progress:
                on_progress(value)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._jobs.close()
        self._process.wait()
        self._answers.close()


def report(value: Any) -> None:
    """In a job: tell the caller how far it is."""
    if _answers:
        _send(_answers, ("progress", value))


def function(path: str) -> Callable[..., Any]:
    """The function `module:name`."""
    module, _, name = path.partition(":")
    named: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return named


def _send(file: IO[bytes], message: tuple[str, Any]) -> None:
    pickle.dump(message, file)
    file.flush()


def _run(job: str, env: dict[str, str], arguments: dict[str, Any], result: Path) -> None:
    """The fork: run the job, its output captured, and leave what came of it in `result`."""
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


def serve(prepare: str, *imports: str) -> None:
    """The process itself: run jobs until there are no more."""
    global _answers
    _answers = os.fdopen(os.dup(1), "wb")
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
            os._exit(0)  # skip what the libraries print at exit
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            if (child := os.fork()) == 0:
                _run(job, env, arguments, result)
            _, status = os.waitpid(child, 0)
            died = ("raised", (f"{job} died with the wait status {status}",))
            outcome = pickle.loads(result.read_bytes()) if result.exists() else died
        _send(_answers, outcome)
