# SPDX-License-Identifier: Apache-2.0
"""Tell from a model's config and code how vLLM would serve it, without weights, a GPU or an engine."""

import importlib
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from vllm_tf_sinks import stock, vllm_api
from vllm_tf_sinks.guards.checks import check_rehearsal
from vllm_tf_sinks.guards.errors import GuardError
from vllm_tf_sinks.guards.rehearsal import rehearse
from vllm_tf_sinks.head.build import Head, build_head, causal_lm_class
from vllm_tf_sinks.head.classify import Kind, Plan, classify
from vllm_tf_sinks.head.describe import describe
from vllm_tf_sinks.head.standin import HeadError
from vllm_tf_sinks.patches.apply import apply
from vllm_tf_sinks.settings import VARIABLE, Settings, choose
from vllm_tf_sinks.sinks.find import Sink, SinkError, find_sinks
from vllm_tf_sinks.sinks.guards import check_model, refuse_by_config

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass
class SinkReport:
    """The sinks of a model.

    Attributes:
        layers: indices of the layers that have one.
        of_layers: how many layers the model has.
        parameters: names, one a layer.
        heads: how many numbers each has, over all ranks; one entry for each that occurs.
        heads_a_rank: the same on each tensor-parallel rank.
        dtype: what they are kept in.
    """

    layers: list[int]
    of_layers: int
    parameters: list[str]
    heads: list[int]
    heads_a_rank: list[int]
    dtype: str


@dataclass
class HeadReport:
    """The output head of a model.

    Attributes:
        model: the ForCausalLM class.
        kind: how it is run.
        steps: what it does to the hidden states, x.
        weights: its parameters.
    """

    model: str
    kind: str
    steps: list[str]
    weights: list[stock.Weight]


@dataclass
class Inspection:
    """How vLLM would serve a model.

    Attributes:
        model: path or hub id.
        architecture: the class that Transformers builds.
        vllm: vLLM's version.
        dtype: what it would be served in.
        sinks: None where it has none.
        head: None where it has none, or none that can be described.
        alone: what stock vLLM gets wrong or refuses.
        plugin: what the plugin does about it.
        features: what is available, and why not.
        outcome: `right`, `wrong` (the plugin is off, and needed) or `refused`.
        reasons: why it is not right.
    """

    model: str
    architecture: str
    vllm: str
    dtype: str = ""
    tensor_parallel_size: int = 1
    sinks: SinkReport | None = None
    head: HeadReport | None = None
    alone: list[str] = field(default_factory=list)
    plugin: list[str] = field(default_factory=list)
    features: dict[str, str] = field(default_factory=dict)
    outcome: str = RIGHT
    reasons: list[str] = field(default_factory=list)

    def refuse(self, reason: object) -> None:
        """Note that vLLM or the plugin would refuse to load the model."""
        self.outcome = REFUSED
        self.reasons.append(str(reason))


class _Unbuilt(nn.Module):
    """What stands for vLLM's model around a Transformers model, which is on the meta device and as that built it.

    Raises:
        SinkError: if the config alone tells that it cannot be served.
    """

    def __init__(self, options: Any, ranks: int) -> None:
        super().__init__()
        self.model_config = options
        self.config, self.text_config = options.hf_config, options.hf_text_config
        self.parallel_config = SimpleNamespace(tensor_parallel_size=ranks)
        self.cache_config = SimpleNamespace(block_size=0, cache_dtype="auto")
        refuse_by_config(lambda _: None)(self)
        self.text_config._attn_implementation = "vllm"
        with torch.device("meta"):
            self.model = AutoModel.from_config(
                self.config, dtype=options.dtype, trust_remote_code=options.trust_remote_code
            )


def inspect_model(
    model: str,
    settings: Settings,
    revision: str | None = None,
    trust_remote_code: bool = False,
    ranks: int = 1,
    max_model_len: int | None = None,
) -> Inspection:
    """How vLLM would serve `model` under `settings` on `ranks` tensor-parallel ranks.

    Raises:
        OSError: if there is no such model.
        ValueError: if its config cannot be read.
    """
    importlib.import_module(vllm_api.engine.BACKEND)  # makes its attention known to Transformers
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    name = ", ".join(config.architectures or [type(config).__name__])
    report = Inspection(model, name, vllm_api.engine.version(), tensor_parallel_size=ranks)
    try:
        vllm_config = vllm_api.engine.configuration(model, revision, trust_remote_code, max_model_len)
        options = deepcopy(vllm_config.model_config)  # vLLM's own is for building the model
        vllm_api.engine.use_config_of_transformers(options)
        report.dtype = _name(options.dtype)
    except Exception as error:  # whatever vLLM raises at a model that it does not take
        report.refuse(f"vLLM itself refuses it: {error}")
        return report
    try:
        unbuilt = _Unbuilt(options, ranks)
    except SinkError as error:
        report.refuse(error)
        return report
    except Exception as error:  # constructors of any class, remote ones too
        report.refuse(f"Transformers cannot build its base model: {type(error).__name__}: {error}")
        return report
    _inspect_attention(report, unbuilt, settings)
    _inspect_sinks(report, unbuilt, settings)
    _inspect_head(report, unbuilt, settings)
    if report.outcome is not REFUSED:
        _build(report, vllm_config, settings)
    report.features["pipeline parallel"] = (
        "yes, by the model's own plan" if unbuilt.model.supports_pp_plan else "yes, by a plan that vLLM infers"
    )
    return report


