# SPDX-License-Identifier: Apache-2.0
"""Build the head of a model: its ForCausalLM class, with stubs for the base model and the projection."""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from vllm_tf_sinks import compat, hooks
from vllm_tf_sinks.errors import HeadError
from vllm_tf_sinks.lm_head.stubs import BaseStub, Projection


class Head:
    """The output head of a model: its ForCausalLM, with stubs for the base model and the projection.

    Attributes:
        model: the ForCausalLM. Its parameters are on the meta device until `weights.materialise`.
        projection: the stub for the projection to the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, projection: Projection) -> None:
        self.model = model
        self.projection = projection
        self._stubs = [module for module in model.modules() if isinstance(module, BaseStub)]
        for stub in self._stubs:
            stub.is_active = False
        self._arguments_for = self._make_arguments()
        self._hook_result = hooks.plugins().call("output_head", model=model)

    @property
    def name(self) -> str:
        """The name of the ForCausalLM class."""
        return type(self.model).__name__

    @property
    def base_built_with(self) -> dict[str, Any]:
        """The keyword arguments with which the ForCausalLM builds its base model."""
        return self._stubs[0].built_with if self._stubs else {}

    @property
    def base_weights(self) -> list[str]:
        """The names of the real base model's parameters."""
        bases = [stub.base for stub in self._stubs if stub.base is not None]
        return [name for base in bases for name, _ in base.named_parameters()]

    def keeps_in_float32(self, name: str) -> bool:
        """Whether Transformers keeps the parameter `name` in float32 in a model of any dtype."""
        return compat.weights.is_kept_in_float32(self.model, name)

    def projection_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the projection's logits in a model of `dtype`."""
        return torch.float32 if self.keeps_in_float32(f"{self.projection.name}.weight") else dtype

    @property
    def has_weights_in_float32(self) -> bool:
        """Whether Transformers keeps any weight of the head in float32."""
        weights = [name for name, _ in self.model.named_parameters()]
        return any(map(self.keeps_in_float32, [*weights, f"{self.projection.name}.weight"]))

    def _make_arguments(self) -> Callable[[torch.Tensor], dict[str, Any]]:
        """Return a function of hidden states to the arguments of the ForCausalLM. The stub holds the hidden states."""
        parameters = inspect.signature(self.model.forward).parameters
        flags = {name: False for name in ("use_cache", "output_attentions") if name in parameters}
        if "inputs_embeds" in parameters:
            return lambda hidden: {"inputs_embeds": hidden, **flags}
        return lambda hidden: {"input_ids": hidden[..., 0].long(), **flags}

    def run_eagerly(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute logits [1, N, V] of hidden states [1, N, H], by the ForCausalLM's forward or a hook's function.

        Raises:
            HeadError: if the forward needs more than hidden states, or does not return logits for each row.
        """
        for stub in self._stubs:
            stub.hidden_states, stub.is_active = hidden_states, True
        try:
            if self._hook_result:
                logits = self._hook_result.value(hidden_states)
            else:
                logits = self.model(**self._arguments_for(hidden_states)).logits
        except HeadError:
            raise
        except Exception as error:  # forward of any class, also of remote code
            raise HeadError(f"it needs more than hidden states: {type(error).__name__}: {error}") from error
        finally:
            for stub in self._stubs:
                stub.hidden_states, stub.is_active = None, False
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != hidden_states.shape[:-1]:
            raise HeadError(f"it does not return logits for each row of hidden states {tuple(hidden_states.shape)}")
        return logits


def causal_lm_class(config: Any, trust_remote_code: bool = False, **revisions: str | None) -> type[PreTrainedModel]:
    """The ForCausalLM class with which Transformers would load a checkpoint that has `config`.

    The first of these that exists: the class that a hook returns; the class of trusted remote code; the
    architecture in the config, if it is a class of Transformers that generates text; the class to which
    `AutoModelForCausalLM` maps the config's type.

    Args:
        config: the config of the checkpoint.
        trust_remote_code: whether to import remote code.
        revisions: `revision` and `code_revision` of remote code.

    Raises:
        HeadError: if there is none, or if a hook returns something else than a class of models.
    """
    if result := hooks.plugins().call("causal_lm_class", config=config):
        if not _is_model(result.value):
            raise HeadError(
                f"The hook causal_lm_class of the plugin {result.plugin!r} returned {result.value!r}, which is not a "
                "subclass of PreTrainedModel"
            )
        supplied: type[PreTrainedModel] = result.value
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
            f"{architecture or type(config).__name__} has no ForCausalLM class in Transformers "
            f"{transformers.__version__} or in trusted remote code"
        ) from None
    return mapped


def build_head(cls: type[PreTrainedModel], config: Any, base: nn.Module | None) -> Head:
    """Build the head of the ForCausalLM class `cls`, with parameters on the meta device and buffers on the CPU.

    Args:
        cls: the ForCausalLM class.
        config: the config of the checkpoint.
        base: the real base model, whose attributes a head may read.

    Raises:
        HeadError: naming the class, if it cannot be built, or its output embeddings are not one linear layer.
    """
    stub = type("BaseStub", (BaseStub,), {"base": base})
    try:
        with _base_models_replaced(cls, stub), _parameters_on_meta(), torch.device("cpu"):
            model = cls(copy.deepcopy(_config_for(cls, config))).eval()
        embeddings = _output_embeddings(model)
    except Exception as error:  # constructors of any class, also of remote code
        raise HeadError(f"{cls.__name__} cannot be built: {type(error).__name__}: {error}") from error
    names = [name for name, module in model.named_modules() if module is embeddings]
    is_linear = isinstance(embeddings, nn.Linear) and type(embeddings).forward is nn.Linear.forward
    if not names or not is_linear:
        raise HeadError(
            f"{cls.__name__} has no single projection to the vocabulary: its output embeddings are a "
            f"{type(embeddings).__name__}, not one plain linear layer"
        )
    projection = Projection(names[0], embeddings)
    parent, _, child = names[0].rpartition(".")
    setattr(model.get_submodule(parent), child, projection)
    return Head(model, projection)


def _output_embeddings(model: PreTrainedModel) -> Any:
    """The output embeddings of a model, or of the ForCausalLM that a multimodal class nests."""
    candidates = [model, *(m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))]
    embeddings = [candidate.get_output_embeddings() for candidate in candidates]
    return next((each for each in embeddings if isinstance(each, nn.Linear)), embeddings[0])


def _config_for(cls: type[PreTrainedModel], config: Any) -> Any:
    """`config`, or its text config if `cls` is the text model of a multimodal config."""
    text = config.get_text_config()
    return text if isinstance(text, cls.config_class or object) and not isinstance(config, cls.config_class) else config


@contextmanager
def _base_models_replaced(cls: type[PreTrainedModel], stub: type[BaseStub]) -> Iterator[None]:
    """Within the context, constructors of `cls` build `stub` in place of a base model.

    A second decoder costs time, and vLLM's compilation counts it as a second model. A ForCausalLM that a
    multimodal class nests is not a base model: it is built with stubs of its own.
    """

    class AutoNested:
        @staticmethod
        def from_config(config: Any, **_: Any) -> PreTrainedModel:
            nested: type[PreTrainedModel] = AutoModelForCausalLM._model_mapping[type(config)]
            with _base_models_replaced(nested, stub):
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
                    replaced[name] = stub
                elif _is_model(value) and value is not cls:
                    stack.enter_context(_base_models_replaced(value, stub))
            if replaced:
                stack.enter_context(patch.multiple(sys.modules[function.__module__], **replaced))
        yield


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, PreTrainedModel) and value is not PreTrainedModel


def _is_base_model(value: Any) -> bool:
    return value is AutoModel or (_is_model(value) and not value.can_generate())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the context, new parameters are on the meta device, and models are neither initialised nor tied.

    Tying would need the weights of the base model. Buffers do not change.
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
    """The parameter to which Transformers ties the parameter `name` under `tie_word_embeddings`, or None.

    A ForCausalLM that a multimodal class nests declares its ties by its own names, without a prefix.
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
    if not isinstance(tied, dict):  # remote code for Transformers 4 has a list of the tied names
        return "input embeddings" if name in tied else None
    for pattern, target in tied.items():
        if re.fullmatch(pattern, name):
            return str(target)
        if name.startswith(f"{pattern}."):  # the pattern is the name of a module
            return f"{target}{name.removeprefix(pattern)}"
    return None
