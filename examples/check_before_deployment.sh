#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Is a checkpoint safe to serve here? Ends with the exit status of the first step that says no.
#
#     bash examples/check_before_deployment.sh MODEL
set -euo pipefail
vllm-tf-sinks doctor       # does the plugin fit this vLLM?
vllm-tf-sinks inspect "$1" # in seconds, from the config alone: sinks, head, and what would be refused
vllm-tf-sinks verify "$1"  # with weights: vLLM's logprobs against Hugging Face's
