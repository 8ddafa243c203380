# SPDX-License-Identifier: Apache-2.0
"""A TintedLlama of the examples, served with and without the package of hooks that belongs to it."""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from support.jobs import ENGINE, call, rows_of
from vllm_tf_sinks import hookimpl

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "hooks"


def tinted_llama(name: str, folder: str) -> str:
    """Save a random TintedLlama to `folder`, whose config names no class with a head."""
    import torch

    from support.checkpoints import SIZES

    sys.path.insert(0, str(EXAMPLE))
    from tinted_llama import TintedLlamaConfig, TintedLlamaForCausalLM

    torch.manual_seed(0)
    model = TintedLlamaForCausalLM(TintedLlamaConfig(**SIZES, logit_divisor=0.6))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("tint"):
                parameter.uniform_(-8, 24).round_().div_(4)  # bfloat16 holds them
            else:
                parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    shutil.copy(EXAMPLE / "tinted_llama.py", folder)
    path = Path(folder) / "config.json"
    remote = {"AutoConfig": "tinted_llama.TintedLlamaConfig", "AutoModel": "tinted_llama.TintedLlamaModel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": remote}))
    return folder


def reference(checkpoint: str, sequences: list[list[int]], **_) -> list:
    """As `support.jobs.reference_rows`, by the class that the config does not name."""
    import torch

    sys.path.insert(0, str(EXAMPLE))
    from tinted_llama import TintedLlamaForCausalLM

    model = TintedLlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [
            model(torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1).numpy()
            for tokens in sequences
        ]


def install(packages: dict[str, str]) -> None:
    """Make packages look installed: by name, the module that each has as its entry point."""
    folder = Path(tempfile.mkdtemp())
    for name, module in packages.items():
        info = folder / f"{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm_tf_sinks]\n{name} = {module}\n")
    sys.path[:0] = [str(folder), str(EXAMPLE)]


class Observer:
    """A plugin that only looks."""

    told: ClassVar[list] = []

    @staticmethod
    @hookimpl
    def decided(decision):
        Observer.told.append((decision.subject, decision.outcome, decision.refused))


def served(checkpoint: str, packages: dict[str, str], **engine) -> tuple[list, list[tuple]]:
    """The rows, and what the observer was told; no plugin is asked once the model is built."""
    from vllm import LLM

    from vllm_tf_sinks import hooks

    install({**packages, "observer": f"{__name__}:Observer"})
    llm = LLM(checkpoint, **{**ENGINE, **engine})
    assert not hooks.plugins().broken
    hooks.plugins.cache_clear()
    rows = rows_of(llm)
    assert not hooks.plugins.cache_info().misses
    return rows, Observer.told


def refused(checkpoint: str, packages: dict[str, str], **engine) -> tuple[str, list[tuple]]:
    """The error at start-up, and what the observer was told."""
    try:
        served(checkpoint, packages, **engine)
    except ValueError as error:
        return str(error), Observer.told
    raise AssertionError("it is served")


def served_with_example(checkpoint: str, tamper: str = "", **engine) -> list:
    """The rows, with the example's package installed as its own pyproject says."""
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    if tamper:
        call(tamper)
    return served(checkpoint, project["entry-points"]["vllm_tf_sinks"], **engine)[0]
