# SPDX-License-Identifier: Apache-2.0
"""Find out from a model's config and code how vLLM would serve it, without weights, a GPU or an engine."""

import importlib
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from vllm_tf_sinks import compat
from vllm_tf_sinks.attention.checks import check_dry_run
from vllm_tf_sinks.attention.dry_run import perform_dry_run
from vllm_tf_sinks.attention.sink_checks import check_model, refuse_by_config
from vllm_tf_sinks.attention.sink_finder import Sink, find_sinks
from vllm_tf_sinks.errors import HeadError, SinkError, UnsupportedModelError
from vllm_tf_sinks.lm_head.build import Head, build_head, causal_lm_class
from vllm_tf_sinks.lm_head.classify import HeadSpec, Kind, classify
from vllm_tf_sinks.lm_head.describe import describe
from vllm_tf_sinks.patches.patcher import apply
from vllm_tf_sinks.report import upstream
from vllm_tf_sinks.settings import VARIABLE, Settings, choose

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass
class SinkReport:
    """The sinks of a model.

    Attributes:
        layers: indices of the layers that have a sink.
        of_layers: the number of all layers.
        parameters: names of the sinks, one for each of `layers`.
        heads: the distinct numbers of elements of a sink, over all ranks.
        heads_a_rank: the same on each tensor-parallel rank.
        dtype: the dtype of the sinks.
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
        model: the name of the ForCausalLM class.
        kind: how the head runs: `projection only`, `elementwise` or `full`, and `eager` if it is not traced.
        steps: the operations on the hidden states, x.
        weights: the parameters of the head.
    """

    model: str
    kind: str
    steps: list[str]
    weights: list[upstream.WeightReport]


@dataclass
class Inspection:
    """How vLLM would serve a model.

    Attributes:
        model: path or hub id.
        architecture: the architecture in the config.
        vllm: the version of vLLM.
        dtype: the dtype in which vLLM would serve the model.
        tensor_parallel_size: the number of tensor-parallel ranks.
        sinks: None if the model has no sinks.
        head: None if the model has no head, or one that is refused.
        alone: what upstream vLLM computes wrongly or refuses.
        plugin: what the plugin does about it.
        features: features of vLLM -> whether the model can use each, and the reason if not.
        outcome: `right`, `wrong` (the plugin is off, and needed) or `refused`.
        reasons: why the outcome is not `right`.
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
        """Record that vLLM or the plugin would refuse to load the model."""
        self.outcome = REFUSED
        self.reasons.append(str(reason))


class _Unbuilt(nn.Module):
    """A stub for vLLM's model, which holds a Transformers model on the meta device.

    Raises:
        SinkError: naming the model, if its type is one that `refuse_by_config` refuses.
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
    """Find out how vLLM would serve `model`.

    Args:
        model: path or hub id.
        settings: the settings of the plugin.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether to run code of the checkpoint.
        ranks: the number of tensor-parallel ranks.
        max_model_len: the largest number of tokens of a sequence. None is the config's.

    Raises:
        OSError: if there is no such model.
        ValueError: if its config cannot be read.
    """
    importlib.import_module(compat.engine.BACKEND)  # registers vLLM's attention with Transformers
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    name = ", ".join(config.architectures or [type(config).__name__])
    report = Inspection(model, name, compat.engine.version(), tensor_parallel_size=ranks)
    try:
        vllm_config = compat.engine.configuration(model, revision, trust_remote_code, max_model_len)
        options = deepcopy(vllm_config.model_config)  # the original is for `_build`
        compat.engine.use_config_of_transformers(options)
        report.dtype = _name(options.dtype)
    except Exception as error:  # vLLM refuses a model by any error
        report.refuse(f"vLLM itself refuses it: {error}")
        return report
    try:
        unbuilt = _Unbuilt(options, ranks)
    except SinkError as error:
        report.refuse(error)
        return report
    except Exception as error:  # constructors of any class, also of remote code
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
        check_dry_run(unbuilt, perform_dry_run(unbuilt.model, unbuilt.text_config))
    except UnsupportedModelError as error:
        _report_guard(report, error, settings)


