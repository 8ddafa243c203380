# SPDX-License-Identifier: Apache-2.0
"""A rank's slice of a sink: the heads of its queries, loaded from the whole tensor of the checkpoint."""

import pytest
from support.fork_server import JobError

JOB = "support.shard_jobs:place"


@pytest.mark.parametrize("projection", ["fused", "sharded"])
def test_each_rank_of_two_loads_its_half(vllm, projection):
    first = vllm.run(JOB, rank=0, ranks=2, projection=projection)
    second = vllm.run(JOB, rank=1, ranks=2, projection=projection)
    assert first["numbers"] == [0, 1, 2, 3]
    assert second["numbers"] == [4, 5, 6, 7]
    assert first["heads"] == (0, 4, 2)
    assert second["heads"] == (4, 4, 2)
    assert not first["trained"]
    assert first["loader"]  # vLLM's reload asks for its name


@pytest.mark.parametrize("projection", ["gathered", "replicated"])
def test_heads_that_every_rank_computes_keep_the_whole_sink(vllm, projection):
    placed = vllm.run(JOB, rank=1, ranks=2, projection=projection)
    assert placed["numbers"] == list(range(8))
    assert placed["heads"] == (0, 8, 4)


def test_one_rank_has_it_all(vllm):
    placed = vllm.run(JOB, rank=0, ranks=1)
    assert placed["numbers"] == list(range(8))
    assert placed["heads"] == (0, 8, 4)


def test_fewer_key_value_heads_than_ranks(vllm):
    placed = vllm.run(JOB, rank=3, ranks=4, key_value_heads=2)
    assert placed["numbers"] == [6, 7]
    assert placed["heads"] == (6, 2, 1)


def test_unfused_key_value_heads_fewer_than_ranks_are_refused(vllm):
    message = r"SinkError: model\.layers\.0\.self_attn has 2 key-value heads.*tensor_parallel_size=4"
    with pytest.raises(JobError, match=message):
        vllm.run(JOB, rank=0, ranks=4, key_value_heads=2, projection="sharded")


@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (8, 1), (1, 8)])
def test_dimensions_of_the_parameter_stay(vllm, shape):
    placed = vllm.run(JOB, rank=1, ranks=2, shape=shape)
    assert placed["shape"] == tuple(4 if size == 8 else size for size in shape)
    assert placed["numbers"] == [4, 5, 6, 7]


def test_dtype(vllm):
    assert vllm.run(JOB, rank=0, ranks=2, dtype="bfloat16")["dtype"] == "torch.bfloat16"


@pytest.mark.parametrize("loaded", [(4,), (9,), (2, 2), ()])
def test_checkpoint_of_another_size_is_refused(vllm, loaded):
    message = r"SinkError: The checkpoint's model\.layers\.0\.self_attn\.sinks has .* the model has 8 heads"
    with pytest.raises(JobError, match=message):
        vllm.run(JOB, rank=1, ranks=2, loaded=loaded)


def test_short_sink_of_a_real_checkpoint_is_refused(vllm, checkpoint):
    source = checkpoint(vllm, "gpt_oss")
    folder = checkpoint(vllm, "short", "support.sink_jobs:rewrite", source=source, rewriter="with_a_short_sink")
    message = r"model\.layers\.1\.self_attn\.sinks has the shape \(3,\), but the model has 4 heads"
    with pytest.raises(JobError, match=message):
        vllm.run("support.jobs:served_rows", checkpoint=folder)


def test_indivisible_heads_are_refused_with_the_sizes_that_work(vllm):
    message = r"self_attn\.sinks has 8 heads, which tensor_parallel_size=3 does not divide\. .*: 1, 2, 4, 8\."
    with pytest.raises(JobError, match=message):
        vllm.run(JOB, rank=0, ranks=3)
