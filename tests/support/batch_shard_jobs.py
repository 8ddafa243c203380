# SPDX-License-Identifier: Apache-2.0
"""Sampling of a batch that is split over the ranks: by model runner v2, or its exchange of logits alone."""

from support.checkpoints import SIZES
from support.jobs import ENGINE, call, rows_of
from support.tp_jobs import two_workers

ROWS = [3, 2]  # how many rows of the batch each rank samples


def shares(checkpoint: str) -> list[dict]:
    """For each of two ranks, how the logits of its share of a batch compare with those gathered."""
    from vllm import LLM

    with two_workers():
        return LLM(checkpoint, tensor_parallel_size=2, **ENGINE).apply_model(_share)


def _share(model) -> dict:
    import torch

    rank = model.tp_group.rank_in_group
    torch.manual_seed(0)
    hidden = torch.randn(sum(ROWS), model.text_config.hidden_size)
    gathered = model.compute_logits(hidden)
    shared = _exchange(model.compute_logits_local(hidden), rank)[:, : gathered.shape[-1]]
    own = gathered.split(ROWS)[rank]
    return {"shape": tuple(shared.shape), "equal": torch.equal(shared, own), "spread": float(own.std())}


def _exchange(local_logits, rank: int):
    """Of the shards of `ROWS` rows, the whole rows that this rank samples."""
    import torch
    from vllm.v1.worker.gpu.sample import batch_shard

    if hasattr(batch_shard, "all_to_all_vocab_shards"):  # from vLLM 0.34
        return batch_shard.all_to_all_vocab_shards(local_logits, ROWS, ROWS[rank])
    metadata = batch_shard.BatchShardMetadata(2, ROWS, ROWS[rank], ROWS[rank], max(ROWS), torch.arange(sum(ROWS)), 1)
    return batch_shard.all_to_all_logits(local_logits, metadata)


def why_no_sharded_sampling() -> str:
    """Why no engine can sample a batch in shares here, or ""."""
    from vllm.triton_utils import HAS_TRITON

    return "" if HAS_TRITON else "this vLLM runs model runner v1 here, which samples a batch as a whole"


def sampled_in_shares(checkpoint: str, prompts: list[list[int]], tamper: str = "", **engine) -> dict:
    """What comes of serving `prompts` in one batch on two ranks, each of which samples its share.

    Returns:
        rows: what `rows_of` returns; shared: for each rank, how often it computed the logits of its shard alone,
        None where vLLM leaves that out.
    """
    from vllm import LLM
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if tamper:
        call(tamper)
    # As if the ranks were on two machines: the kernels for shared memory gather no integers
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    vocabulary = SIZES["vocab_size"]  # vLLM refuses an open number of logprobs here
    options = {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True, "max_num_seqs": 8}
    with two_workers():
        llm = LLM(checkpoint, **{**ENGINE, "max_logprobs": vocabulary, **options, **engine})
        llm.collective_rpc(_count_local_logits)
        return {"rows": rows_of(llm, prompts), "shared": llm.collective_rpc(_local_logits)}


def _count_local_logits(worker) -> None:
    """Count how often a rank computes its shard of logits, if the runner splits batches."""
    runner = worker.model_runner
    if runner.batch_sharder is None:
        return
    compute = runner.model.compute_logits_local

    def counting(hidden_states):
        counting.calls += 1
        return compute(hidden_states)

    counting.calls = 0
    runner.model.compute_logits_local = counting


def _local_logits(worker) -> int | None:
    return getattr(getattr(worker.model_runner.model, "compute_logits_local", None), "calls", None)
