# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin for authors of models: three lines a test, clear failures, and nothing for who does not use it."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

MODELS = """
import pytest
from transformers import GraniteConfig

GRANITE = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, logits_scaling=7.3, pad_token_id=0, head_dim=32,
)


def test_checkpoint(logprob_parity):
    comparison = logprob_parity({checkpoint!r})
    assert comparison.statistics(is_new=True).largest < 1e-5
    assert comparison.reference.shape[1] == 128  # whole rows


def test_config(logprob_parity):
    logprob_parity(GraniteConfig(**GRANITE))


def test_wrong(logprob_parity):
    logprob_parity({checkpoint!r}, env={{"VLLM_TF_SINKS": "0"}})


def test_refused(logprob_parity):
    logprob_parity({refused!r}, trust_remote_code=True)
"""

UNUSED = """
import sys


def test_nothing():
    assert "vllm_tf_sinks.parity.pytest_plugin" in sys.modules
    assert not {slow!r} & set(sys.modules)
"""
SLOW = {"torch", "transformers", "vllm", "numpy"}


def pytest_on(file, environment):
    """What a run of pytest on `file` prints, and its exit status."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(file)]
    done = subprocess.run(command, env=environment, cwd=file.parent, capture_output=True, text=True, check=False)
    return done.stdout, done.returncode


def test_entry_point():
    (entry,) = entry_points(group="pytest11", name="vllm_tf_sinks")
    assert entry.value == "vllm_tf_sinks.parity.pytest_plugin"


def test_costs_nothing_unused(vllm, tmp_path):
    file = tmp_path / "test_unused.py"
    program = "import sys; print(*sys.modules)"  # Triton's interpreter, where it is installed, is imported at once
    bare = subprocess.run([sys.executable, "-c", program], env=vllm.environment, capture_output=True, text=True)
    slow = SLOW - set(bare.stdout.split())
    assert SLOW - slow <= {"numpy"}
    file.write_text(UNUSED.format(slow=slow))
    printed, status = pytest_on(file, vllm.environment)
    assert status == 0, printed


@pytest.fixture(scope="module")
def printed(vllm, checkpoint, tmp_path_factory):
    """The outcome of tests that an author might write."""
    file = tmp_path_factory.mktemp("author") / "test_models.py"
    refused = checkpoint(vllm, "offset_llama", "remote", sink_form="doubled")
    file.write_text(MODELS.format(checkpoint=checkpoint(vllm, "granite_swa_scaled"), refused=refused))
    printed, _ = pytest_on(file, vllm.environment)
    return printed


def test_right_models_pass(printed):
    assert "2 failed, 2 passed" in printed


def test_failure_shows_both_and_the_worst_places(printed):
    failure = printed.partition("test_wrong")[2].partition("test_refused")[0]
    for line in ("plugin on", "plugin off", "Largest differences, plugin on", "Differs, plugin on"):
        assert line in failure
    assert "Traceback" not in failure


def test_refusal_shows_its_reason(printed):
    assert "Refused, plugin on: SinkError: Doubled.forward passes the sink" in printed