def _build(report: Inspection, vllm_config: Any, settings: Settings) -> None:
    """Build the model by patched vLLM on one rank, and report a refusal: some checks need vLLM's layers."""
    choose(Settings())
    apply()
    try:
        with compat.engine.built_on_meta(vllm_config):
            pass
    except UnsupportedModelError as error:
        _report_guard(report, error, settings)
    except (SinkError, HeadError) as error:
        report.refuse(error)
    except Exception as error:  # vLLM may raise anything for a model that it cannot build
        # vLLM 0.27 reads the value of the scale of Gemma's embeddings, which a meta tensor does not have
        if "on meta tensors" not in str(error):
            report.refuse(f"vLLM itself refuses it: {error}")


def _report_guard(report: Inspection, error: UnsupportedModelError, settings: Settings) -> None:
    faults = [f"serves it, although: {error}"]
    report.alone += faults
    if "guard" in settings.groups:
        report.refuse(error)
    else:
        _report_off(report, faults, settings)


def _inspect_sinks(report: Inspection, unbuilt: _Unbuilt, settings: Settings) -> None:
    try:
        sinks = find_sinks(unbuilt)
        report.sinks = _sink_report(sinks, unbuilt) if sinks else None
        if sinks:
            check_model(unbuilt, sinks)
    except ValueError as error:  # a SinkError, or a HookError
        report.refuse(error)
        return
    faults = upstream.faults_with_sinks(unbuilt, sinks)
    report.alone += faults
    if "sinks" in settings.groups and sinks:
        report.plugin.append("builds each attention layer with its rank's slice of the sink")
    elif faults:
        _report_off(report, faults, settings)


def _sink_report(sinks: list[Sink], unbuilt: _Unbuilt) -> SinkReport:
    heads = list(dict.fromkeys(sink.num_heads for sink in sinks))
    float32 = compat.weights.is_kept_in_float32(unbuilt.model, sinks[0].parameter_name)
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
        report.plugin.append("does not change the output head: the model serves pooling requests")
        return
    try:
        cls = causal_lm_class(
            config, options.trust_remote_code, revision=options.revision, code_revision=options.code_revision
        )
        head = build_head(cls, config, unbuilt.model)
        spec = classify(head, unbuilt.text_config.hidden_size)
    except HeadError as error:
        if "head" in settings.groups:
            report.refuse(error)
        else:
            _report_off(report, [f"runs the head as a plain lm_head, although: {error}"], settings)
        return
    steps = describe(head, unbuilt.text_config.hidden_size)
    report.head = HeadReport(head.name, spec.describe(), steps, upstream.weights_of(head, config))
    faults = upstream.faults_with_head(head, unbuilt.model, config)
    report.alone += faults
    if "head" in settings.groups:
        report.plugin.append(_ACTIONS[spec.kind] + ("" if spec.is_traced else ", by the eager code of the class"))
        report.features |= _features(head, spec)
    elif faults:
        _report_off(report, faults, settings)


_ACTIONS = {
    Kind.PROJECTION: "does not change compute_logits of vLLM",
    Kind.ELEMENTWISE: "scales or caps the logits in place, on each rank's shard",
    Kind.FULL: "runs the full head, on gathered logits",
}


def _features(head: Head, spec: HeadSpec) -> dict[str, str]:
    sharded = "yes"
    if spec.kind is Kind.FULL:
        sharded = "no: the head needs all logits of a row"
    elif not compat.heads.projects_without_gather():
        sharded = "no: this vLLM does not have this feature"
    limit = compat.lora.LARGEST_VOCABULARY
    adapted = f"yes, on {head.projection.name}"
    if head.projection.out_features > limit:
        adapted = f"no: vLLM's LoRA takes no vocabulary above {limit:,}"
    return {"LoRA on the head": adapted, "batch-sharded sampling": sharded}


def _report_off(report: Inspection, faults: list[str], settings: Settings) -> None:
    """Record the faults of upstream vLLM that the plugin would correct, but it is off."""
    refused = any(fault.startswith("refuses") for fault in faults)
    if report.outcome is not REFUSED:
        report.outcome = REFUSED if refused else WRONG
    report.reasons.append(
        f"{VARIABLE}={settings.value} turns off the part of the plugin that this model needs. vLLM "
        f"{'; '.join(faults).rstrip('.')}. Set {VARIABLE}=1."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
