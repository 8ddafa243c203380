# SPDX-License-Identifier: Apache-2.0
"""Time `compute_logits` of a Granite's head: stock vLLM's, the head as written, and as this package runs it.

    python benchmarks/compute_logits.py

One process, one thread, the three in turn, so that they see the same machine. Times are medians in microseconds.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from transformers import GraniteConfig, GraniteForCausalLM
from vllm import LLM

SIZES = {"hidden_size": 128, "vocab_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = [1, 8, 64]
CALLS = 300


def microseconds(function: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> float:
    start = time.perf_counter()
    function(hidden)
    return (time.perf_counter() - start) * 1e6


def measure(model: Any) -> list[tuple[int, float, float, float]]:
    """Rows of hidden states, and the median time of stock, as written, and as run here."""
    from vllm_tf_sinks.head.classify import Kind, Plan
    from vllm_tf_sinks.head.run import logits_function

    torch.set_num_threads(1)
    as_written = logits_function(model, model.own_head, Plan(Kind.WHOLE, flat=False))
    functions = [lambda hidden: type(model).compute_logits(model, hidden), as_written, model.compute_logits]
    table = []
    with torch.inference_mode():
        for rows in ROWS:
            hidden = torch.randn(rows, SIZES["hidden_size"], dtype=model.model_config.dtype)
            times = [[microseconds(f, hidden) for f in functions] for _ in range(CALLS)]
            table.append((rows, *(statistics.median(column) for column in zip(*times, strict=True))))
    return table


def main() -> None:
    config = GraniteConfig(**SIZES, num_hidden_layers=2, logits_scaling=8.0)
    with tempfile.TemporaryDirectory() as folder:
        GraniteForCausalLM(config).save_pretrained(folder)
        llm = LLM(
            folder,
            model_impl="transformers",
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            num_gpu_blocks_override=32,
        )
        (table,) = llm.apply_model(measure)
    print("| rows | stock vLLM (wrong logits) | as written | this package |")
    print("| ---: | ---: | ---: | ---: |")
    for rows, *times in table:
        print(f"| {rows} | " + " | ".join(f"{t:.0f}" for t in times) + " |")


if __name__ == "__main__":
    main()
