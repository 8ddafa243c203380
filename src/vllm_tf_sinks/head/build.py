# SPDX-License-Identifier: Apache-2.0
"""Build a model's ForCausalLM around a stand-in base model: its head alone, on the meta device."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from vllm_tf_sinks import hooks, vllm_api
from vllm_tf_sinks.head.standin import BaseStandIn, HeadError, Projection
from vllm_tf_sinks.swap import swapped


class Head:
    """A ForCausalLM without base model and projection: what is left is the head.

    Attributes:
        model: the ForCausalLM; its base models are stand-ins, its projection is `projection`.
        projection: what stands for the projection to the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, projection: Projection) -> None:
        self.model = model
        self.projection = projection
        self._base = [module for module in model.modules() if isinstance(module, BaseStandIn)]
        for base in self._base:
            base.stands_in = False
        self._call_by = self._arguments()
        self._described = hooks.plugins().ask("output_head", model=model)

    @property
    def name(self) -> str:
        """The name of the ForCausalLM class."""
        return type(self.model).__name__

    @property
    def base_built_with(self) -> dict[str, Any]:
        """The keyword arguments with which the ForCausalLM builds its base model."""
        return self._base[0].built_with if self._base else {}

    @property
    def base_weights(self) -> list[str]:
        """The names of the true base model's parameters."""
        bases = [stand_in.base for stand_in in self._base if stand_in.base is not None]
        return [name for base in bases for name, _ in base.named_parameters()]

    def keeps_in_float32(self, name: str) -> bool:
        """Whether Transformers keeps the parameter `name` in float32 in a model of any dtype."""
        return vllm_api.weights.is_kept_in_float32(self.model, name)

    def projection_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the logits that the projection gives in a model of `dtype`."""
        return torch.float32 if self.keeps_in_float32(f"{self.projection.name}.weight") else dtype

    @property
    def has_weights_in_float32(self) -> bool:
        """Whether Transformers keeps any weight of the head in float32."""
        weights = [name for name, _ in self.model.named_parameters()]
        return any(map(self.keeps_in_float32, [*weights, f"{self.projection.name}.weight"]))

    def _arguments(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """What the ForCausalLM is called with, besides the hidden states that the stand-in holds."""
        parameters = inspect.signature(self.model.forward).parameters
        flags = {name: False for name in ("use_cache", "output_attentions") if name in parameters}
        if "inputs_embeds" in parameters:
            return lambda hidden: {"inputs_embeds": hidden, **flags}
        return lambda hidden: {"input_ids": hidden[..., 0].long(), **flags}

    def as_written(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [1, N, V] of hidden states [1, N, H], by the ForCausalLM's own forward or what a plugin gave for it.

        Raises:
            HeadError: if the forward asks for more than hidden states, or gives no logits for each row.
        """
        for base in self._base:
            base.hidden_states, base.stands_in = hidden_states, True
        try:
            if self._described:
                logits = self._described.value(hidden_states)
            else:
                logits = self.model(**self._call_by(hidden_states)).logits
        except HeadError:
            raise
        except Exception as error:  # forward of any class, remote ones too
            raise HeadError(f"it needs more than hidden states: {type(error).__name__}: {error}") from error
        finally:
            for base in self._base:
                base.hidden_states, base.stands_in = None, False
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != hidden_states.shape[:-1]:
            raise HeadError(f"it gives no row of logits for each row of hidden states {tuple(hidden_states.shape)}")
        return logits


def causal_lm_class(config: Any, trust_remote_code: bool = False, **revisions: str | None) -> type[PreTrainedModel]:
    """The ForCausalLM class that Transformers would load a checkpoint with `config` into.

    That is the class that a plugin gives; else the architecture the config names, if Transformers has it
    and it generates text; else the class of the remote code, if that is trusted; else what the config's
    type is mapped to.

    Args:
        revisions: `revision` and `code_revision` of remote code.

    Raises:
        HeadError: if there is none.
    """
    if answer := hooks.plugins().ask("causal_lm_class", config=config):
        if not _is_model(answer.value):
            raise HeadError(
                f"The plugin {answer.plugin!r} of vllm-tf-sinks gives {answer.value!r} for a ForCausalLM class"
            )
        supplied: type[PreTrainedModel] = answer.value
        return supplied
    architecture = (getattr(config, "architectures", None) or [""])[0]
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_map:
        references = [auto_map.get("AutoModelForCausalLM"), *auto_map.values()]
        wanted = [r for r in references if isinstance(r, str) and r.rpartition(".")[2] == architecture]
        for reference in filter(None, [*wanted, references[0]]):
            remote: type[PreTrainedModel] = get_class_from_dynamic_module(reference, config._name_or_path, **revisions)
            return remote
    named = getattr(transformers, architecture, None)
    if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.can_generate():  # type: ignore[attr-defined]
        return named
    try:
        mapped: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise HeadError(
            f"{architecture or type(config).__name__} names no ForCausalLM class, in Transformers "
            f"{transformers.__version__} or in trusted remote code"
        ) from None
    return mapped


