# SPDX-License-Identifier: Apache-2.0
"""Sinks over two real workers: each rank's heads get their own."""

import pytest
from support.fork_server import JobError
from support.tp_jobs import ENV

EXACT = 1e-5
DROPPED = 0.05
DROP = "support.tampers:drop_sinks"
SERVE = {"job": "support.tp_jobs:served_by_two"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt_oss", {}), ("mimo_v2_flash", {"num_key_value_heads": 2})],  # which has four in its sliding layers
)
def test_sharded_heads_equal_hugging_face(vllm, checkpoint, difference, name, changes):
    folder = checkpoint(vllm, name, **changes)
    assert difference(vllm, folder, env=ENV, **SERVE) < EXACT
    assert difference(vllm, folder, env=ENV, tamper=DROP, **SERVE) > DROPPED


def test_planned_projections_equal_hugging_face(vllm, checkpoint, difference):
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form="holder")
    assert difference(vllm, folder, env=ENV, trust_remote_code=True, **SERVE) < EXACT


def test_key_value_heads_fewer_than_ranks_are_refused_in_a_layer_without_a_sink(vllm, checkpoint):
    folder = checkpoint(vllm, "mimo_v2_flash")  # one in its full layers
    message = r"model\.layers\.\d\.self_attn has 1 key-value heads, which tensor_parallel_size=2 does not divide"
    with pytest.raises(JobError, match=message):
        vllm.run(SERVE["job"], env=ENV, checkpoint=folder)


@pytest.mark.parametrize("form", ["plain", "cast"])
def test_heads_that_no_plan_shards_equal_hugging_face(vllm, checkpoint, difference, form):
    """Its projections cannot be fused, so both ranks compute all heads and need all sinks."""
    folder = checkpoint(vllm, "offset_llama", "remote", sink_form=form, has_plan=False)
    assert difference(vllm, folder, env=ENV, trust_remote_code=True, **SERVE) < EXACT


def test_workers_that_vllm_spawns_equal_hugging_face(vllm, checkpoint, difference):
    """As vLLM starts them on a CPU: each imports all anew, registers, and patches on import."""
    if vllm.version != "0.29.0":
        pytest.skip("takes a minute: on one version, which drops sinks itself")
    folder = checkpoint(vllm, "gpt_oss")
    assert difference(vllm, folder, env=ENV, start="spawn", **SERVE) < EXACT
