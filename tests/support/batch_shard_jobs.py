# SPDX-License-Identifier: Apache-2.0
"""Sampling of a batch that is split over the ranks, which vLLM does on GPUs only: its exchange of logits is real."""

from support.jobs import ENGINE
from support.tp_jobs import two_workers

ROWS = [3, 2]  # how many rows of the batch each rank samples


def shares(checkpoint: str) -> list[dict]:
    """For each of two ranks, how the logits of its share of a batch compare with those gathered."""
    from vllm import LLM

    with two_workers():
        return LLM(checkpoint, tensor_parallel_size=2, **ENGINE).apply_model(_share)


def _share(model) -> dict:
    import torch
    from vllm.v1.worker.gpu.sample.batch_shard import BatchShardMetadata, all_to_all_logits

    rank = model.tp_group.rank_in_group
    metadata = BatchShardMetadata(2, ROWS, ROWS[rank], ROWS[rank], max(ROWS), torch.arange(sum(ROWS)), 1)
    torch.manual_seed(0)
    hidden = torch.randn(sum(ROWS), model.text_config.hidden_size)
    gathered = model.compute_logits(hidden)
    shared = all_to_all_logits(model.compute_logits_local(hidden), metadata)[:, : gathered.shape[-1]]
    own = gathered.split(ROWS)[rank]
    return {"shape": tuple(shared.shape), "equal": torch.equal(shared, own), "spread": float(own.std())}
