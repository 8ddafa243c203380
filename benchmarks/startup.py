# SPDX-License-Identifier: Apache-2.0
"""What `register()` and the start of an engine cost."""

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.lab import ENGINE, OFF, ON, Lab
from benchmarks.measure import MISSED, Sample, in_turn
from benchmarks.report import ROOT, Line, Section, Table

REGISTER_LIMIT = 0.010
START_LIMIT, START_SHARE = 0.3, 0.01
HEAD_LIMIT = 0.5

# What vLLM's plugin loader does once it has found the entry point
REGISTER = """
import json, sys, time
import vllm.plugins
before = set(sys.modules)
start = time.perf_counter()
from vllm_tf_sinks.plugin import register
register()
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""

# vLLM has imported torch by then: a vLLM that has not shows what register() itself imports
IMPORTS = """
import json, sys, types
vllm = sys.modules["vllm"] = types.ModuleType("vllm")
vllm.envs = sys.modules["vllm.envs"] = types.ModuleType("vllm.envs")
vllm.envs.environment_variables = {}
from vllm_tf_sinks.plugin import register
register()
print(json.dumps(sorted(sys.modules)))
"""


def measure(lab: Lab) -> Section:
    section = Section()
    section.lines += [_register(lab), _engine(lab), _head(lab)]
    section.tables += [_by_layers(lab), _by_heads(lab)]
    return section


def _register(lab: Lab) -> Line:
    # With bytecode, as an installed package has it
    environment = lab.environment(lab.newer) | {"PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "benchmarks" / "pycache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    imported: set[str] = set(_fresh(IMPORTS, environment))
    _fresh(REGISTER, environment)

    def seconds() -> float:
        taken, modules = _fresh(REGISTER, environment)
        imported.update(modules)
        return taken

    sample = in_turn({"register": seconds}, lab.sizes.rounds, "register()")["register"]
    heavy = sorted({"torch", "vllm.model_executor"} & imported)
    return Line(
        "`register()` and all that it imports, in a fresh process",
        "nothing",
        "10 ms; neither torch nor vllm.model_executor imported by it",
        f"{sample.text('.1f', 1e3)} ms",
        "",
        f"imports {' and '.join(heavy) or 'neither'}",
        MISSED if heavy else sample.verdict(REGISTER_LIMIT),
    )


def _fresh(program: str, environment: dict[str, str]) -> Any:
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _engine(lab: Lab) -> Line:
    on, off = _starts(lab, lab.model("granite"), "start of SmolLM2 as Granite", {})
    allowed = max(START_LIMIT, START_SHARE * off.median)
    return Line(
        "start of an engine, SmolLM2-135M as Granite (a fork that has vLLM imported)",
        "plugin off",
        "+1 % or +0.3 s",
        f"{on.text('.2f')} s",
        f"{off.text('.2f')} s",
        f"{(on - off).text('+.2f')} s",
        (on - off).verdict(allowed),
    )


def _starts(lab: Lab, folder: str, title: str, engine: dict[str, Any]) -> list[Sample]:
    """Seconds with the plugin on and off."""
    fork_server = lab.vllm(lab.newer)

    def run(env: dict[str, str]) -> float:
        return fork_server.run("benchmarks.startup:start", env, checkpoint=folder, **engine)

    runs = {"on": lambda: run(ON), "off": lambda: run(OFF)}
    return list(in_turn(runs, lab.sizes.rounds, title).values())


def start(checkpoint: str, **engine: Any) -> float:
    """A job: seconds until an engine is ready."""
    from vllm import LLM

    begin = time.perf_counter()
    LLM(checkpoint, **{**ENGINE, **engine})
    return time.perf_counter() - begin


def _head(lab: Lab) -> Line:
    runs = {"head": lambda: lab.vllm(lab.newer).run("benchmarks.startup:build", layers=100, hidden=lab.sizes.hidden)}
    sample = in_turn(runs, lab.sizes.rounds, "head of 100 layers")["head"]
    return Line(
        "head of a 100-layer Granite: found, built and classified",
        "nothing",
        "0.5 s",
        f"{sample.text('.2f')} s",
        "",
        "",
        sample.verdict(HEAD_LIMIT),
    )


def build(layers: int, hidden: int) -> float:
    """A job: seconds to find, build and classify the head of a Granite."""
    import torch
    from transformers import GraniteConfig, GraniteModel

    from vllm_tf_sinks.lm_head.build import build_head, causal_lm_class
    from vllm_tf_sinks.lm_head.classify import classify

    config = GraniteConfig(
        num_hidden_layers=layers, hidden_size=hidden, vocab_size=49_152, logits_scaling=8.0, pad_token_id=0
    )
    config.architectures = ["GraniteForCausalLM"]
    with torch.device("meta"):
        base = GraniteModel(config)
    begin = time.perf_counter()
    classify(build_head(causal_lm_class(config), config, base), hidden)
    return time.perf_counter() - begin


def _by_layers(lab: Lab) -> Table:
    rows = [_row(lab, "GraniteSWA", n, num_hidden_layers=n) for n in lab.sizes.layers]
    return Table("Start of an engine by layers (GraniteSWA, 4 heads)", _columns("layers"), rows)


def _by_heads(lab: Lab) -> Table:
    sizes = {"num_hidden_layers": 10}
    rows = [_row(lab, "GraniteSWA", n, **sizes, num_attention_heads=n, hidden_size=32 * n) for n in lab.sizes.heads]
    return Table("Start of an engine by heads (GraniteSWA, 10 layers)", _columns("heads"), rows)


def _columns(what: str) -> list[str]:
    return [what, "plugin on, s", "plugin off, s", "difference, s"]


def _row(lab: Lab, kind: str, number: int, **config: Any) -> list[str]:
    folder = lab.empty(kind, **config)
    options = {"load_format": "dummy", "kv_cache_memory_bytes": 2**26, "max_model_len": 64}
    on, off = _starts(lab, folder, f"start, {number}", options)
    return [str(number), on.text(".2f"), off.text(".2f"), (on - off).text("+.2f")]
