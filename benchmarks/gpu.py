# SPDX-License-Identifier: Apache-2.0
"""On a GPU: parity for each attention backend that takes sinks, sinks after loading, and throughput.

    python -m benchmarks.gpu                        # one GPU with 40 GiB or more, at most 8 minutes
    python -m benchmarks.gpu --device cpu --small   # the same code on a CPU and tiny models

Checkpoints are made here, nothing is downloaded. CUDA graphs and torch.compile are on, as `vllm serve` has them.
What the time does not suffice for is listed as not run.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.report import markdown
from vllm_tf_sinks.parity import compare, pytest_plugin
from vllm_tf_sinks.parity.fork_server import ForkServer, JobError

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("bfloat16", "float32")
REFUSED = 100  # characters of a reason
ROUNDS = 3

Row = list[str]
Step = tuple[str, Callable[[], list[Row]]]  # what it is, and what measures it


@dataclass(frozen=True)
class Sizes:
    """Of the checkpoints, and of the load."""

    hidden: int
    layers: int
    vocabulary: int
    big: dict[str, int]
    requests: int
    prompt: int
    new_tokens: int


FULL = Sizes(1024, 4, 32_768, {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}, 256, 128, 128)
SMALL = Sizes(128, 2, 512, {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}, 2, 8, 2)


class Bench:
    """One run of this file."""

    def __init__(self, device: str, sizes: Sizes, scratch: Path, fork_server: ForkServer) -> None:
        """Make the checkpoints."""
        self.device, self.sizes, self.fork_server = device, sizes, fork_server
        self.small, self.big = str(scratch / "parity"), str(scratch / "throughput")
        fork_server.run("benchmarks.gpu:make", is_small=sizes is SMALL, parity=self.small, throughput=self.big)
        self.backends: list[str] = fork_server.run("benchmarks.gpu:backends", device=device)
        self.references: dict[str, compare.Reference] = {}

    def steps(self) -> Iterator[Step]:
        """In the order of what they are worth, should the time run out."""
        for backend in self.backends:
            yield f"sinks after loading, {backend}", lambda backend=backend: self.sinks(backend)
        for dtype in DTYPES:
            for backend in self.backends:
                yield f"parity, {backend}, {dtype}", lambda b=backend, d=dtype: self.parity(b, d)
            if dtype == DTYPES[0]:
                for name in ("plugin off", "plugin on", "native"):
                    yield f"throughput, {name}", lambda name=name: self.throughput(name)

    def engine(self, backend: str = "") -> dict[str, Any]:
        """Arguments of an engine: as few CUDA graphs as the requests need."""
        options: dict[str, Any] = {"max_num_seqs": 8, "enforce_eager": self.device == "cpu"}
        if self.device != "cpu":
            options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
        return options | ({"attention_backend": backend} if backend else {})

    def sinks(self, backend: str) -> list[Row]:
        """The sinks that the kernels read."""
        options = {"dtype": DTYPES[0], "checkpoint": self.small, **self.engine(backend), "enforce_eager": True}
        return [
            [f"sinks after loading, {backend}", self.fork_server.run("benchmarks.gpu:sinks_after_loading", **options)]
        ]

    def parity(self, backend: str, dtype: str) -> list[Row]:
        """Logprobs against Hugging Face eager in the same dtype, plugin on."""
        if dtype not in self.references:
            job = "vllm_tf_sinks.parity.logprobs:hugging_face_logprobs"
            self.references[dtype] = self.fork_server.run(job, model=self.small, dtype=dtype)
        engine = {"dtype": dtype, **self.engine(backend)}
        run = compare.run_vllm(
            self.fork_server, compare.ON, self.small, self.references[dtype], compare.TOLERANCES[dtype], engine
        )
        what = f"parity, {backend}, {dtype}"
        if run.comparison is None:
            return [[what, _refused(run.reason)]]
        prompt, decode = (run.comparison.statistics(is_new) for is_new in (False, True))
        figures = [f"{name} mean {s.mean:.2g}, max {s.largest:.2g}" for name, s in
                   (("prompt", prompt), ("decode", decode))]  # fmt: skip
        return [[what, f"{run.outcome}: {'; '.join(figures)}"]]

    def throughput(self, name: str) -> list[Row]:
        """Output tokens a second of a Granite in bfloat16."""
        sizes = self.sizes
        tokens = self.fork_server.run(
            "benchmarks.gpu:output_tokens",
            {"VLLM_TF_SINKS": "0" if name == "plugin off" else "1"},
            checkpoint=self.big,
            model_impl="vllm" if name == "native" else "transformers",
            enforce_eager=self.device == "cpu",
            requests=sizes.requests,
            prompt=sizes.prompt,
            new_tokens=sizes.new_tokens,
        )
        return [[f"throughput of a Granite, bfloat16, {name}", f"{statistics.median(tokens):,.0f} output tokens/s "
                 f"({min(tokens):,.0f} to {max(tokens):,.0f})"]]  # fmt: skip


def make(is_small: bool, parity: str, throughput: str) -> None:
    """A job: a small GraniteSWA with weights, and the config of a larger Granite."""
    from transformers import GraniteConfig, GraniteSWAConfig

    from vllm_tf_sinks.parity.logprobs import random_checkpoint

    sizes = SMALL if is_small else FULL
    heads = {"num_attention_heads": max(4, sizes.hidden // 64), "num_key_value_heads": max(2, sizes.hidden // 128)}
    shape = {"vocab_size": sizes.vocabulary, "logits_scaling": 8.0, "pad_token_id": 0}
    small = {"hidden_size": sizes.hidden, "intermediate_size": 2 * sizes.hidden, "num_hidden_layers": sizes.layers}
    config = GraniteSWAConfig(**small, **heads, **shape, sliding_window=16)
    config.architectures = ["GraniteSWAForCausalLM"]
    random_checkpoint(config, parity)
    big_heads = max(4, sizes.big["hidden_size"] // 64)
    big = GraniteConfig(**sizes.big, **shape, num_attention_heads=big_heads, num_key_value_heads=max(2, big_heads // 4))
    big.architectures = ["GraniteForCausalLM"]
    big.save_pretrained(throughput)


def backends(device: str) -> list[str]:
    """A job: attention backends to try; FlashInfer in any case, whose refusal is a result too."""
    from vllm_tf_sinks.compat.attention import backends_with_sinks

    found = backends_with_sinks()
    return found if device == "cpu" or "FLASHINFER" in found else [*found, "FLASHINFER"]


def sinks_after_loading(checkpoint: str, **engine: Any) -> str:
    """A job: in which dtype each kernel has its sinks, and whether they are the checkpoint's."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM

    from vllm_tf_sinks.compat.attention import attention_layers

    saved = load_file(Path(checkpoint) / "model.safetensors")

    def look(model: Any) -> str:
        found = {index: layer.impl.sinks for index, layer in attention_layers(model).items()}
        dtypes = sorted({str(each.dtype) for each in found.values()})
        same = all(
            torch.equal(each.float().cpu(), saved[f"model.layers.{index}.self_attn.sinks"].to(each.dtype).float())
            for index, each in found.items()
        )
        return f"{', '.join(dtypes)} in {len(found)} layers, {'' if same else 'not '}the checkpoint's"

    options = {"model_impl": "transformers", "skip_tokenizer_init": True, "max_model_len": 64}
    return LLM(checkpoint, kv_cache_memory_bytes=2**28, **{**options, **engine}).apply_model(look)[0]


