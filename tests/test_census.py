# SPDX-License-Identifier: Apache-2.0
"""A sample of what `make census` measures: types that only the plugin serves right, and those that a guard refuses."""

import compatibility
import pytest
from support.parity import Verdict, check

PLUGIN, UPSTREAM = "1", "0"

# Wrong, crashed or refused without the plugin
RIGHT = {
    "gemma3_text": "its attention ignores the soft cap that vLLM reads from its config",
    "granitemoe": "it scales its logits",
    "laguna": "its router has a bias and its experts a scale that vLLM does not find",
    "phimoe": "its router inherits from nn.Linear",
}
REFUSED = {
    "axk2": r"AXK2Model does not run as vLLM calls it, without an attention mask and a cache: TypeError",
    "doge": r"DogeAttention of DogeModel passes an attention mask of its own",
    "git": r"GitForCausalLM' is not compatible|GitForCausalLM looks up its attention class by name",
    "jetmoe": r"JetMoeAttention of JetMoeModel computes layer 0 with 4 key-value heads, vLLM with 2",
    "minimax_m3_vl_text": r"MiniMaxM3VLExperts of MiniMaxM3VLTextModel has another activation",
    "zaya": r"ZayaModel keeps a convolution's state and a recurrent state between tokens",
}
# Right on newer versions of vLLM or of Transformers, refused on older ones
RIGHT_OR_REFUSED = {
    "aria_text": r"AriaExperts of AriaTextModel keeps its weights transposed",
    "longcat_flash": r"LongcatFlashExperts of LongcatFlashModel has 6 experts, of which only 4 have weights",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_with_the_plugin_only(vllm, name):
    found = check(vllm, name, False, [PLUGIN, UPSTREAM])
    assert Verdict(**found[PLUGIN]).outcome == "right", found
    assert Verdict(**found[UPSTREAM]).outcome != "right"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(vllm, name):
    found = check(vllm, name, False, [PLUGIN])
    assert found[PLUGIN]["outcome"] == "refused", found
    assert_matches(REFUSED[name], found[PLUGIN]["reason"])


@pytest.mark.parametrize("name", RIGHT_OR_REFUSED)
def test_right_or_refused_by_name(vllm, name):
    found = check(vllm, name, False, [PLUGIN])
    if found[PLUGIN]["outcome"] != "right":
        assert found[PLUGIN]["outcome"] == "refused", found
        assert_matches(RIGHT_OR_REFUSED[name], found[PLUGIN]["reason"])


def test_window_that_the_mask_does_not_have(vllm):
    found = check(vllm, "moshi", False, [PLUGIN, UPSTREAM], sliding_window=4)
    assert found[UPSTREAM]["outcome"] in ("wrong", "crashed")
    window = r"MoshiAttention .* another mask than vLLM's, which is causal with a window of 4"
    no_layer = r"MoshiAttention of MoshiModel does not get attention_instances"  # up to vLLM 0.29
    assert_matches(f"{window}|{no_layer}", found[PLUGIN]["reason"])


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


def test_table_is_what_was_measured():
    assert compatibility.TABLE.read_text() == compatibility.table(compatibility.load())


def test_no_type_is_wrong_or_crashes():
    for name, model in compatibility.load().items():
        for pair, found in model["vllm"].items():
            assert found["plugin"] not in ("wrong", "crashed"), (name, pair, found)
