# SPDX-License-Identifier: Apache-2.0
"""Beside other plugins, whichever comes first: both work, or ours refuses; and either can be undone first."""

import pytest
from support.comparison import from_hugging_face
from support.fork_server import JobError

CLOSE = 1e-4

# plugin -> a model that it may break, and what the plugin must have done for that
WORKING = {
    "wrap_the_same": ("granite_swa_scaled", {"__init__", "_patch_config", "pipeline_parallel", "load_weights"}),
    "wrap_processor": ("granite", {"forward"}),
    "project_in_float32": ("granite", {"_get_logits"}),
    "replace_processor": ("modernbert-decoder", {"_get_logits"}),
    "replace_lm_head": ("granite", {"apply"}),
}
ORDERS = ["before", "after"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plugin", WORKING)
def test_both_work(vllm, checkpoint, plugin, order):
    name, called = WORKING[plugin]
    folder = checkpoint(vllm, name)
    served, used = vllm.run("support.plugin_jobs:served_beside", checkpoint=folder, plugin=plugin, order=order)
    assert from_hugging_face(vllm, folder, served) < CLOSE
    assert called <= set(used)


REFUSED = {
    "predict_tokens": r"needs logits, but another plugin lets LogitsProcessor return torch\.int32 values.*=sinks",
    "wrap_compute_logits": r"GraniteForCausalLM needs a compute_logits of its own, but support\.plugin_jobs has "
    r"already replaced the one of TransformersForCausalLM.*=sinks",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plugin", REFUSED)
def test_head_that_another_plugin_would_spoil_is_refused(vllm, checkpoint, plugin, order):
    serve = {"checkpoint": checkpoint(vllm, "granite"), "max_num_seqs": 1}  # single rows, for FlashHead
    with pytest.raises(JobError, match=REFUSED[plugin]):
        vllm.run("support.plugin_jobs:served_beside", plugin=plugin, order=order, **serve)


def test_plain_projection_is_left_to_another_plugin(vllm, checkpoint):
    folder = checkpoint(vllm, "llama")
    beside = {"plugin": "wrap_compute_logits", "order": "before"}
    served, used = vllm.run("support.plugin_jobs:served_beside", checkpoint=folder, **beside)
    assert from_hugging_face(vllm, folder, served) < CLOSE
    assert used["compute_logits"]


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("order", ORDERS)
def test_undone_in_either_order(vllm, order, first):
    outcome = vllm.run("support.plugin_jobs:undone", plugin="wrap_the_same", order=order, first=first)
    # Only one who undoes what we are out of already puts ours back: the rows say so
    puts_ours_back = order == "after" and first == "ours"
    assert bool(outcome["left"]) == puts_ours_back
    assert ("applied" in outcome["off"].values()) == puts_ours_back
    assert not outcome["finally"]
    assert set(outcome["again"].values()) <= {"applied", "not needed"}
    assert set(outcome["wrappers"].values()) <= {0, 1}  # never two of ours