def _inspect_attention(report: Inspection, unbuilt: _Unbuilt, settings: Settings) -> None:
    try:
        check_rehearsal(unbuilt, rehearse(unbuilt.model, unbuilt.text_config))
    except GuardError as error:
        _guarded(report, error, settings)


def _build(report: Inspection, vllm_config: Any, settings: Settings) -> None:
    """Build the model as vLLM does, patched, on one rank, and see who refuses it: some checks need vLLM's layers."""
    choose(Settings())
    apply()
    try:
        with vllm_api.engine.built_on_meta(vllm_config):
            pass
    except GuardError as error:
        _guarded(report, error, settings)
    except (SinkError, HeadError) as error:
        report.refuse(error)
    except Exception as error:  # whatever vLLM raises at a model that it cannot build
        if "on meta tensors" not in str(error):  # vLLM 0.27 reads the scale of Gemma's embeddings: there is no telling
            report.refuse(f"vLLM itself refuses it: {error}")


def _guarded(report: Inspection, error: GuardError, settings: Settings) -> None:
    faults = [f"serves it all the same, though: {error}"]
    report.alone += faults
    if "guard" in settings.groups:
        report.refuse(error)
    else:
        _off(report, faults, settings)


def _inspect_sinks(report: Inspection, unbuilt: _Unbuilt, settings: Settings) -> None:
    try:
        sinks = find_sinks(unbuilt)
        report.sinks = _sink_report(sinks, unbuilt) if sinks else None
        if sinks:
            check_model(unbuilt, sinks)
    except ValueError as error:  # a SinkError, or a HookError
        report.refuse(error)
        return
    faults = stock.faults_with_sinks(unbuilt, sinks)
    report.alone += faults
    if "sinks" in settings.groups and sinks:
        report.plugin.append("hands each attention layer its rank's slice of the sink")
    elif faults:
        _off(report, faults, settings)


def _sink_report(sinks: list[Sink], unbuilt: _Unbuilt) -> SinkReport:
    heads = list(dict.fromkeys(sink.num_heads for sink in sinks))
    float32 = vllm_api.weights.is_kept_in_float32(unbuilt.model, sinks[0].parameter_name)
    return SinkReport(
        layers=[sink.layer_index for sink in sinks],
        of_layers=unbuilt.text_config.num_hidden_layers,
        parameters=[sink.parameter_name for sink in sinks],
        heads=heads,
        heads_a_rank=[n // unbuilt.parallel_config.tensor_parallel_size for n in heads],
        dtype="float32" if float32 else _name(unbuilt.model_config.dtype),
    )


def _inspect_head(report: Inspection, unbuilt: _Unbuilt, settings: Settings) -> None:
    options, config = unbuilt.model_config, unbuilt.config
    if options.runner_type == "pooling":
        report.plugin.append("leaves the output head alone: the model is served for pooling")
        return
    try:
        cls = causal_lm_class(
            config, options.trust_remote_code, revision=options.revision, code_revision=options.code_revision
        )
        head = build_head(cls, config, unbuilt.model)
        plan = classify(head, unbuilt.text_config.hidden_size)
    except HeadError as error:
        if "head" in settings.groups:
            report.refuse(error)
        else:
            _off(report, [f"takes the head for a plain lm_head, though: {error}"], settings)
        return
    steps = describe(head, unbuilt.text_config.hidden_size)
    report.head = HeadReport(head.name, plan.describe(), steps, stock.weights_of(head, config))
    faults = stock.faults_with_head(head, unbuilt.model, config)
    report.alone += faults
    if "head" in settings.groups:
        report.plugin.append(_DONE[plan.kind] + ("" if plan.flat else ", as it is written"))
        report.features |= _features(head, plan)
    elif faults:
        _off(report, faults, settings)


_DONE = {
    Kind.PROJECTION: "leaves logits to vLLM's own function",
    Kind.ELEMENTWISE: "adjusts the logits in place, on each rank's shard",
    Kind.WHOLE: "runs the head whole, on gathered logits",
}


def _features(head: Head, plan: Plan) -> dict[str, str]:
    sharded = "yes"
    if plan.kind is Kind.WHOLE:
        sharded = "no: the head needs whole rows of logits"
    elif not vllm_api.heads.projects_without_gather():
        sharded = "no: this vLLM does not have it"
    limit = vllm_api.lora.LARGEST_VOCABULARY
    adapted = f"yes, on {head.projection.name}"
    if head.projection.out_features > limit:
        adapted = f"no: vLLM's LoRA takes no vocabulary above {limit:,}"
    return {"LoRA on the head": adapted, "batch-sharded sampling": sharded}


def _off(report: Inspection, faults: list[str], settings: Settings) -> None:
    """The plugin would help, and is off."""
    refused = any(fault.startswith("refuses") for fault in faults)
    if report.outcome is not REFUSED:
        report.outcome = REFUSED if refused else WRONG
    report.reasons.append(f"{VARIABLE}={settings.value} leaves to vLLM what it " + "; ".join(faults))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