def build_head(cls: type[PreTrainedModel], config: Any, base: nn.Module | None) -> Head:
    """Build the head of the ForCausalLM class `cls`; parameters are on the meta device, buffers on the CPU.

    Args:
        base: the true base model, whose plain attributes a head may read.

    Raises:
        HeadError: naming the class, if it cannot be built or has no single projection.
    """
    stand_in = type("BaseStandIn", (BaseStandIn,), {"base": base})
    try:
        with _base_models_replaced(cls, stand_in), _bare_modules(), torch.device("cpu"):
            model = cls(copy.deepcopy(_config_for(cls, config))).eval()
        embeddings = _output_embeddings(model)
    except Exception as error:  # constructors of any class, remote ones too
        raise HeadError(f"{cls.__name__} cannot be built: {type(error).__name__}: {error}") from error
    names = [name for name, module in model.named_modules() if module is embeddings]
    if not names or not isinstance(embeddings, nn.Linear):
        raise HeadError(
            f"{cls.__name__} has no single projection to the vocabulary: its output embeddings are "
            f"{type(embeddings).__name__}"
        )
    projection = Projection(names[0], embeddings)
    parent, _, child = names[0].rpartition(".")
    setattr(model.get_submodule(parent), child, projection)
    return Head(model, projection)


def _output_embeddings(model: PreTrainedModel) -> Any:
    """What the model says its projection is; a multimodal class may leave that to the ForCausalLM it nests."""
    candidates = [model, *(m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))]
    answers = [candidate.get_output_embeddings() for candidate in candidates]
    return next((answer for answer in answers if isinstance(answer, nn.Linear)), answers[0])


def _config_for(cls: type[PreTrainedModel], config: Any) -> Any:
    """The part of `config` that `cls` takes: a text model is built from a multimodal config's text part."""
    text = config.get_text_config()
    return text if isinstance(text, cls.config_class or object) and not isinstance(config, cls.config_class) else config


@contextmanager
def _base_models_replaced(cls: type[PreTrainedModel], stand_in: type[BaseStandIn]) -> Iterator[None]:
    """Let the constructors of `cls` find `stand_in` where they name the class of a base model.

    A second decoder costs time, and counts as a second model to vLLM's compilation. A ForCausalLM that a
    multimodal class nests is no base model: it is built, around stand-ins of its own.
    """

    class AutoNested:
        @staticmethod
        def from_config(config: Any, **_: Any) -> PreTrainedModel:
            nested: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
            with _base_models_replaced(nested, stand_in):
                return nested(config)

    with ExitStack() as stack:
        for ancestor in cls.__mro__:
            if not issubclass(ancestor, PreTrainedModel) or ancestor is PreTrainedModel:
                continue
            if (constructor := vars(ancestor).get("__init__")) is None:
                continue
            function = inspect.unwrap(constructor)
            replaced: dict[str, Any] = {}
            for name in set(function.__code__.co_names) & set(function.__globals__):
                value = function.__globals__[name]
                if value is AutoModelForCausalLM:
                    replaced[name] = AutoNested
                elif _is_base_model(value):
                    replaced[name] = stand_in
                elif _is_model(value) and value is not cls:
                    stack.enter_context(_base_models_replaced(value, stand_in))
            stack.enter_context(swapped(function.__globals__, replaced))
        yield


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PreTrainedModel) and value is not PreTrainedModel


def _is_base_model(value: Any) -> bool:
    return value is AutoModel or (_is_model(value) and not value.can_generate())


@contextmanager
def _bare_modules() -> Iterator[None]:
    """Within the context parameters are on the meta device, and models are neither initialised nor tied.

    Buffers stay as they are. Tying would look for the weights of the base model.
    """
    register, post_init = nn.Module.register_parameter, PreTrainedModel.post_init

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    def no_post_init(self: PreTrainedModel) -> None:
        pass

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    PreTrainedModel.post_init = no_post_init
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        PreTrainedModel.post_init = post_init


def tied_to(model: PreTrainedModel, name: str) -> str | None:
    """The parameter that Transformers ties `name` to when the config says tie_word_embeddings, or None.

    A ForCausalLM that a multimodal class nests declares its ties under its own names.
    """
    for prefix, owner in model.named_modules():
        start = f"{prefix}." if prefix else ""
        if not isinstance(owner, PreTrainedModel) or not name.startswith(start):
            continue
        if (target := _tied_by(owner, name.removeprefix(start))) is not None:
            return f"{start}{target}"
    return None


def _tied_by(model: PreTrainedModel, name: str) -> str | None:
    tied = getattr(model, "_tied_weights_keys", None) or {}
    if not isinstance(tied, dict):  # remote code of Transformers 4 lists the tied names only
        return "input embeddings" if name in tied else None
    for pattern, target in tied.items():
        if re.fullmatch(pattern, name):
            return str(target)
        if name.startswith(f"{pattern}."):  # a whole module is tied
            return f"{target}{name.removeprefix(pattern)}"
    return None
