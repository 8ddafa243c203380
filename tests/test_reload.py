# SPDX-License-Identifier: Apache-2.0
"""Weights put into a running engine take effect as in a cold start: sinks, biases, and the head's own weights."""

import numpy as np
import pytest
from support.fork_server import JobError

JOBS = "support.reload_jobs"
SAME = 1e-5


def seeds(vllm, checkpoint, name, tied):
    return (checkpoint(vllm, name, seed=seed, tie_word_embeddings=tied) for seed in (0, 1))


def cold_start(vllm, folder):
    return vllm.run("support.jobs:served_rows", checkpoint=folder)


def distance(one, other) -> float:
    """The largest difference of log-softmax rows; infinite where the continuations differ."""
    if [tokens for tokens, *_ in one] != [tokens for tokens, *_ in other]:
        return float("inf")
    pairs = (
        (a, b) for (_, *rows), (_, *others) in zip(one, other, strict=True) for a, b in zip(rows, others, strict=True)
    )
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "tied"),
    [("gpt_oss", False), ("granite", False), ("modernbert-decoder", False), ("bert", False), ("bert", True)],
)
def test_reload_equals_cold_start(vllm, checkpoint, name, tied):
    first, second = seeds(vllm, checkpoint, name, tied)
    cold = cold_start(vllm, second)
    warm = vllm.run(f"{JOBS}:reloaded_rows", checkpoint=first, others=[second])
    assert distance(cold, cold_start(vllm, first)) > 0.05
    assert distance(cold, warm) < SAME


@pytest.mark.parametrize(("name", "fragment"), [("granite_swa", "sinks"), ("bert", "output_head")])
def test_in_place_reload_equals_cold_start(vllm, checkpoint, name, fragment):
    first, second = seeds(vllm, checkpoint, name, tied=False)
    found = vllm.run(f"{JOBS}:reloaded_in_place", checkpoint=first, other=second, fragment=fragment)
    assert distance(found["cold"], found["warm"]) < SAME
    assert found["same_memory"]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["gpt_oss", "modernbert-decoder", "gemma2"])
def test_reload_after_sleep_equals_cold_start(vllm, checkpoint, name, level):
    first, second = seeds(vllm, checkpoint, name, tied=False)
    woken = vllm.run(f"{JOBS}:woken_rows", checkpoint=first, other=second, level=level)
    assert distance(cold_start(vllm, second), woken) < SAME


def test_reload_of_a_tied_weight_under_both_names(vllm, checkpoint):
    """A trainer's state dict has it twice."""
    first, second = seeds(vllm, checkpoint, "granite", tied=True)
    aliases = {"lm_head__weight": "model.embed_tokens.weight"}
    warm = vllm.run(f"{JOBS}:reloaded_with", checkpoint=first, other=second, **aliases)
    assert distance(cold_start(vllm, second), warm) < SAME


@pytest.fixture
def untied_weights(vllm, checkpoint, tmp_path):
    """Two checkpoints that say they are tied, but have a projection of their own."""
    retag = "support.checkpoints:retagged"
    return [
        vllm.run(retag, folder=str(tmp_path / str(index)), source=source, tie_word_embeddings=True)
        for index, source in enumerate(seeds(vllm, checkpoint, "granite", tied=False))
    ]


def test_reload_of_a_tied_model_with_a_weight_of_its_own(vllm, untied_weights):
    first, second = untied_weights
    warm = vllm.run(f"{JOBS}:reloaded_rows", checkpoint=first, others=[first, second])
    assert distance(cold_start(vllm, second), warm) < SAME


def test_tied_engine_does_not_take_another_projection_in_silence(vllm, checkpoint, untied_weights):
    tied = checkpoint(vllm, "granite", tie_word_embeddings=True)
    with pytest.raises(JobError, match=r"GraniteForCausalLM is tied .* Start an engine with them"):
        vllm.run(f"{JOBS}:reloaded_rows", checkpoint=tied, others=untied_weights[:1])
