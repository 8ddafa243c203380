# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from overlay import overlay
from support.fork_server import SETTINGS

from vllm_tf_sinks.compat.engine import TESTED

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def model(vllm, checkpoint, monkeypatch):
    """A Granite with a tokenizer, while new processes of Python find the vLLM under test."""
    if vllm.version != TESTED[-1]:
        pytest.skip("the examples run on the newest vLLM")
    monkeypatch.setenv("PYTHONPATH", str(overlay(vllm.version) or ""))
    folder = checkpoint(vllm, "granite", tie_word_embeddings=False)
    vllm.run("support.checkpoints:add_tokenizer", folder=folder)
    return folder


def run(*command: str, **environment: str) -> str:
    """What a command prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = os.environ | SETTINGS | {"PATH": path} | environment
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tokens(output: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines() if line.startswith("   ")]


def offline(model: str, environment: dict[str, str] | None = None, **options) -> list[str]:
    options = {"enforce_eager": True, "dtype": "float32", **options}
    return tokens(
        run(sys.executable, "examples/offline_inference.py", model, json.dumps(options), **(environment or {}))
    )


def test_offline_online_and_on_two_ranks_the_same_is_said(vllm, model, tmp_path):
    from serving import server

    workers = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    said = offline(model)
    assert len(said) == 8
    assert offline(model, workers, tensor_parallel_size=2) == said
    with server(Path(model), overlay(vllm.version), True, tmp_path) as started:
        started.wait()
        address = f"http://127.0.0.1:{started.port}"
        assert tokens(run(sys.executable, "examples/online_client.py", address)) == said


def test_check_before_deployment(model):
    output = run("bash", "examples/check_before_deployment.sh", model)
    assert "elementwise" in output
