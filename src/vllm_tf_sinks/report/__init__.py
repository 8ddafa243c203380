# SPDX-License-Identifier: Apache-2.0
"""The report of `vllm-tf-sinks inspect`: how vLLM would serve a model, without the plugin and with it."""
