# SPDX-License-Identifier: Apache-2.0
"""An elementwise head on two ranks: in place on each shard, or on the gathered logits."""

import multiprocessing
from typing import Any

from benchmarks.lab import ENGINE, Lab
from benchmarks.logits import DUMMY, NARROW
from benchmarks.measure import Sample, in_turn, use_one_core
from benchmarks.report import Line, Section

TWO_WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
SHARD, GATHERED = "on the shard", "on gathered logits"


def measure(lab: Lab) -> Section:
    vocabulary = lab.sizes.vocabularies[-1]
    folder = lab.empty("Granite", **NARROW, hidden_size=lab.sizes.hidden, vocab_size=vocabulary)
    sizes = {"blocks": lab.sizes.blocks, "calls": max(1, lab.sizes.calls // 5)}
    found = lab.vllm(lab.newer).run(
        "benchmarks.sharded:samples", TWO_WORKERS, checkpoint=folder, rows=lab.sizes.rows, **sizes
    )
    section = Section()
    for rows, each in found.items():
        more = each[SHARD] - each[GATHERED]
        section.lines.append(
            Line(
                f"tensor parallel 2, elementwise head on the shard, {rows} rows of {vocabulary} logits, bfloat16; "
                "projection stubbed out",
                "the head on gathered logits",
                "faster",
                f"{each[SHARD].text('.0f', 1e6)} us",
                f"{each[GATHERED].text('.0f', 1e6)} us",
                f"{more.text('+.0f', 1e6)} us",
                more.verdict(0),
            )
        )
    return section


def samples(checkpoint: str, rows: tuple[int, ...], blocks: int, calls: int) -> dict[int, dict[str, Sample]]:
    """A job: seconds a call on the first rank, for each number of rows."""
    import os

    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def with_fork(vllm_config: Any) -> None:
        check(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # spares each worker 20 s of imports

    CpuPlatform.check_and_update_config = staticmethod(with_fork)
    try:
        llm = LLM(checkpoint, tensor_parallel_size=2, **{**ENGINE, **DUMMY})
        return llm.apply_model(_Measure(rows, blocks, calls))[0]
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
            process.join(10)


class _Measure:
    """Sent to each worker: both call the same functions in the same order, and so meet in each gather."""

    def __init__(self, rows: tuple[int, ...], blocks: int, calls: int) -> None:
        self.rows, self.blocks, self.calls = rows, blocks, calls

    def __call__(self, model: Any) -> dict[int, dict[str, Sample]]:
        import torch

        use_one_core()
        with torch.inference_mode():
            return {rows: self._samples(model, rows) for rows in self.rows}

    def _samples(self, model: Any, rows: int) -> dict[str, Sample]:
        import torch
        from torch.utils.benchmark import Timer

        from benchmarks.logits import Stub

        hidden = torch.randn(rows, model.text_config.hidden_size, dtype=torch.bfloat16)
        shard = torch.zeros(rows, model.lm_head.weight.shape[0], dtype=torch.bfloat16)
        model.lm_head.quant_method = Stub(shard)
        processor, lm_head = model.logits_processor, model.lm_head

        def gathered(hidden: Any) -> Any:
            return processor(lm_head, hidden, lm_head.bias).div_(8.0)

        functions = {SHARD: model.compute_logits, GATHERED: gathered}
        runs = {
            name: lambda f=f: Timer("f(hidden)", globals={"f": f, "hidden": hidden}).timeit(self.calls).mean
            for name, f in functions.items()
        }  # as many calls on both ranks
        return in_turn(runs, self.blocks)