def output_tokens(
    checkpoint: str, model_impl: str, enforce_eager: bool, requests: int, prompt: int, new_tokens: int
) -> list[float]:
    """A job: output tokens a second, run by run."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        model_impl=model_impl,
        enforce_eager=enforce_eager,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=prompt + new_tokens + 1,
        max_num_seqs=max(8, requests),
        kv_cache_memory_bytes=2**34 if requests > SMALL.requests else 2**28,
    )
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [1 + (i * 7 + each) % 200 for i in range(prompt)]} for each in range(requests)]
    seconds = []
    for _ in range(1 + ROUNDS):  # the first is for what is set up by use
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    return [requests * new_tokens / each for each in seconds[1:]]


def _refused(reason: str) -> str:
    line = " ".join(reason.split()).replace("|", "/")
    return f"refused: {line[:REFUSED]}" + ("…" if len(line) > REFUSED else "")


def _environment(device: str) -> dict[str, str]:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **settings, **(pytest_plugin.SETTINGS if device == "cpu" else {}), "PYTHONPATH": str(ROOT)}


def measured(steps: Iterable[Step], minutes: float) -> list[Row]:
    """The rows of each step; one that fails is a row too, and so is one that there is no time for."""
    end = time.monotonic() + 60 * minutes
    rows: list[Row] = []
    longest = 0.0
    for what, measure in (bar := tqdm(list(steps))):
        bar.set_description(what)
        begin = time.monotonic()
        if begin + longest >= end:
            rows.append([what, f"not run: {minutes:g} minutes are over"])
            continue
        try:
            rows += measure()
        except JobError as error:
            rows.append([what, _refused(error.error)])
        longest = max(longest, time.monotonic() - begin)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny checkpoints")
    parser.add_argument("--minutes", type=float, default=8, help="stop in time for this (%(default)s)")
    options = parser.parse_args()
    imports = ("transformers", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine")
    with tempfile.TemporaryDirectory() as scratch, ForkServer(_environment(options.device), imports) as fork_server:
        bench = Bench(options.device, SMALL if options.small else FULL, Path(scratch), fork_server)
        rows = measured(bench.steps(), options.minutes)
    print(markdown(["what", "result"], rows))
    return int(any(compare.DIFFERS in result or "not the checkpoint's" in result for _, result in rows))


if __name__ == "__main__":
    sys.exit(main())
