# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a context manager, and what it answers."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

STARTUP_S = 300
LOG_LINES = 30  # shown when a server fails

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # spares each server 10 to 20 s of compiling one small function
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OPTIONS = [
    *("--model-impl", "transformers", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "256", "--max-num-seqs", "4"),
]


@dataclass
class Answer:
    """The text, all tokens with those of the prompt in front, and the logprob of each token but the first."""

    text: str
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Server:
    """A running `vllm serve`."""

    process: subprocess.Popen[bytes]
    port: int

    def wait(self) -> None:
        """Return when it answers requests; raise if it ends instead, or takes too long."""
        deadline = time.monotonic() + STARTUP_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except OSError:  # it does not listen yet
                time.sleep(0.5)
        raise RuntimeError(f"vllm serve did not come up (exit status {self.process.poll()})")

    def call(self, prompt: str, new_tokens: int) -> Answer:
        """The greedy answer to a prompt."""
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none")
        choice = client.completions.create(
            model="demo",
            prompt=prompt,
            max_tokens=new_tokens,
            temperature=0,
            logprobs=0,
            extra_body={"prompt_logprobs": 0, "return_token_ids": True},
        ).choices[0]
        told: dict[str, Any] = choice.model_dump()
        given = told["prompt_token_ids"]
        # By place in the prompt, then by token; there is none for the first.
        places = zip(given[1:], told["prompt_logprobs"][1:], strict=True)
        logprobs = [place[str(token)]["logprob"] for token, place in places]
        return Answer(choice.text, given + told["token_ids"], logprobs + told["logprobs"]["token_logprobs"])

    def stop(self) -> None:
        """End it and the processes it has started."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(10)
        with suppress(ProcessLookupError):  # whatever of the group has stayed
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def server(model: Path, overlay: Path | None, plugin: bool, scratch: Path) -> Iterator[Server]:
    """`vllm serve`, just started, the plugin on or off; whatever happens, it is gone afterwards."""
    scratch.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *OPTIONS]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= SETTINGS | {
        "PYTHONPATH": str(overlay or ""),
        "VLLM_TF_SINKS": str(int(plugin)),
        "XDG_CACHE_HOME": str(scratch),
        "XDG_CONFIG_HOME": str(scratch),
    }
    log = scratch / "server.log"
    # vLLM leaves files behind in its TMPDIR; one below `scratch` could be too long a path for its sockets.
    with tempfile.TemporaryDirectory() as environment["TMPDIR"], log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,  # its engine is a process too: the group is what is stopped
        )
        started = Server(process, port)
        try:
            yield started
        except Exception:
            print(f"\n{log} ends:", *log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")
            raise
        finally:
            started.stop()
