# SPDX-License-Identifier: Apache-2.0
"""Every causal LM class of Transformers: the head alone equals the class fed the same hidden states, or is refused."""

import pytest
from support.fork_server import JobError

CLOSE = 1e-5

REFUSED = {
    "Gemma4AssistantForCausalLM": "needs more than hidden states",
    "Gemma4UnifiedAssistantForCausalLM": "needs more than hidden states",
    "MusicgenForCausalLM": "no single projection to the vocabulary",
    "MusicgenMelodyForCausalLM": "no single projection to the vocabulary",
    "ProphetNetForCausalLM": "needs more than hidden states",
}
NEEDS_TIMM = {"Gemma3nForConditionalGeneration"}

KINDS = {"projection only", "elementwise", "full"}  # and none that has to be run eagerly


@pytest.fixture(scope="module")
def census(vllm):
    """The kind and difference of each class, or the error. They differ with Transformers, and not with vLLM."""
    found = {}
    for model_type, name in vllm.run("support.census:classes"):
        try:
            found[model_type, name] = vllm.run("support.census:check", model_type=model_type, name=name)
        except JobError as error:
            found[model_type, name] = str(error)
    return found


def test_every_head_equals_its_class(census):
    refused = {name: outcome for (_, name), outcome in census.items() if isinstance(outcome, str)}
    assert refused.keys() == REFUSED.keys() | NEEDS_TIMM
    for name, reason in REFUSED.items():
        assert f"HeadError: {name}" in refused[name]
        assert reason in refused[name]
    for name in NEEDS_TIMM:  # its vision tower is built by timm, which needs a torchvision that tests do without
        assert "timm" in refused[name]
    far = {key: outcome for key, outcome in census.items() if not isinstance(outcome, str) and outcome[1] > CLOSE}
    assert not far


def test_kinds(census):
    kinds = {outcome[0] for outcome in census.values() if not isinstance(outcome, str)}
    assert kinds == KINDS
