# SPDX-License-Identifier: Apache-2.0
"""One fork_server a vLLM version, checkpoints made once a session, and the comparison with Hugging Face."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from overlay import overlay
from support.fork_server import ForkServer
from support.jobs import PROMPTS
from support.parity import differences

DEFAULT_VERSIONS = ["0.29.0", "0.34.0"]


def pytest_addoption(parser):
    parser.addoption("--vllm", action="append", help="a vLLM version, or VLLM/TRANSFORMERS; may be repeated")


def pytest_generate_tests(metafunc):
    if "vllm" in metafunc.fixturenames:
        versions = metafunc.config.getoption("--vllm") or DEFAULT_VERSIONS
        metafunc.parametrize("vllm", versions, indirect=True, scope="session")


@pytest.fixture(scope="session")
def vllm(request):
    """A fork_server of one vLLM version."""
    fork_server = ForkServer(request.param.partition("/")[0], overlay(request.param))
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="session")
def vllm_fork_server(vllm):
    """Has `logprob_parity` run on each version under test."""
    return vllm


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Make a checkpoint, once for the same arguments: `checkpoint(fork_server, "gpt_oss", logits_scaling=2)`."""
    made: dict[str, str] = {}

    def make(vllm: ForkServer, name: str, builder: str = "build", **changes) -> str:
        key = repr((name, builder, sorted(changes.items())))
        job = builder if ":" in builder else f"support.checkpoints:{builder}"
        if key not in made:
            folder = str(tmp_path_factory.mktemp(name))
            made[key] = vllm.run(job, name=name, folder=folder, **changes)
        return made[key]

    return make


@dataclass
class Difference:
    """The largest absolute difference of log-softmax rows."""

    prompt: float
    decode: float

    def __lt__(self, bound: float) -> bool:
        return max(self.prompt, self.decode) < bound

    def __gt__(self, bound: float) -> bool:
        return self.prompt > bound and self.decode > bound


@pytest.fixture(scope="session")
def difference():
    """Serve a checkpoint and compare all log-softmax rows with Hugging Face: `difference(fork_server, folder)`."""

    def compare(
        vllm: ForkServer,
        folder: str,
        env: dict[str, str] | None = None,
        job: str = "support.jobs:served_rows",
        **engine,
    ) -> Difference:
        served = vllm.run(job, env=env, checkpoint=folder, **engine)
        sequences = [[*prompt, *new] for prompt, (new, _, _) in zip(PROMPTS, served, strict=True)]
        load = {"trust_remote_code": True} if engine.get("trust_remote_code") else {}
        expected = vllm.run("support.jobs:reference_rows", checkpoint=folder, sequences=sequences, **load)
        return Difference(*differences(served, expected))

    return compare
